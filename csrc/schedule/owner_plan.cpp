// Event-ordered sums: the payload is cut into shards, and the owner of a shard sums it from all
// ranks, in rank order, and stores it to every receiver. Reduce has one receiver, the root, and n -
// 1 owners, the others; all-reduce has n of each.
#include "plan_algorithms.h"
#include "plan_builder.h"

namespace pyparallel {
namespace {

struct SumPlan {
  u32 nranks;
  std::span<const Segment> segments;
  std::span<const u32> present;
  std::vector<u32> owners, receivers;
};

// Calls visit(rank) for each rank whose bit is set, in rank order.
template <class Visit>
void visit_ranks(u32 present, Visit visit) {
  for (u32 rank = 0; present >> rank != 0; ++rank) {
    if (present >> rank & 1) visit(rank);
  }
}

EventPlan direct_sum(const SumPlan& plan, PlanBuilder builder) {
  const u32 nowners = static_cast<u32>(plan.owners.size());
  const u64 nmoves = plan.segments.size() + nowners;  // each owner may cut one
  builder.reserve(nmoves, nmoves * (plan.nranks + plan.receivers.size()));
  std::vector<Place> sources, destinations;
  for (u32 i = 0; i < nowners; ++i) {
    const Range shard = part_range(span_of(plan.segments), nowners, i);
    visit_segments(plan.segments, shard, [&](u32 k, Range range) {
      sources.clear();
      destinations.clear();
      visit_ranks(plan.present[k], [&](u32 rank) {
        sources.push_back({rank, Memory::kInput, k, range.begin - plan.segments[k].offset});
      });
      for (u32 receiver : plan.receivers)
        destinations.push_back({receiver, Memory::kOutput, 0, range.begin});
      builder.sum(0, plan.owners[i], sources, destinations, range.bytes);
    });
  }
  return builder.finish();
}

class StagedSum {
 public:
  StagedSum(const SumPlan& plan, u64 slot_bytes, PlanBuilder builder)
      : plan_(plan), slots_{slot_bytes}, builder_(std::move(builder)) {}

  EventPlan build() {
    const Range whole = span_of(plan_.segments);
    for (u32 w = 0; w < piece_count(whole, slots_.slot_bytes); ++w) {
      window_ = piece_range(whole, slots_.slot_bytes, w);
      pack(w);
      sum(w);
      unpack(w);
    }
    return builder_.finish();
  }

 private:
  // Phase 0: each rank copies its segments into its own stage.
  void pack(u32 w) {
    visit_segments(plan_.segments, window_, [&](u32 k, Range range) {
      visit_ranks(plan_.present[k], [&](u32 rank) {
        const Place stage = slots_.packed(rank, w, range.begin - window_.begin);
        builder_.copy(w, rank, {rank, Memory::kInput, k, range.begin - plan_.segments[k].offset},
                      {&stage, 1}, range.bytes);
      });
    });
  }

  // Phase 1: owners pull their shard from all stages and store the sum into the receivers' stages.
  void sum(u32 w) {
    const u32 nowners = static_cast<u32>(plan_.owners.size());
    std::vector<Place> sources, destinations;
    for (const Run& run : find_runs(plan_.segments, plan_.present, window_, kJoinedGap)) {
      for (u32 i = 0; i < nowners; ++i) {
        const Range range = intersect(run.range, part_range(window_, nowners, i));
        const u64 offset = range.begin - window_.begin;
        sources.clear();
        destinations.clear();
        visit_ranks(run.present,
                    [&](u32 rank) { sources.push_back(slots_.packed(rank, w, offset)); });
        for (u32 receiver : plan_.receivers)
          destinations.push_back(slots_.summed(receiver, w, offset));
        builder_.sum(w + 1, plan_.owners[i], sources, destinations, range.bytes);
      }
    }
  }

  // Phase 2: each receiver copies the sums from its own stage to its output.
  void unpack(u32 w) {
    for (const Run& run : find_runs(plan_.segments, {}, window_, 0)) {
      for (u32 receiver : plan_.receivers) {
        const Place output{receiver, Memory::kOutput, 0, run.range.begin};
        builder_.copy(w + 2, receiver, slots_.summed(receiver, w, run.range.begin - window_.begin),
                      {&output, 1}, run.range.bytes);
      }
    }
  }

  const SumPlan& plan_;
  StageSlots slots_;
  PlanBuilder builder_;
  Range window_{};
};

EventPlan plan_sum(const SumPlan& plan, Staging staging, EventPlan storage) {
  PlanBuilder builder(std::move(storage));
  // One rank touches only its own memory.
  if (staging.direct || plan.nranks == 1) return direct_sum(plan, std::move(builder));
  return StagedSum(plan, staging.slot_bytes, std::move(builder)).build();
}

}  // namespace

EventPlan owner_reduce(u32 nranks, u32 root, std::span<const Segment> segments,
                       std::span<const u32> present, Staging staging, EventPlan storage) {
  SumPlan plan{nranks, segments, present, other_ranks(nranks, root), {root}};
  if (nranks == 1) plan.owners = {root};
  return plan_sum(plan, staging, std::move(storage));
}

EventPlan owner_all_reduce(u32 nranks, u64 bytes, Staging staging) {
  const Segment whole{0, bytes};
  const u32 everybody = (u32{1} << nranks) - 1;
  SumPlan plan{nranks, {&whole, 1}, {&everybody, 1}, {}, {}};
  for (u32 rank = 0; rank < nranks; ++rank) {
    plan.owners.push_back(rank);
    plan.receivers.push_back(rank);
  }
  return plan_sum(plan, staging, {});
}

}  // namespace pyparallel
