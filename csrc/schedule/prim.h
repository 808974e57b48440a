// Flag-ordered schedules of the Simple protocol: the list of primitives that one block (rank,
// channel) runs. Pure, host and device.
//
// The kernels, the virtual devices, the proof in tests/cpp and any simulator interpret this one
// list.
#pragma once
#include "chain.h"
#include "ring.h"
#include "two_hop.h"

namespace pyparallel {

// How many primitives rank runs on channel, and the i-th of them. A broadcast among one rank has
// none; the other collectives among one rank copy input to output.
PP_HD constexpr u64 prim_count(const FlagShape& shape, u32 rank, u32 channel) {
  switch (shape.algorithm) {
    case FlagAlgorithm::kChainBroadcast:
      return broadcast_prim_count(shape, channel);
    case FlagAlgorithm::kTwoHopBroadcast:
      return two_hop_prim_count(shape, channel);
    case FlagAlgorithm::kChainReduce:
      return reduce_prim_count(shape, rank, channel);
    default:
      return ring_prim_count(shape, channel);
  }
}

PP_HD constexpr Prim prim_at(const FlagShape& shape, u32 rank, u32 channel, u64 i) {
  switch (shape.algorithm) {
    case FlagAlgorithm::kChainBroadcast:
      return broadcast_prim_at(shape, rank, channel, i);
    case FlagAlgorithm::kTwoHopBroadcast:
      return two_hop_prim_at(shape, rank, channel, i);
    case FlagAlgorithm::kChainReduce:
      return reduce_prim_at(shape, rank, channel, i);
    default:
      return ring_prim_at(shape, rank, channel, i);
  }
}

// All ranks that `rank` sends to in the operation, bit r for rank r. Every rank sends to the same
// ones in each round of its schedule, so the first primitives of channel 0, which is never empty
// where another channel is not, name them all.
PP_HD constexpr u32 send_peers(const FlagShape& shape, u32 rank) {
  const u64 count = min_u64(prim_count(shape, rank, 0), shape.nranks);
  u32 peers = 0;
  for (u64 i = 0; i < count; ++i) peers |= prim_at(shape, rank, 0, i).send_to;
  return peers;
}

}  // namespace pyparallel
