// What event plans cost: moves, steps, bytes on links, and who carries them.
#include "schedule/event_plan.h"
#include "schedule/plan_algorithms.h"
#include "testing.h"

using namespace pyparallel;

namespace {

// Bytes that rank `rank` sends to stages or outputs of others.
u64 bytes_sent(const EventPlan& plan, u32 rank) {
  u64 bytes = 0;
  for (const Move& move : plan.moves) {
    for (u32 k = 0; k < move.ndestinations && move.executor == rank; ++k) {
      if (plan.places[move.first_place + move.nsources + k].rank != rank)
        bytes += move.rows * move.row_bytes;
    }
  }
  return bytes;
}

}  // namespace

// What a plan costs: padded neighbours are one sum for each owner, contiguous shares one row.
TEST(few_moves) {
  const std::vector<Segment> segments{{0, 256}, {512, 512}, {1024, 128}};
  const std::vector<u32> present{3, 3, 3};
  const EventPlan sum =
      plan_reduce_add(EventAlgorithm::kOwner, 2, 0, segments, present, 4, {false, 4096});
  EXPECT(sum.nsteps == 3 && sum.moves.size() == 3 * 2 + 1 + 2, sum.moves.size());
  const Share shares[] = {{0, 1000}, {1000, 1000}};
  const EventPlan scatter = plan_scatter(2, 0, 1, 2000, shares, 1, {false, 4096});
  EXPECT(scatter.moves.size() == 2 && scatter.moves[0].rows == 1, scatter.moves.size());
  const u64 large = u64{5} << 32;
  const EventPlan many =
      plan_all_reduce(EventAlgorithm::kOwner, 2, large, 8, {false, u64{1} << 30});
  EXPECT(many.nsteps == 20 + 2 && many.places.back().offset == large - (u64{1} << 30), many.nsteps);
}

TEST(bytes_on_links) {
  constexpr u64 kMiB = 1 << 20;
  const Segment whole{0, 56 * kMiB};
  const Staging staged{false, 8 * kMiB};
  const u32 n = 8;
  for (const Staging staging : {staged, Staging{true, 8 * kMiB}}) {
    const EventPlan push = plan_broadcast(EventAlgorithm::kPush, n, 3, {&whole, 1}, staging);
    EXPECT(bytes_sent(push, 3) == (n - 1) * whole.bytes, bytes_sent(push, 3));
    const EventPlan hops = plan_broadcast(EventAlgorithm::kTwoHop, n, 3, {&whole, 1}, staging);
    EXPECT(bytes_sent(hops, 3) == whole.bytes, bytes_sent(hops, 3));
    // Shards are cut at cache lines, so they differ by a few bytes.
    const u64 forwarded = (n - 2) * whole.bytes / (n - 1);
    EXPECT(bytes_sent(hops, 0) < forwarded + forwarded / 1000, bytes_sent(hops, 0));
  }
  const EventPlan chain = plan_broadcast(EventAlgorithm::kCopyChain, n, 3, {&whole, 1}, staged);
  for (u32 rank = 0; rank < n; ++rank)
    EXPECT(bytes_sent(chain, rank) == (rank == 2 ? 0 : whole.bytes), rank);
  EXPECT(chain.nsteps == 14 + n, chain.nsteps);
}

// sqrt(bytes / 4 MiB) chunks, rounded up.
TEST(two_hop_chunks) {
  constexpr u64 kMiB = 1 << 20;
  for (const auto& [bytes, chunk] : {std::pair<u64, u64>{0, 128},
                                     {1, 128},
                                     {4 * kMiB, 4 * kMiB},
                                     {4 * kMiB + 1, 2 * kMiB + 128},
                                     {64 * kMiB, 16 * kMiB},
                                     {u64{1} << 40, u64{1} << 31}}) {
    EXPECT(two_hop_chunk_bytes(bytes) == chunk, bytes, " gives ", two_hop_chunk_bytes(bytes));
  }
}

// From 1 MiB on, and only in one row; the stage's side of a local copy is the kernel's.
TEST(copy_engines_carry_large_contiguous_pieces) {
  constexpr u64 kMiB = 1 << 20;
  const Staging staging{false, 8 * kMiB};
  for (const u64 bytes : {kMiB - 1, kMiB}) {
    for (const u64 rows : {u64{1}, u64{2}}) {
      const Share shares[] = {{0, bytes}, {bytes, bytes}};
      const EventPlan scatter = plan_scatter(2, 0, rows, 2 * bytes, shares, 1, staging);
      const EventPlan gather = plan_gather(2, 0, rows, 2 * bytes, shares, 1, staging);
      for (const EventPlan& plan : {scatter, gather}) {
        for (const Move& move : plan.moves) {
          const bool crosses = move.executor == 0;
          EXPECT(move.engine == (crosses && rows == 1 && bytes == kMiB), bytes, " bytes, ", rows,
                 " rows, executor ", move.executor);
        }
      }
    }
  }
}

TEST_MAIN()
