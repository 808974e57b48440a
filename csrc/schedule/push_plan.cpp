// Event-ordered broadcast: the root pushes.
#include "plan_algorithms.h"
#include "plan_builder.h"

namespace pyparallel {
namespace {

EventPlan direct_broadcast(u32 root, std::span<const u32> peers, std::span<const Segment> segments,
                           PlanBuilder builder) {
  builder.reserve(segments.size(), segments.size() * (1 + peers.size()));
  std::vector<Place> destinations;
  for (u32 peer : peers) destinations.push_back({peer, Memory::kOutput, 0, 0});
  for (u32 k = 0; k < segments.size(); ++k) {
    for (Place& destination : destinations) destination.offset = segments[k].offset;
    builder.copy(0, root, {root, Memory::kInput, k, 0}, destinations, segments[k].bytes);
  }
  return builder.finish();
}

}  // namespace

EventPlan push_plan(u32 nranks, u32 root, std::span<const Segment> segments, Staging staging,
                    EventPlan storage) {
  const std::vector<u32> peers = other_ranks(nranks, root);
  PlanBuilder builder(std::move(storage));
  if (staging.direct) return direct_broadcast(root, peers, segments, std::move(builder));

  // Phase 0: root packs its segments into every peer's stage. Phase 1: each peer unpacks its own.
  const StageSlots slots{staging.slot_bytes};
  const Range whole = span_of(segments);
  std::vector<Place> destinations;
  for (u32 w = 0; w < piece_count(whole, staging.slot_bytes); ++w) {
    const Range window = piece_range(whole, staging.slot_bytes, w);
    visit_segments(segments, window, [&](u32 k, Range range) {
      destinations.clear();
      for (u32 peer : peers)
        destinations.push_back(slots.packed(peer, w, range.begin - window.begin));
      builder.copy(w, root, {root, Memory::kInput, k, range.begin - segments[k].offset},
                   destinations, range.bytes);
    });
    const std::vector<Run> runs = find_runs(segments, {}, window, 0);
    for (u32 peer : peers) {
      for (const Run& run : runs) {
        const Place output{peer, Memory::kOutput, 0, run.range.begin};
        builder.copy(w + 1, peer, slots.packed(peer, w, run.range.begin - window.begin),
                     {&output, 1}, run.range.bytes);
      }
    }
  }
  return builder.finish();
}

}  // namespace pyparallel
