// The body of every flag-ordered collective of the Simple protocol: one block (rank, channel) runs
// its list of primitives.
#pragma once
#include "numeric.h"
#include "protocol.h"

namespace pyparallel {

// The element type of a collective that only copies.
struct CopyOnly {};

// The place of rank `peer` among the ranks in `peers`.
PP_HD u32 place_among(u32 peers, u32 peer) {
  u32 place = 0;
  for (u32 bits = peers & ((u32{1} << peer) - 1); bits != 0; bits &= bits - 1) ++place;
  return place;
}

// The destinations of a copy to several ranks: addresses in memory, because their number is known
// at run time only and registers have no index.
template <Context C>
struct FanOut {
  const C* c;
  const u64* at;
  u32 count;
  PP_D u32 size() const { return count; }
  PP_D u8* operator[](u32 k) const { return reinterpret_cast<u8*>(c->load(at + k)); }
};

// One block: its rank's ends on its channel, and what it does with a primitive.
//
// Thread 0 has the flags of the rank that it receives from. The flags of the ranks that it sends to
// belong to the threads 0, 1, ... in turn, so that a block waits for all of them, and posts to all
// of them, at the same time.
template <class T, Fault F, FlagOrderedContext C>
struct FlagBlock {
  const C& c;
  const FlagArgs& args;
  const RankBuffers& buffers;
  u32 rank, channel;

  PP_D SendEnd* send_end(u32 peer) const {
    return buffers.sends + (peer * args.shape.nchannels + channel);
  }
  PP_D RecvEnd* recv_end(u32 peer) const {
    return buffers.recvs + (peer * args.shape.nchannels + channel);
  }
  PP_D u64 slot_offset(u64 step) const { return (step & (args.shape.slots - 1)) * args.slot_bytes; }
  PP_D u8* slot_out(u32 peer) const {
    SendEnd* end = send_end(peer);
    return c.load(&end->slots) + slot_offset(c.load(&end->sent));
  }
  PP_D const u8* slot_in(u32 peer) const {
    RecvEnd* end = recv_end(peer);
    return c.load(&end->slots) + slot_offset(c.load(&end->received));
  }
  PP_D u64* fan_out() const { return buffers.fan_out + channel * kMaxRanks; }
  PP_D static bool fans_out(const Prim& prim) { return (prim.send_to & (prim.send_to - 1)) != 0; }

  // Calls visit(peer) for the ranks in prim.send_to whose flags belong to this thread.
  template <class Visit>
  PP_D void own_peers(const Prim& prim, Visit visit) const {
    for (u32 peer = c.tid(); peer < args.shape.nranks; peer += c.nthreads()) {
      if ((prim.send_to >> peer & 1) != 0) visit(peer);
    }
  }

  // This thread's waits; false if the block must leave. Where there are several destinations it
  // also writes down those that its flags allow.
  PP_D bool wait(const Prim& prim) const {
    bool ok = true;
    if (prim.recv_from >= 0 && c.tid() == 0) {
      const u32 peer = static_cast<u32>(prim.recv_from);
      RecvEnd* end = recv_end(peer);
      ok = wait_data<F>(c, args, {rank, peer, channel, false}, end, c.load(&end->received));
    }
    own_peers(prim, [&](u32 peer) {
      const u32 place = place_among(prim.send_to, peer);
      if (F == Fault::kOneCreditForAll && place > 0) {
        c.store(fan_out() + place, reinterpret_cast<u64>(slot_out(peer)));
        return;
      }
      SendEnd* end = send_end(peer);
      ok = ok && wait_credit<F>(c, args, {rank, peer, channel, true}, end, c.load(&end->sent));
      if (fans_out(prim)) c.store(fan_out() + place, reinterpret_cast<u64>(slot_out(peer)));
    });
    if (fans_out(prim) && prim.write_output && c.tid() == 0) {
      c.store(fan_out() + place_among(prim.send_to, kMaxRanks),
              reinterpret_cast<u64>(buffers.output + prim.offset));
    }
    return ok;
  }

