// The selection table: which algorithm an operation runs.
#pragma once
#include <string_view>

#include "base.h"
#include "schedule/flag_shape.h"

namespace pyparallel {

enum class Collective : u32 { kBroadcast, kReduceAdd, kAllReduce };

// "broadcast", "reduce_add", "all_reduce".
const char* collective_name(Collective collective);

struct Algorithm {
  const char* name;
  bool flag_ordered;
  FlagAlgorithm flag_algorithm;  // read only if flag_ordered
};

// The algorithm called `requested`, or the collective's default for "auto". Throws ArgumentError
// for a name that the collective does not have.
const Algorithm& select_algorithm(Collective collective, std::string_view requested);

}  // namespace pyparallel
