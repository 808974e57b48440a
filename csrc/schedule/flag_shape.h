// The words of flag-ordered schedules: what an operation is, and one primitive of it.
#pragma once
#include "range.h"

namespace pyparallel {

enum class FlagAlgorithm : u32 {
  // Simple protocol: slices through slots, counters as flags.
  kChainBroadcast,
  kTwoHopBroadcast,
  kChainReduce,
  kRingAllReduce,
  // LL protocol (ll.h): every four bytes carry their own flag.
  kLlBroadcast,
  kLlReduce,
  kLlAllReduce,
};

PP_HD constexpr bool is_ll(FlagAlgorithm algorithm) {
  return algorithm >= FlagAlgorithm::kLlBroadcast;
}
PP_HD constexpr bool is_broadcast(FlagAlgorithm algorithm) {
  return algorithm == FlagAlgorithm::kChainBroadcast ||
         algorithm == FlagAlgorithm::kTwoHopBroadcast || algorithm == FlagAlgorithm::kLlBroadcast;
}

// Everything that decides what moves when. All ranks see the same values.
struct FlagShape {
  FlagAlgorithm algorithm;
  u32 nranks, root, nchannels;
  u32 slots;  // per connection and channel; a power of two: step & (slots - 1) survives wrap
  u32 element_bytes;  // 1 for copies
  u64 bytes;          // of the whole payload
  u64 slice_bytes;    // between two flags; a multiple of kUnit, at most the size of a slot
};

// recv -> combine -> store/send. With recv and input both set, the result is received + input (in
// this order); otherwise it is the one that is set. The result goes to the output, to a slot of
// each rank in send_to, or to both.
struct Prim {
  i32 recv_from;  // rank, or -1
  u32 send_to;    // bit r: rank r. Only copies go to more than one
  bool read_input, write_output;
  // In input and output alike. Shards may be empty, and then flags alone move.
  u64 offset, bytes;
};

// A ring needs two slots: all ranks send before they receive, and with one slot each would wait for
// the credit of the slice before, which the next rank gives back only after the same wait. The
// others have an end and need one.
PP_HD constexpr u32 min_slots(FlagAlgorithm algorithm) {
  return algorithm == FlagAlgorithm::kRingAllReduce ? 2 : 1;
}

// What channel `channel` carries.
PP_HD constexpr Range channel_range(const FlagShape& shape, u32 channel) {
  return part_range({0, shape.bytes}, shape.nchannels, channel);
}

// Sets of ranks: bit r stands for rank r.
PP_HD constexpr u32 lowest_rank(u32 ranks) {
  u32 rank = 0;
  while ((ranks >> rank & 1) == 0) ++rank;
  return rank;
}
// All but one.
PP_HD constexpr u32 everybody_but(u32 nranks, u32 rank) {
  return ((u32{1} << nranks) - 1) & ~(u32{1} << rank);
}

}  // namespace pyparallel
