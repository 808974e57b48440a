// Event-ordered chains whose hops are made by copy engines: the only neighbours that a rank touches
// are those on the ring.
//
// Sums: a window's partial sum lies in a slot of rank r's stage, where rank r adds its part in
// place (step w + 2 r); the copy engine carries it to the same slot of rank r + 1 (step w + 2 r +
// 1). So sums run through ranks 0, 1, ..., n - 1 whatever the root is, and partial sums of 16-bit
// types are rounded at each hop. Results, and what the root broadcasts, travel along the ring one
// hop a step, in slots of their own, because a rank may be passed by both.
//
// The slots of a stage are used by halves: kStageSlots for partial sums, kStageSlots for results. A
// slot is written, used and read within three steps, and window w + kStageSlots comes four steps
// after w.
#include "plan_algorithms.h"
#include "plan_builder.h"

namespace pyparallel {
namespace {

class CopyChain {
 public:
  // An empty `present` means that all ranks have all segments.
  CopyChain(u32 nranks, std::span<const Segment> segments, std::span<const u32> present,
            u64 slot_bytes)
      : nranks_(nranks), segments_(segments), present_(present), half_bytes_(slot_bytes / 2) {}

  u32 nwindows() const { return static_cast<u32>(piece_count(span_of(segments_), half_bytes_)); }
  void start_window(u32 w) {
    w_ = w;
    window_ = piece_range(span_of(segments_), half_bytes_, w);
  }

  // Root's segments to its slot, in step w.
  void pack(u32 root) {
    visit_segments(segments_, window_, [&](u32 k, Range range) {
      const Place stage = partial(root, range.begin);
      builder_.copy(w_, root, input(root, k, range), {&stage, 1}, range.bytes);
    });
  }

  // The sum of all ranks, in step w + 2 (n - 1), to the last rank's slot if `to_slot`, to its
  // output if `to_output`.
  void sum(bool to_slot, bool to_output) {
    for (u32 rank = 0; rank + 1 < nranks_; ++rank) {
      add(rank, true, false);
      builder_.engine_copy(w_ + 2 * rank + 1, partial(rank, window_.begin),
                           partial(rank + 1, window_.begin), window_.bytes);
    }
    add(nranks_ - 1, to_slot, to_output);
  }

  // Carries the slot of rank `from` along `path`, one hop a step from `step` on. The last rank of
  // the path stores the window to its output, or every one of them does.
  void carry(u32 step, u32 from, std::span<const u32> path, bool to_all) {
    Place source = partial(from, window_.begin);
    for (size_t i = 0; i < path.size(); ++i) {
      const Place arrived = result(path[i], window_.begin);
      builder_.engine_copy(step++, source, arrived, window_.bytes);
      if (to_all || i + 1 == path.size()) unpack(step, path[i]);
      source = arrived;
    }
  }

  EventPlan finish() { return builder_.finish(); }

 private:
  Place input(u32 rank, u32 k, Range range) const {
    return {rank, Memory::kInput, k, range.begin - segments_[k].offset};
  }
  Place slot(u32 rank, u32 index, u64 at) const {
    return {rank, Memory::kStage, 0, index * half_bytes_ + at - window_.begin};
  }
  Place partial(u32 rank, u64 at) const { return slot(rank, w_ % kStageSlots, at); }
  Place result(u32 rank, u64 at) const { return slot(rank, kStageSlots + w_ % kStageSlots, at); }

  void add(u32 rank, bool to_slot, bool to_output) {
    visit_segments(segments_, window_, [&](u32 k, Range range) {
      const u32 ranks = present_.empty() ? ~u32{0} : present_[k];
      const bool has_part = (ranks >> rank & 1) != 0;
      const bool has_sum = (ranks & ((u32{1} << rank) - 1)) != 0;
      std::vector<Place> sources, destinations;
      if (has_sum) sources.push_back(partial(rank, range.begin));
      if (has_part) sources.push_back(input(rank, k, range));
      if (to_slot && has_part) destinations.push_back(partial(rank, range.begin));
      if (to_output) destinations.push_back({rank, Memory::kOutput, 0, range.begin});
      if (!sources.empty()) builder_.sum(w_ + 2 * rank, rank, sources, destinations, range.bytes);
    });
  }

  void unpack(u32 step, u32 rank) {
    for (const Run& run : find_runs(segments_, {}, window_, 0)) {
      const Place output{rank, Memory::kOutput, 0, run.range.begin};
      builder_.copy(step, rank, result(rank, run.range.begin), {&output, 1}, run.range.bytes);
    }
  }

  const u32 nranks_;
  const std::span<const Segment> segments_;
  const std::span<const u32> present_;
  const u64 half_bytes_;
  u32 w_ = 0;
  Range window_{};
  PlanBuilder builder_;
};

// The ranks after `from` in the order of the ring, all others.
std::vector<u32> around(u32 nranks, u32 from) {
  std::vector<u32> path;
  for (u32 hop = 1; hop < nranks; ++hop) path.push_back((from + hop) % nranks);
  return path;
}

// From the last rank to the root, the shorter way around the ring; backwards if both are equal,
// because partial sums use the links in the other direction.
std::vector<u32> way_to_root(u32 nranks, u32 root) {
  const u32 last = nranks - 1;
  const bool backwards = last - root <= root + 1;
  std::vector<u32> path;
  for (u32 rank = last; rank != root;) {
    rank = backwards ? rank - 1 : (rank + 1) % nranks;
    path.push_back(rank);
  }
  return path;
}

}  // namespace

EventPlan copy_chain_broadcast(u32 nranks, u32 root, std::span<const Segment> segments,
                               u64 slot_bytes) {
  if (nranks == 1) return {};
  CopyChain chain(nranks, segments, {}, slot_bytes);
  const std::vector<u32> path = around(nranks, root);
  for (u32 w = 0; w < chain.nwindows(); ++w) {
    chain.start_window(w);
    chain.pack(root);
    chain.carry(w + 1, root, path, true);
  }
  return chain.finish();
}

EventPlan copy_chain_reduce(u32 nranks, u32 root, std::span<const Segment> segments,
                            std::span<const u32> present, u64 slot_bytes) {
  CopyChain chain(nranks, segments, present, slot_bytes);
  const u32 last = nranks - 1;
  const std::vector<u32> path = way_to_root(nranks, root);
  for (u32 w = 0; w < chain.nwindows(); ++w) {
    chain.start_window(w);
    chain.sum(root != last, root == last);
    chain.carry(w + 2 * last + 1, last, path, false);
  }
  return chain.finish();
}

EventPlan copy_chain_all_reduce(u32 nranks, u64 bytes, u64 slot_bytes) {
  const Segment whole{0, bytes};
  CopyChain chain(nranks, {&whole, 1}, {}, slot_bytes);
  const u32 last = nranks - 1;
  const std::vector<u32> path = around(nranks, last);
  for (u32 w = 0; w < chain.nwindows(); ++w) {
    chain.start_window(w);
    chain.sum(nranks > 1, true);
    chain.carry(w + 2 * last + 1, last, path, true);
  }
  return chain.finish();
}

}  // namespace pyparallel
