// Low latency (LL) schedules, for small messages: one hop, everybody at once.
//
// Every four bytes of payload travel in a word of eight, whose other half is a flag, so they arrive
// together and no flag has to wait for data: one store and no fence on the way, at twice the bytes.
#pragma once
#include "flag_shape.h"

namespace pyparallel {

// Two words, which are stored and polled together: a payload of eight bytes.
constexpr u64 kLlPayload = 8, kLlLineBytes = 16;

// Operations of a connection use two buffers in turn. A sender waits, as for any slot, until the
// receiver has read the operation that used the buffer before: the one before the last, so in
// practice never.
constexpr u32 kLlBuffers = 2;

// The largest payload of an operation. Twice that, twice, is the memory of a connection.
constexpr u64 kLlMaxBytes = 64 << 10;

// The flag of a connection's operation number `operation`, counted from 0. It takes 32 bits.
PP_HD constexpr u32 ll_flag(u64 operation) { return static_cast<u32>(operation) + 1; }

// Flags repeat after 2^32 operations, and a word that only large messages reach may be that old: it
// would pass for new. So every 2^31 operations two in a row, one for each buffer, write all words
// of their buffer. A word is then never older than 2^31 operations when it is polled, and its flag
// differs from the one that is waited for.
PP_HD constexpr bool ll_refreshes(u64 operation) {
  return (operation & ((u64{1} << 31) - 1)) < kLlBuffers;
}

// What a rank does: it writes its input to a buffer of each rank in send_to; then it adds the
// inputs of `sources` in rank order, itself from its input and others from its buffers, and stores
// the sum. One source is a copy, none is no output. Bit r stands for rank r.
struct LlRole {
  u32 send_to, sources;
};

PP_HD constexpr LlRole ll_role(const FlagShape& shape, u32 rank) {
  const u32 all = (u32{1} << shape.nranks) - 1, root = u32{1} << shape.root;
  const bool is_root = rank == shape.root;
  switch (shape.algorithm) {
    case FlagAlgorithm::kLlBroadcast:
      return {is_root ? all & ~root : 0, is_root ? 0 : root};
    case FlagAlgorithm::kLlReduce:
      return {is_root ? 0 : root, is_root ? all : 0};
    default:
      return {everybody_but(shape.nranks, rank), all};
  }
}

PP_HD constexpr u64 ll_lines(u64 bytes) { return divide_up(bytes, kLlPayload); }

// Of the buffer of one channel.
PP_HD constexpr u64 ll_buffer_bytes(u32 nchannels) {
  return ll_lines(part_range({0, kLlMaxBytes}, nchannels, 0).bytes) * kLlLineBytes;
}

}  // namespace pyparallel
