// The body of every collective of the LL protocol (schedule/ll.h): one block (rank, channel) writes
// its input to other ranks as words that carry their own flag, and polls the words of others.
#pragma once
#include "numeric.h"
#include "protocol.h"

namespace pyparallel {

PP_HD u64 ll_word(u32 data, u32 flag) { return u64{flag} << 32 | data; }

// Payload bytes [at, at + 8) of `bytes` bytes at `from`, any alignment; 0 behind their end.
template <Context C>
PP_D u64 load_payload(const C& c, const u8* from, u64 at, u64 bytes) {
  u64 payload = 0;
  if (at + kLlPayload <= bytes && (reinterpret_cast<u64>(from + at) & (kLlPayload - 1)) == 0) {
    return c.load(reinterpret_cast<const u64*>(from + at));
  }
  for (u64 i = 0; i < kLlPayload && at + i < bytes; ++i) {
    payload |= u64{c.load(from + at + i)} << (8 * i);
  }
  return payload;
}
template <Context C>
PP_D void store_payload(const C& c, u8* to, u64 at, u64 bytes, u64 payload) {
  if (at + kLlPayload <= bytes && (reinterpret_cast<u64>(to + at) & (kLlPayload - 1)) == 0) {
    c.store(reinterpret_cast<u64*>(to + at), payload);
    return;
  }
  for (u64 i = 0; i < kLlPayload && at + i < bytes; ++i) {
    c.store(to + at + i, static_cast<u8>(payload >> (8 * i)));
  }
}

// The elements of one line's payload, summed in fp32 for 16-bit types.
template <class T>
struct LlSum {
  static constexpr u32 kElements = kLlPayload / sizeof(T);
  Accumulator<T> values[kElements];

  PP_D static LlSum of(u64 payload) {
    T elements[kElements];
    __builtin_memcpy(elements, &payload, kLlPayload);
    LlSum sum;
    PP_UNROLL
    for (u32 e = 0; e < kElements; ++e) sum.values[e] = widen<T>(elements[e]);
    return sum;
  }
  PP_D void add(const LlSum& other) {
    PP_UNROLL
    for (u32 e = 0; e < kElements; ++e) values[e] = values[e] + other.values[e];
  }
  PP_D u64 payload() const {
    T elements[kElements];
    PP_UNROLL
    for (u32 e = 0; e < kElements; ++e) elements[e] = narrow<T>(values[e]);
    u64 result;
    __builtin_memcpy(&result, elements, kLlPayload);
    return result;
  }
};

// One block: its part of the payload and its ends.
//
// Line i of a part is written by thread i % nthreads of each sender and polled by the same thread
// of the receiver, so input and output may be the same memory: a thread reads a line of its input
// for the last time before it writes it. Credits belong to threads as in flag_ordered.h.
template <class T, Fault F, FlagOrderedContext C>
struct LlBlock {
  const C& c;
  const FlagArgs& args;
  const RankBuffers& buffers;
  u32 rank, channel;
  Range part;

  PP_D SendEnd* send_end(u32 peer) const {
    return buffers.sends + (peer * args.shape.nchannels + channel);
  }
  PP_D RecvEnd* recv_end(u32 peer) const {
    return buffers.recvs + (peer * args.shape.nchannels + channel);
  }
  PP_D u64 buffer_offset(u64 operation) const {
    if constexpr (F == Fault::kLlOneBuffer) return 0;
    return (operation & (kLlBuffers - 1)) * args.slot_bytes;
  }

  PP_D bool wait_for_credits(u32 peers) const {
    bool ok = true;
    for (u32 peer = c.tid(); ok && peer < args.shape.nranks; peer += c.nthreads()) {
      if ((peers >> peer & 1) == 0) continue;
      SendEnd* end = send_end(peer);
      ok = wait_credit<F>(c, args, {rank, peer, channel, true}, end, c.load(&end->sent));
    }
    return ok;
  }

  PP_D void send(u32 peer) const {
    SendEnd* end = send_end(peer);
    const u64 operation = c.load(&end->sent);
    Line* lines = reinterpret_cast<Line*>(c.load(&end->slots) + buffer_offset(operation));
    const bool all = F != Fault::kLlNoRefresh && ll_refreshes(operation);
    const u64 count = all ? args.slot_bytes / kLlLineBytes : ll_lines(part.bytes);
    const u32 flag = ll_flag(operation);
    const u8* input = buffers.input + part.begin;
    for (u64 i = c.tid(); i < count; i += u64{C::kLinesInFlight} * c.nthreads()) {
      u64 payload[C::kLinesInFlight];
      PP_UNROLL
      for (u32 u = 0; u < C::kLinesInFlight; ++u) {
        payload[u] = load_payload(c, input, (i + u64{u} * c.nthreads()) * kLlPayload, part.bytes);
      }
      PP_UNROLL
      for (u32 u = 0; u < C::kLinesInFlight; ++u) {
        const u64 line = i + u64{u} * c.nthreads();
        if (line >= count) continue;
        c.store_line(lines + line, {{ll_word(static_cast<u32>(payload[u]), flag),
                                     ll_word(static_cast<u32>(payload[u] >> 32), flag)}});
      }
    }
  }

  PP_D static bool arrived(u64 word, u32 flag) {
    const u32 seen = static_cast<u32>(word >> 32);
    return F == Fault::kLlStaleFlag ? seen != 0 : seen == flag;
  }

