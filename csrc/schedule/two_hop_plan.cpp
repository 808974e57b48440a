// Event-ordered two-hop broadcast: the root's port carries the payload once.
//
// The payload is cut into chunks, and a chunk into n - 1 shards. Step c: the root sends shard i of
// chunk c to non-root i. Step c + 1: non-root i forwards it to the other n - 2, while the root
// sends the next chunk. The root has no shard: it would have to send that one n - 1 times.
#include "plan_algorithms.h"
#include "plan_builder.h"

namespace pyparallel {
namespace {

// What a link carries while a step is started: an event across devices costs about 8 us (a guess
// until measured), in which 350 GB/s move 2.8 MB.
constexpr u64 kStepBytes = 4 << 20;

struct TwoHop {
  u32 root;
  std::span<const Segment> segments;
  std::vector<u32> peers;
  bool direct;
  StageSlots slots;
  PlanBuilder builder;
  Range chunk{};

  // Where a byte of the chunk is at a non-root rank until it is unpacked.
  Place arrived(u32 rank, u32 c, u64 at) const {
    if (direct) return {rank, Memory::kOutput, 0, at};
    return slots.packed(rank, c, at - chunk.begin);
  }

  void send(u32 c) {
    for (u32 i = 0; i < peers.size(); ++i) {
      visit_segments(segments, shard(i), [&](u32 k, Range range) {
        const Place to = arrived(peers[i], c, range.begin);
        builder.copy(c, root, {root, Memory::kInput, k, range.begin - segments[k].offset}, {&to, 1},
                     range.bytes);
      });
    }
  }

  void forward(u32 c) {
    std::vector<Place> others;
    for (u32 i = 0; i < peers.size(); ++i) {
      // Padding may be run across in stages, but outputs are not touched there.
      for (const Run& run : find_runs(segments, {}, shard(i), direct ? 0 : kJoinedGap)) {
        others.clear();
        for (u32 peer : peers) {
          if (peer != peers[i]) others.push_back(arrived(peer, c, run.range.begin));
        }
        builder.copy(c + 1, peers[i], arrived(peers[i], c, run.range.begin), others,
                     run.range.bytes);
      }
    }
  }

  void unpack(u32 c) {
    for (const Run& run : find_runs(segments, {}, chunk, 0)) {
      for (u32 peer : peers) {
        const Place output{peer, Memory::kOutput, 0, run.range.begin};
        builder.copy(c + 2, peer, arrived(peer, c, run.range.begin), {&output, 1}, run.range.bytes);
      }
    }
  }

 private:
  Range shard(u32 i) const { return part_range(chunk, static_cast<u32>(peers.size()), i); }
};

}  // namespace

// k chunks take k + 1 steps and the time of S (1 + (n - 2) / ((n - 1) k)) bytes on a link. With
// (n - 2) / (n - 1) taken as 1 that is least for k = sqrt(S / kStepBytes), here rounded up.
u64 two_hop_chunk_bytes(u64 bytes) {
  u64 chunks = 1;
  while (chunks * chunks < divide_up(bytes, kStepBytes)) ++chunks;
  return max_u64(round_up(divide_up(bytes, chunks), kUnit), kUnit);
}

EventPlan two_hop_plan(u32 nranks, u32 root, std::span<const Segment> segments, Staging staging,
                       u64 chunk_bytes) {
  TwoHop plan{root, segments, other_ranks(nranks, root), staging.direct, {staging.slot_bytes}, {}};
  if (plan.peers.empty()) return {};
  if (!staging.direct) chunk_bytes = min_u64(chunk_bytes, staging.slot_bytes);
  const Range whole = span_of(segments);
  for (u32 c = 0; c < piece_count(whole, chunk_bytes); ++c) {
    plan.chunk = piece_range(whole, chunk_bytes, c);
    plan.send(c);
    plan.forward(c);
    if (!staging.direct) plan.unpack(c);
  }
  return plan.builder.finish();
}

}  // namespace pyparallel
