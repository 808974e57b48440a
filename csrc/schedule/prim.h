// Flag-ordered schedules: the list of primitives that one block (rank, channel) runs. Pure, host and device.
//
// The kernels, the virtual devices, the proof in tests/cpp and any simulator interpret this one list.
#pragma once
#include "../base.h"

namespace pyparallel {

enum class FlagAlgorithm : u32 { kChainBroadcast, kChainReduce, kRingAllReduce };

// Everything that decides what moves when. All ranks see the same values.
struct FlagShape {
  FlagAlgorithm algorithm;
  u32 nranks, root, nchannels;
  u32 slots;          // per connection and channel; a power of two, so that slot indices survive counter wrap
  u32 element_bytes;  // 1 for copies
  u64 bytes;          // of the whole payload
  u64 slice_bytes;    // between two flags; a multiple of 128, at most the size of a slot
};

// recv -> combine -> store/send. With recv and input both set, the result is received + input (in this order);
// otherwise it is the one that is set. The result goes to the output, to the next rank's slot, or to both.
struct Prim {
  i32 recv_from;  // rank, or -1
  i32 send_to;    // rank, or -1
  bool read_input, write_output;
  u64 offset, bytes;  // in input and output alike; bytes may be 0 only if the whole payload of the channel is empty
};

// How many primitives rank runs on channel, and the i-th of them.
PP_HD u64 prim_count(const FlagShape& shape, u32 rank, u32 channel);
PP_HD Prim prim_at(const FlagShape& shape, u32 rank, u32 channel, u64 i);

}  // namespace pyparallel