  // Polls lines `first`, first + nthreads, ... below `count` from `peer`; false if the block must
  // leave.
  PP_D bool receive(u32 peer, u64 first, u64 count, u64 (&payload)[C::kLinesInFlight]) const {
    RecvEnd* end = recv_end(peer);
    const u64 operation = c.load(&end->received);
    const u8* buffer =
        c.load(&end->slots) + buffer_offset(operation + (F == Fault::kLlWrongBuffer));
    const Line* lines = reinterpret_cast<const Line*>(buffer);
    const u32 flag = ll_flag(operation);
    Patience patience;
    for (;;) {
      bool all = true;
      u64 seen = 0;
      PP_UNROLL
      for (u32 u = 0; u < C::kLinesInFlight; ++u) {
        const u64 i = first + u64{u} * c.nthreads();
        if (i >= count) continue;
        const Line line = c.relaxed_line(lines + i);
        payload[u] = u64{static_cast<u32>(line.words[0])} | line.words[1] << 32;
        for (const u64 word : line.words) {
          if (arrived(word, flag)) continue;
          all = false;
          // The flag as a number of operations, which it is modulo 2^32.
          seen = operation + 1 - (flag - static_cast<u32>(word >> 32));
        }
      }
      if (all) return true;
      if (!patience.go_on(c, args, {rank, peer, channel, false}, operation + 1, seen)) return false;
    }
  }

  // Lines `first`, first + nthreads, ... of `source`, which may be this rank; false if the block
  // must leave.
  PP_D bool load(u32 source, u64 first, u64 count, u64 (&payload)[C::kLinesInFlight]) const {
    if (source != rank) return receive(source, first, count, payload);
    PP_UNROLL
    for (u32 u = 0; u < C::kLinesInFlight; ++u) {
      const u64 at = (first + u64{u} * c.nthreads()) * kLlPayload;
      payload[u] = load_payload(c, buffers.input + part.begin, at, part.bytes);
    }
    return true;
  }

  PP_D bool combine(u32 sources) const {
    if (sources == 0) return true;
    const u64 count = ll_lines(part.bytes);
    const u32 begin = lowest_rank(sources);
    u8* output = buffers.output + part.begin;
    for (u64 first = c.tid(); first < count; first += u64{C::kLinesInFlight} * c.nthreads()) {
      u64 payload[C::kLinesInFlight] = {};  // behind the last line: 0
      LlSum<T> sums[C::kLinesInFlight];
      if (!load(begin, first, count, payload)) return false;
      PP_UNROLL
      for (u32 u = 0; u < C::kLinesInFlight; ++u) sums[u] = LlSum<T>::of(payload[u]);
      for (u32 source = begin + 1; source < args.shape.nranks; ++source) {
        if ((sources >> source & 1) == 0) continue;
        if (!load(source, first, count, payload)) return false;
        PP_UNROLL
        for (u32 u = 0; u < C::kLinesInFlight; ++u) sums[u].add(LlSum<T>::of(payload[u]));
      }
      PP_UNROLL
      for (u32 u = 0; u < C::kLinesInFlight; ++u) {
        const u64 at = (first + u64{u} * c.nthreads()) * kLlPayload;
        store_payload(c, output, at, part.bytes, sums[u].payload());
      }
    }
    return true;
  }

  // This thread's counters and credits.
  PP_D void post(const LlRole& role) const {
    for (u32 peer = c.tid(); peer < args.shape.nranks; peer += c.nthreads()) {
      if ((role.send_to >> peer & 1) != 0) {
        SendEnd* end = send_end(peer);
        c.store(&end->sent, c.load(&end->sent) + 1);
      }
      if (peer != rank && (role.sources >> peer & 1) != 0) {
        RecvEnd* end = recv_end(peer);
        const u64 received = c.load(&end->received) + 1;
        post_slice<F>(c, c.load(&end->peer_credits), received);
        c.store(&end->received, received);
      }
    }
  }
};

// As run_flag_ordered(), for the LL algorithms. T is the element type; a broadcast takes i32, a sum
// of one term, whatever it carries.
template <class T, Fault F = Fault::kNone, FlagOrderedContext C>
PP_D bool run_ll(const C& c, const FlagArgs& args, u32 rank, u32 channel) {
  const FlagShape& shape = args.shape;
  const Range part = channel_range(shape, channel);
  if (part.bytes == 0) return true;
  const LlRole role = ll_role(shape, rank);
  const LlBlock<T, F, C> block{c, args, args.ranks[rank], rank, channel, part};
  bool ok = block.wait_for_credits(role.send_to);
  // Before the words, because only the threads that the credits belong to have seen them.
  if constexpr (F != Fault::kNoBarrierBeforeCopy) ok = c.sync_and(ok);
  if (!ok) return false;
  // Each rank begins with another peer, so that not all write to one at the same time.
  for (u32 k = 1; k < shape.nranks; ++k) {
    const u32 peer = (rank + k) % shape.nranks;
    if ((role.send_to >> peer & 1) != 0) block.send(peer);
  }
  // No barrier here: words are polled by their flags, and a thread polls what others sent.
  ok = block.combine(role.sources);
  // Before the credits, because each speaks for the loads of all threads; all have read the
  // counters that change now.
  if constexpr (F != Fault::kNoBarrierAfterCopy) ok = c.sync_and(ok);
  if (!ok) return false;
  block.post(role);
  return true;
}

}  // namespace pyparallel
