// What two ranks share: the ends of a directed connection on one channel, and the arguments of a
// flag-ordered launch.
//
// Each directed connection and channel has its own pair of counters (slices sent, slices received).
// They only grow, are kept between launches and are advanced only by operations that use the
// connection: with one counter a rank the second operation with another root would wait for slices
// that nobody sends. All compares are circular.
#pragma once
#include "../dtype.h"
#include "../schedule/ll.h"
#include "../schedule/prim.h"

namespace pyparallel {

// An LL connection (schedule/ll.h) is the same with two slots, one operation instead of a slice,
// and no tail: its data carry their flags. It has memory and counters of its own, because the words
// of one protocol would look like flags to the other.
//
// Ends lie in memory of their rank. Each is used by one block only, a counter written by one of its
// threads. `seen` is the newest flag that this thread has acquired: what it allows needs no poll.

// At the sender. A counter that is polled lives in the poller's memory, so polling never crosses
// the link.
struct alignas(64) SendEnd {
  u64 sent;            // slices sent so far
  u64 seen;            // credits acquired so far
  const u64* credits;  // local, written by the receiver: slices it has consumed
  u64* peer_tail;      // the receiver's word that counts slices that arrived; LL: null
  u8* slots;           // the receiver's slots
};

// At the receiver.
struct alignas(64) RecvEnd {
  u64 received;       // slices consumed so far
  u64 seen;           // slices acquired so far; LL: unused
  const u64* tail;    // local, written by the sender: slices that arrived; LL: null
  u64* peer_credits;  // the sender's word
  const u8* slots;    // local
};

// Which wait expired first. Lives in host memory that every device can write; claimed once by
// compare-and-swap.
struct FailureRecord {
  u32 claimed;   // 0 until somebody writes the rest
  u32 complete;  // 1, released after the rest was written
  u32 rank, peer, channel;
  u32 waits_for_credit;  // 0: data, 1: credit
  u64 wanted, seen;      // step numbers
};

struct RankBuffers {
  const u8* input;
  u8* output;
  // In memory of this rank's device.
  SendEnd* sends;  // [peer * nchannels + channel]
  RecvEnd* recvs;
  u64* fan_out;  // [channel * kMaxRanks + i]: where a copy to several ranks goes
};

// Passed by value. Blocks of all ranks run at the same time; each waits at most timeout_ns for one
// flag.
struct FlagArgs {
  FlagShape shape;
  DType dtype;     // read only by the reducing algorithms
  u64 slot_bytes;  // LL: of one buffer
  u64 timeout_ns;
  u32* abort_word;  // non-zero: leave at once. Stays set for ever; a new connection set has a new
                    // word
  FailureRecord* failure;
  RankBuffers ranks[kMaxRanks];
};

}  // namespace pyparallel
