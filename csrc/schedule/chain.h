// Chains: one slice after the other from rank to rank, each rank passing on what it received.
//
// Broadcast runs root, root + 1, ... around the ring and ends at root - 1.
// Reduce runs 0, 1, ..., n - 1 whatever the root is, and then hops from n - 1 to root: the sum is
// taken in rank order, starting from rank 0's value, so it has the bits that owner-reduce has
// (16-bit types round at each hop and form another bit class).
#pragma once
#include "flag_shape.h"

namespace pyparallel {

PP_HD constexpr u64 broadcast_prim_count(const FlagShape& shape, u32 channel) {
  return shape.nranks == 1 ? 0 : piece_count(channel_range(shape, channel), shape.slice_bytes);
}

PP_HD constexpr Prim broadcast_prim_at(const FlagShape& shape, u32 rank, u32 channel, u64 i) {
  const u32 n = shape.nranks;
  const u32 vrank = (rank + n - shape.root) % n;  // 0 for root
  const Range slice = piece_range(channel_range(shape, channel), shape.slice_bytes, i);
  return {.recv_from = vrank == 0 ? -1 : static_cast<i32>((rank + n - 1) % n),
          .send_to = vrank == n - 1 ? 0 : u32{1} << (rank + 1) % n,
          .read_input = vrank == 0,
          .write_output = vrank != 0,
          .offset = slice.begin,
          .bytes = slice.bytes};
}

// Whether the sum ends at n - 1 and still has to go to the root.
PP_HD constexpr bool reduce_has_hop(const FlagShape& shape) {
  return shape.root != shape.nranks - 1;
}

PP_HD constexpr u64 reduce_prim_count(const FlagShape& shape, u32 rank, u32 channel) {
  const u64 slices = piece_count(channel_range(shape, channel), shape.slice_bytes);
  return rank == shape.root && reduce_has_hop(shape) ? 2 * slices : slices;
}

// How many slices the root adds and sends on before it takes its first result.
//
// Slices leave the root over `hops` connections root, root + 1, ..., n - 1, root, which hold slots
// slices each. With a lag of at most hops * slots, everything that the root has sent and not yet
// taken back fits into these slots. So when the root waits for a credit, the slices ahead can move
// on without any result being taken, and when it waits for a result, it has sent that slice
// already: neither wait depends on a later primitive of the root, and no other rank has two kinds
// of primitives. One slice per hop keeps every rank of the way busy; the second absorbs jitter.
PP_HD constexpr u64 reduce_lag(const FlagShape& shape, u64 slices) {
  const u64 hops = shape.nranks - shape.root;
  return min_u64(slices, hops * (shape.slots < 2 ? shape.slots : 2));
}

PP_HD constexpr Prim reduce_chain_prim(const FlagShape& shape, u32 rank, u32 channel, u64 i) {
  const bool last = rank == shape.nranks - 1;
  const u32 next = !last ? u32{1} << (rank + 1) : reduce_has_hop(shape) ? u32{1} << shape.root : 0;
  const Range slice = piece_range(channel_range(shape, channel), shape.slice_bytes, i);
  return {.recv_from = static_cast<i32>(rank) - 1,
          .send_to = next,
          .read_input = true,
          .write_output = next == 0,
          .offset = slice.begin,
          .bytes = slice.bytes};
}

PP_HD constexpr Prim reduce_result_prim(const FlagShape& shape, u32 channel, u64 i) {
  const Range slice = piece_range(channel_range(shape, channel), shape.slice_bytes, i);
  return {.recv_from = static_cast<i32>(shape.nranks - 1),
          .send_to = 0,
          .read_input = false,
          .write_output = true,
          .offset = slice.begin,
          .bytes = slice.bytes};
}

PP_HD constexpr Prim reduce_prim_at(const FlagShape& shape, u32 rank, u32 channel, u64 i) {
  const bool takes_results = rank == shape.root && reduce_has_hop(shape);
  if (!takes_results) return reduce_chain_prim(shape, rank, channel, i);
  // lag chain primitives, then result and chain in turn, then lag results.
  const u64 slices = piece_count(channel_range(shape, channel), shape.slice_bytes);
  const u64 lag = reduce_lag(shape, slices);
  if (i < lag) return reduce_chain_prim(shape, rank, channel, i);
  const u64 turn = (i - lag) / 2;
  if (turn >= slices - lag) return reduce_result_prim(shape, channel, i - slices);
  return (i - lag) % 2 == 0 ? reduce_result_prim(shape, channel, turn)
                            : reduce_chain_prim(shape, rank, channel, lag + turn);
}

}  // namespace pyparallel
