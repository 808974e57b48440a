// Two-hop broadcast: the root gives each other rank one shard, and that rank, the shard's owner,
// passes it on to all others, slice by slice. The root owns nothing: a shard of its own would only
// add to what leaves its port.
//
// Rounds of n - 1 shards of at most one slice each. In a round the root sends to each owner; an
// owner takes its own shard, stores it and sends it to the other owners in one primitive, and then
// takes theirs.
//
// No deadlock, with any number of slots: order all primitives by (round, phase, place in the list),
// where the root's sends are phase 0, taking the own shard 1 and taking the others' 2. Each rank's
// list has this order. A wait for data looks at the same round and a lower phase; a connection
// carries one slice a round, so a wait for a credit looks at an earlier round. So every primitive
// waits only for lower ones.
#pragma once
#include "flag_shape.h"

namespace pyparallel {

PP_HD constexpr u64 two_hop_round_bytes(const FlagShape& shape) {
  return (u64{shape.nranks} - 1) * shape.slice_bytes;
}

// The same for every rank: n - 1 sends, or one that passes on and n - 2 that only take.
PP_HD constexpr u64 two_hop_prim_count(const FlagShape& shape, u32 channel) {
  if (shape.nranks == 1) return 0;
  return piece_count(channel_range(shape, channel), two_hop_round_bytes(shape)) *
         (shape.nranks - 1);
}

PP_HD constexpr Prim two_hop_prim_at(const FlagShape& shape, u32 rank, u32 channel, u64 i) {
  const u32 n = shape.nranks, owners = n - 1;
  const u64 round = i / owners;
  const u32 turn = static_cast<u32>(i % owners);
  const bool is_root = rank == shape.root;
  // Owners are counted from the rank after the root. Each channel of the root begins with another
  // owner, so that they do not all load one link; each owner takes the others' shards from its own
  // on.
  const u32 first = is_root ? channel : (rank + n - shape.root) % n - 1;
  const u32 owner = (first + turn) % owners;
  const u32 owner_rank = (shape.root + 1 + owner) % n;
  const Range shard = part_range(
      piece_range(channel_range(shape, channel), two_hop_round_bytes(shape), round), owners, owner);
  const u32 owner_bit = u32{1} << owner_rank;
  const bool passes_on = !is_root && turn == 0;
  return {.recv_from = is_root ? -1 : static_cast<i32>(passes_on ? shape.root : owner_rank),
          .send_to = is_root     ? owner_bit
                     : passes_on ? everybody_but(n, shape.root) & ~owner_bit
                                 : 0,
          .read_input = is_root,
          .write_output = !is_root,
          .offset = shard.begin,
          .bytes = shard.bytes};
}

}  // namespace pyparallel
