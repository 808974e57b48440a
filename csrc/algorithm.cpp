// Names of algorithms and the selection table.
#include "algorithm.h"

#include "check.h"

namespace pyparallel {
namespace {

// Of each collective: the event-ordered algorithm, then the flag-ordered one.
constexpr Algorithm kAlgorithms[3][2] = {
    {{"push", false, {}}, {"chain", true, FlagAlgorithm::kChainBroadcast}},
    {{"owner", false, {}}, {"chain", true, FlagAlgorithm::kChainReduce}},
    {{"two_shot", false, {}}, {"ring", true, FlagAlgorithm::kRingAllReduce}},
};

}  // namespace

const char* collective_name(Collective collective) {
  constexpr const char* kNames[] = {"broadcast", "reduce_add", "all_reduce"};
  return kNames[static_cast<u32>(collective)];
}

const Algorithm& select_algorithm(Collective collective, std::string_view requested) {
  const auto& [event_ordered, flag_ordered] = kAlgorithms[static_cast<u32>(collective)];
  // The default is event-ordered for every backend, size and rank count: on the host it is faster
  // throughout, because its threads never wait for each other; on GPUs it cannot hang, and nothing
  // measured prefers another one yet.
  if (requested == "auto" || requested == event_ordered.name) return event_ordered;
  if (requested == flag_ordered.name) return flag_ordered;
  throw ArgumentError(message(collective_name(collective), ": unknown algorithm '", requested,
                              "'; choose auto, ", event_ordered.name, " or ", flag_ordered.name));
}

}  // namespace pyparallel