  // Moves the bytes, without a flag.
  PP_D void move(const Prim& prim) const {
    const u8* input = buffers.input + prim.offset;
    u8* output = buffers.output + prim.offset;
    const u8* in = prim.recv_from >= 0 ? slot_in(static_cast<u32>(prim.recv_from)) : nullptr;
    if constexpr (std::same_as<T, CopyOnly>) {
      if (fans_out(prim)) {
        const u32 count = place_among(prim.send_to, kMaxRanks) + prim.write_output;
        c.copy(FanOut<C>{&c, fan_out(), count}, in != nullptr ? in : input, prim.bytes);
        return;
      }
    }
    u8* out = prim.send_to != 0 ? slot_out(lowest_rank(prim.send_to)) : nullptr;
    move_to_one(prim, in, input, out, output);
  }

  // `in` and `out` are null where the primitive has none.
  PP_D void move_to_one(const Prim& prim, const u8* in, const u8* input, u8* out,
                        u8* output) const {
    if constexpr (!std::same_as<T, CopyOnly>) {
      if (in != nullptr && prim.read_input) {
        const FixedList<const u8*, 2> sources{{in, input}};
        const u64 count = prim.bytes / sizeof(T);
        if (!prim.write_output) {
          c.template sum<T>(FixedList<u8*, 1>{{out}}, sources, count);
        } else if (out == nullptr) {
          c.template sum<T>(FixedList<u8*, 1>{{output}}, sources, count);
        } else {
          c.template sum<T>(FixedList<u8*, 2>{{output, out}}, sources, count);
        }
        return;
      }
    }
    const u8* source = in != nullptr ? in : input;
    if (prim.write_output && out != nullptr) {
      c.copy(FixedList<u8*, 2>{{output, out}}, source, prim.bytes);
    } else {
      c.copy(FixedList<u8*, 1>{{prim.write_output ? output : out}}, source, prim.bytes);
    }
  }

  // This thread's posts, and its counters: only threads that a counter belongs to write it, after
  // the barrier behind which all have read it.
  PP_D void post(const Prim& prim) const {
    own_peers(prim, [&](u32 peer) {
      SendEnd* end = send_end(peer);
      const u64 sent = c.load(&end->sent) + 1;
      post_slice<F>(c, c.load(&end->peer_tail), sent);
      c.store(&end->sent, sent);
    });
    if (prim.recv_from >= 0 && c.tid() == 0) {
      RecvEnd* end = recv_end(static_cast<u32>(prim.recv_from));
      const u64 received = c.load(&end->received) + 1;
      post_slice<F>(c, c.load(&end->peer_credits), received);
      c.store(&end->received, received);
    }
  }
};

// Runs block (rank, channel) of the collective in args.shape. T is the element type, or CopyOnly
// for a broadcast. Every thread of the block calls this; blocks of all ranks and channels must be
// able to run at the same time. Returns false if the block left early because a wait expired here
// or elsewhere: the connections are then unusable.
template <class T, Fault F = Fault::kNone, FlagOrderedContext C>
PP_D bool run_flag_ordered(const C& c, const FlagArgs& args, u32 rank, u32 channel) {
  const FlagBlock<T, F, C> block{c, args, args.ranks[rank], rank, channel};
  const u64 count = prim_count(args.shape, rank, channel);
  for (u64 i = 0; i < count; ++i) {
    const Prim prim = prim_at(args.shape, rank, channel, i);
    bool ok = block.wait(prim);
    // Before the copy, because only the threads that the flags belong to have seen them; the same
    // barrier tells all threads whether to leave. Pairs with the barrier after the copy of the
    // primitive before.
    if constexpr (F != Fault::kNoBarrierBeforeCopy) ok = c.sync_and(ok);
    if (!ok) return false;
    block.move(prim);
    // After the copy, because each post speaks for the loads and stores of all threads, and because
    // all of them have read the counters and destinations that change now.
    if constexpr (F != Fault::kNoBarrierAfterCopy) c.sync();
    block.post(prim);
  }
  return true;
}

}  // namespace pyparallel
