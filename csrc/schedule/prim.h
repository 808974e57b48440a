// Flag-ordered schedules: the list of primitives that one block (rank, channel) runs. Pure, host
// and device.
//
// The kernels, the virtual devices, the proof in tests/cpp and any simulator interpret this one
// list.
#pragma once
#include "chain.h"
#include "ring.h"

namespace pyparallel {

// How many primitives rank runs on channel, and the i-th of them. A broadcast among one rank has
// none; the other collectives among one rank copy input to output.
PP_HD constexpr u64 prim_count(const FlagShape& shape, u32 rank, u32 channel) {
  switch (shape.algorithm) {
    case FlagAlgorithm::kChainBroadcast:
      return broadcast_prim_count(shape, channel);
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
    case FlagAlgorithm::kChainReduce:
      return reduce_prim_at(shape, rank, channel, i);
    default:
      return ring_prim_at(shape, rank, channel, i);
  }
}

}  // namespace pyparallel
