// What all event plans are built with: adding moves, and walking segments, runs and windows.
#pragma once
#include <algorithm>
#include <utility>

#include "event_plan.h"
#include "range.h"

namespace pyparallel {

// Padding between segments that moves in stages run across, because one larger move is cheaper than
// two. A guess: buckets align tensors to 512 bytes.
constexpr u64 kJoinedGap = 512;

class PlanBuilder {
 public:
  PlanBuilder() = default;
  // Takes the memory of a plan that nobody needs.
  explicit PlanBuilder(EventPlan storage) : plan_(std::move(storage)) {
    plan_.places.clear();
    plan_.moves.clear();
    plan_.nsteps = 0;
    plan_.staged = false;
  }

  // Makes room for that many moves and places: with thousands of tensors, growing takes half of the
  // time.
  void reserve(u64 nmoves, u64 nplaces);

  // Each adds one move, or none where there is nothing to move.
  void copy(u32 step, u32 executor, const Place& source, std::span<const Place> destinations,
            u64 bytes);
  // By the copy engine of the source's rank.
  void engine_copy(u32 step, const Place& source, const Place& destination, u64 bytes);
  void copy_rows(u32 step, u32 executor, const Place& source, u64 source_pitch,
                 const Place& destination, u64 destination_pitch, u64 rows, u64 row_bytes);
  // The same, by the executor's copy engine if it is one long row.
  void cross_rows(u32 step, u32 executor, const Place& source, u64 source_pitch,
                  const Place& destination, u64 destination_pitch, u64 rows, u64 row_bytes);
  // A sum of one source is a copy.
  void sum(u32 step, u32 executor, std::span<const Place> sources,
           std::span<const Place> destinations, u64 bytes);

  // The plan, ordered by step.
  EventPlan finish();

 private:
  Move& add(u32 step, u32 executor, std::span<const Place> sources,
            std::span<const Place> destinations);

  EventPlan plan_;
};

// Where window w lies in stages.
struct StageSlots {
  u64 slot_bytes;
  Place packed(u32 rank, u64 window, u64 offset) const { return at(rank, window, offset); }
  Place summed(u32 rank, u64 window, u64 offset) const { return at(rank, window + 3, offset); }

 private:
  Place at(u32 rank, u64 slot, u64 offset) const {
    return {rank, Memory::kStage, 0, slot % kStageSlots * slot_bytes + offset};
  }
};

// All ranks but one, in order.
std::vector<u32> other_ranks(u32 nranks, u32 rank);

// From offset 0 to the end of the last segment.
inline Range span_of(std::span<const Segment> segments) {
  return {0, segments.empty() ? 0 : segments.back().offset + segments.back().bytes};
}

// Calls visit(k, range) for the part of each segment k that lies in `window`, in order.
template <class Visit>
void visit_segments(std::span<const Segment> segments, Range window, Visit visit) {
  const auto ends_before = [&](const Segment& s) { return s.offset + s.bytes <= window.begin; };
  auto segment = std::partition_point(segments.begin(), segments.end(), ends_before);
  for (; segment != segments.end() && segment->offset < window.end(); ++segment) {
    const Range range = intersect({segment->offset, segment->bytes}, window);
    if (range.bytes > 0) visit(static_cast<u32>(segment - segments.begin()), range);
  }
}

// Neighbouring segments that the same ranks have, moved as one.
struct Run {
  Range range;
  u32 present;
};

// The runs of `window`. Segments at most `gap` bytes apart are joined; with a gap above 0, bytes
// between segments move too. An empty `present` means that all segments have the same ranks.
std::vector<Run> find_runs(std::span<const Segment> segments, std::span<const u32> present,
                           Range window, u64 gap);

// Throws Error unless windows and shards can be cut without splitting an element.
void check_staging(Staging staging, u32 element_bytes);

}  // namespace pyparallel
