// The algorithms by name: what each is and how it rounds. selection.h says which one runs.
#pragma once
#include <span>
#include <string_view>

#include "base.h"
#include "schedule/event_plan.h"
#include "schedule/ll.h"

namespace pyparallel {

enum class Collective : u32 { kBroadcast, kReduceAdd, kAllReduce };
constexpr u32 kCollectives = 3;

// "broadcast", "reduce_add", "all_reduce".
const char* collective_name(Collective collective);

// Which sums have the bits of ((r0 + r1) + r2) + ..., taken in fp32 for 16-bit types and rounded
// once.
enum class Rounding : u8 {
  kRankOrder,      // those of every type; also algorithms that add nothing
  kWideRankOrder,  // those of 32 and 64 bits; 16-bit types are rounded at each hop
  kOther,          // none
};
// "rank_order", "wide_rank_order", "other".
const char* rounding_name(Rounding rounding);

struct Algorithm {
  Collective collective;
  const char* name;
  Rounding rounding;
  u64 max_bytes;                   // of the payload
  bool flag_ordered;               // takes one segment, of which every rank has its part
  EventAlgorithm event_algorithm;  // read only if not flag_ordered
  FlagAlgorithm flag_algorithm;    // read only if flag_ordered

  bool keeps_rank_order(u32 element_bytes) const {
    return rounding == Rounding::kRankOrder ||
           (rounding == Rounding::kWideRankOrder && element_bytes > 2);
  }
};

// Of one collective. The first is event-ordered, keeps the rank order and runs everywhere.
std::span<const Algorithm> algorithms_of(Collective collective);

// Throws ArgumentError that lists the names for one that the collective does not have.
const Algorithm& find_algorithm(Collective collective, std::string_view name);

}  // namespace pyparallel
