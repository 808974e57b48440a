// Names and properties of the algorithms.
#include "algorithm.h"

#include <string>

#include "check.h"

namespace pyparallel {
namespace {

constexpr Algorithm event_ordered(Collective collective, const char* name, EventAlgorithm algorithm,
                                  Rounding rounding = Rounding::kRankOrder) {
  return {collective, name, rounding, ~u64{0}, false, algorithm, {}};
}
constexpr Algorithm flag_ordered(Collective collective, const char* name, FlagAlgorithm algorithm,
                                 Rounding rounding = Rounding::kRankOrder) {
  const u64 max_bytes = is_ll(algorithm) ? kLlMaxBytes : ~u64{0};
  return {collective, name, rounding, max_bytes, true, {}, algorithm};
}

constexpr Algorithm kBroadcast[] = {
    event_ordered(Collective::kBroadcast, "push", EventAlgorithm::kPush),
    event_ordered(Collective::kBroadcast, "two_hop", EventAlgorithm::kTwoHop),
    event_ordered(Collective::kBroadcast, "copy_chain", EventAlgorithm::kCopyChain),
    flag_ordered(Collective::kBroadcast, "chain", FlagAlgorithm::kChainBroadcast),
    flag_ordered(Collective::kBroadcast, "two_hop_flags", FlagAlgorithm::kTwoHopBroadcast),
    flag_ordered(Collective::kBroadcast, "ll", FlagAlgorithm::kLlBroadcast),
};
constexpr Algorithm kReduceAdd[] = {
    event_ordered(Collective::kReduceAdd, "owner", EventAlgorithm::kOwner),
    event_ordered(Collective::kReduceAdd, "copy_chain", EventAlgorithm::kCopyChain,
                  Rounding::kWideRankOrder),
    flag_ordered(Collective::kReduceAdd, "chain", FlagAlgorithm::kChainReduce,
                 Rounding::kWideRankOrder),
    flag_ordered(Collective::kReduceAdd, "ll", FlagAlgorithm::kLlReduce),
};
constexpr Algorithm kAllReduce[] = {
    event_ordered(Collective::kAllReduce, "two_shot", EventAlgorithm::kOwner),
    event_ordered(Collective::kAllReduce, "copy_chain", EventAlgorithm::kCopyChain,
                  Rounding::kWideRankOrder),
    flag_ordered(Collective::kAllReduce, "ring", FlagAlgorithm::kRingAllReduce, Rounding::kOther),
    flag_ordered(Collective::kAllReduce, "one_shot_ll", FlagAlgorithm::kLlAllReduce),
};

}  // namespace

const char* collective_name(Collective collective) {
  constexpr const char* kNames[] = {"broadcast", "reduce_add", "all_reduce"};
  return kNames[static_cast<u32>(collective)];
}

const char* rounding_name(Rounding rounding) {
  constexpr const char* kNames[] = {"rank_order", "wide_rank_order", "other"};
  return kNames[static_cast<u32>(rounding)];
}

std::span<const Algorithm> algorithms_of(Collective collective) {
  switch (collective) {
    case Collective::kBroadcast:
      return kBroadcast;
    case Collective::kReduceAdd:
      return kReduceAdd;
    default:
      return kAllReduce;
  }
}

const Algorithm& find_algorithm(Collective collective, std::string_view name) {
  const std::span<const Algorithm> algorithms = algorithms_of(collective);
  for (const Algorithm& algorithm : algorithms) {
    if (name == algorithm.name) return algorithm;
  }
  std::string names = "auto";
  for (const Algorithm& algorithm : algorithms)
    names += message(&algorithm == &algorithms.back() ? " or " : ", ", algorithm.name);
  throw ArgumentError(
      message(collective_name(collective), ": unknown algorithm '", name, "'; choose ", names));
}

}  // namespace pyparallel
