// The body of every flag-ordered collective: one block (rank, channel) runs its list of primitives.
#pragma once
#include "numeric.h"
#include "protocol.h"

namespace pyparallel {

// The element type of a collective that only copies.
struct CopyOnly {};

// One end of the connection that a block uses at the moment, in registers. Its counter goes back to
// memory when the block turns to another peer, or leaves.
template <class End>
struct OpenEnd {
  i32 peer = -1;
  End end{};
  u64 step = 0;  // slices that the connection has carried, as every thread of the block counts them

  // Every thread reads the counter here and thread 0 wrote it: when the block turned away from this
  // peer. The barriers of at least one primitive with another peer lie between.
  template <Context C>
  PP_D void open(const C& c, const End* ends, i32 to, u32 nchannels, u32 channel) {
    if (to < 0 || to == peer) return;
    close(c);
    peer = to;
    end = ends[static_cast<u32>(to) * nchannels + channel];
    step = c.load(static_cast<const u64*>(counter(end)));
  }

  template <Context C>
  PP_D void close(const C& c) const {
    if (peer >= 0 && c.tid() == 0) c.store(counter(end), step);
  }

  PP_D static u64* counter(const SendEnd& send) { return send.sent; }
  PP_D static u64* counter(const RecvEnd& recv) { return recv.received; }
};

// Moves one primitive's bytes, without a flag. `slot_in` and `slot_out` are null where the
// primitive has none.
template <class T, Context C>
PP_D void run_prim(const C& c, const RankBuffers& rank, const Prim& prim, const u8* slot_in,
                   u8* slot_out) {
  const u8* input = rank.input + prim.offset;
  u8* output = rank.output + prim.offset;
  if constexpr (!std::same_as<T, CopyOnly>) {
    if (slot_in != nullptr && prim.read_input) {
      const FixedList<const u8*, 2> sources{{slot_in, input}};
      const u64 count = prim.bytes / sizeof(T);
      if (!prim.write_output) {
        c.template sum<T>(FixedList<u8*, 1>{{slot_out}}, sources, count);
      } else if (slot_out == nullptr) {
        c.template sum<T>(FixedList<u8*, 1>{{output}}, sources, count);
      } else {
        c.template sum<T>(FixedList<u8*, 2>{{output, slot_out}}, sources, count);
      }
      return;
    }
  }
  const u8* source = slot_in != nullptr ? slot_in : input;
  if (prim.write_output && slot_out != nullptr) {
    c.copy(FixedList<u8*, 2>{{output, slot_out}}, source, prim.bytes);
  } else {
    c.copy(FixedList<u8*, 1>{{prim.write_output ? output : slot_out}}, source, prim.bytes);
  }
}

// Runs block (rank, channel) of the collective in args.shape. T is the element type, or CopyOnly
// for a broadcast. Every thread of the block calls this; blocks of all ranks and channels must be
// able to run at the same time. Returns false if the block left early because a wait expired here
// or elsewhere: the connections are then unusable.
template <class T, Fault F = Fault::kNone, FlagOrderedContext C>
PP_D bool run_flag_ordered(const C& c, const FlagArgs& args, u32 rank, u32 channel) {
  const FlagShape& shape = args.shape;
  const RankBuffers& buffers = args.ranks[rank];
  const u64 count = prim_count(shape, rank, channel);
  const u64 slot_mask = shape.slots - 1;
  OpenEnd<RecvEnd> in;
  OpenEnd<SendEnd> out;
  for (u64 i = 0; i < count; ++i) {
    const Prim prim = prim_at(shape, rank, channel, i);
    const bool recv = prim.recv_from >= 0, send = prim.send_to >= 0;
    in.open(c, buffers.recvs, prim.recv_from, shape.nchannels, channel);
    out.open(c, buffers.sends, prim.send_to, shape.nchannels, channel);
    bool ok = true;
    if (c.tid() == 0) {
      const WaitFor data{rank, static_cast<u32>(prim.recv_from), channel, false};
      const WaitFor credit{rank, static_cast<u32>(prim.send_to), channel, true};
      if (recv) ok = wait_data<F>(c, args, data, in.end, in.step);
      if (ok && send) ok = wait_credit<F>(c, args, credit, out.end, out.step);
    }
    // Before the copy, because only thread 0 has seen the flags; the same barrier tells all threads
    // whether to leave. Pairs with the barrier after the copy of the primitive before.
    if constexpr (F != Fault::kNoBarrierBeforeCopy) ok = c.sync_and(ok);
    if (!ok) return false;
    run_prim<T>(c, buffers, prim,
                recv ? in.end.slots + (in.step & slot_mask) * args.slot_bytes : nullptr,
                send ? out.end.slots + (out.step & slot_mask) * args.slot_bytes : nullptr);
    // After the copy, because thread 0's posts speak for the loads and stores of all threads.
    if constexpr (F != Fault::kNoBarrierAfterCopy) c.sync();
    if (c.tid() == 0) {
      if (send) post_slice<F>(c, out.end.peer_tail, out.step + 1);
      if (recv) post_slice<F>(c, in.end.peer_credits, in.step + 1);
    }
    in.step += recv;
    out.step += send;
  }
  in.close(c);
  out.close(c);
  return true;
}

}  // namespace pyparallel
