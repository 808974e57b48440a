// From algorithms to the functions that plan them, and what a plan touches.
#include "event_plan.h"

#include <utility>

#include "../check.h"
#include "plan_algorithms.h"
#include "plan_builder.h"

namespace pyparallel {

EventPlan plan_broadcast(EventAlgorithm algorithm, u32 nranks, u32 root,
                         std::span<const Segment> segments, Staging staging, EventPlan storage) {
  check_staging(staging, 1);
  switch (algorithm) {
    case EventAlgorithm::kPush:
      return push_plan(nranks, root, segments, staging, std::move(storage));
    case EventAlgorithm::kTwoHop:
      return two_hop_plan(nranks, root, segments, staging,
                          two_hop_chunk_bytes(span_of(segments).bytes));
    case EventAlgorithm::kCopyChain:
      return copy_chain_broadcast(nranks, root, segments, staging.slot_bytes);
    default:
      throw Error("plan_broadcast: not an algorithm of broadcast");
  }
}

EventPlan plan_reduce_add(EventAlgorithm algorithm, u32 nranks, u32 root,
                          std::span<const Segment> segments, std::span<const u32> present,
                          u32 element_bytes, Staging staging, EventPlan storage) {
  check_staging(staging, element_bytes);
  switch (algorithm) {
    case EventAlgorithm::kOwner:
      return owner_reduce(nranks, root, segments, present, staging, std::move(storage));
    case EventAlgorithm::kCopyChain:
      return copy_chain_reduce(nranks, root, segments, present, staging.slot_bytes);
    default:
      throw Error("plan_reduce_add: not an algorithm of reduce_add");
  }
}

EventPlan plan_all_reduce(EventAlgorithm algorithm, u32 nranks, u64 bytes, u32 element_bytes,
                          Staging staging) {
  check_staging(staging, element_bytes);
  switch (algorithm) {
    case EventAlgorithm::kOwner:
      return owner_all_reduce(nranks, bytes, staging);
    case EventAlgorithm::kCopyChain:
      return copy_chain_all_reduce(nranks, bytes, staging.slot_bytes);
    default:
      throw Error("plan_all_reduce: not an algorithm of all_reduce");
  }
}

std::array<u32, kMaxRanks> stage_users(const EventPlan& plan) {
  std::array<u32, kMaxRanks> users{};
  for (const Move& move : plan.moves) {
    const auto places =
        std::span(plan.places).subspan(move.first_place, move.nsources + move.ndestinations);
    for (const Place& place : places) {
      if (place.memory == Memory::kStage && place.rank != move.executor)
        users[place.rank] |= u32{1} << move.executor;
    }
  }
  return users;
}

}  // namespace pyparallel
