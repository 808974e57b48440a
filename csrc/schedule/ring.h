// Ring all-reduce: reduce-scatter, then all-gather, in rounds of n shards of at most one slice
// each.
//
// In the first n - 1 steps of a round each rank adds its part of a shard to what it received and
// passes it on; shard s starts at rank s + 1 and is complete at rank s. In the next n - 1 steps
// complete shards travel once around. The order of a sum therefore rotates with the shard:
// deterministic, but not rank order (another bit class). In place is safe: a rank writes a shard of
// its output only in the step in which it last reads that shard of its input, or later.
#pragma once
#include "flag_shape.h"

namespace pyparallel {

PP_HD constexpr u64 ring_round_bytes(const FlagShape& shape) {
  return shape.nranks * shape.slice_bytes;
}

// n - 1 steps that add and pass on (the first only sends), one that completes, n - 1 that take
// complete shards.
PP_HD constexpr u64 ring_steps(const FlagShape& shape) { return 2 * u64{shape.nranks} - 1; }

PP_HD constexpr u64 ring_prim_count(const FlagShape& shape, u32 channel) {
  return piece_count(channel_range(shape, channel), ring_round_bytes(shape)) * ring_steps(shape);
}

PP_HD constexpr Prim ring_prim_at(const FlagShape& shape, u32 rank, u32 channel, u64 i) {
  const u32 n = shape.nranks;
  const u64 round = i / ring_steps(shape);
  const u32 step = static_cast<u32>(i % ring_steps(shape));
  const u32 shard = (rank + 2 * n - 1 - step) % n;
  const Range range = part_range(
      piece_range(channel_range(shape, channel), ring_round_bytes(shape), round), n, shard);
  const bool recv = step > 0, send = step < 2 * n - 2;
  return {.recv_from = recv ? static_cast<i32>((rank + n - 1) % n) : -1,
          .send_to = send ? u32{1} << (rank + 1) % n : 0,
          .read_input = step < n,
          .write_output = step >= n - 1,
          .offset = range.begin,
          .bytes = range.bytes};
}

}  // namespace pyparallel
