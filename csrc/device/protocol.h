// Waiting for and posting the flags of a connection. One thread of a block calls these.
#pragma once
#include "context.h"

namespace pyparallel {

// Bugs that tests plant to see that they are found. kNone compiles to nothing.
enum class Fault {
  kNone,
  kNoBarrierBeforeCopy,  // threads copy before thread 0 has seen the flag
  kNoBarrierAfterCopy,   // thread 0 posts before the other threads have copied
  kRelaxedPost,          // the post does not order the copy before it
  kNoAcquire,            // the wait does not order the copy after it
  kEarlyCredit,          // the sender believes in one slot more than there is
  kOffByOneSlice,        // the receiver is content with the slice before
};

// Compares step numbers on a circle, so that counters may wrap.
PP_HD constexpr bool reached(u64 seen, u64 wanted) { return static_cast<i64>(seen - wanted) >= 0; }

// Who waits for what: the words of a failure record.
struct WaitFor {
  u32 rank, peer, channel;
  bool credit;
};

// Says which wait expired (the first to claim the record does) and tells every block to leave.
template <FlagOrderedContext C>
PP_D void report_expired(const C& c, const FlagArgs& args, const WaitFor& wait, u64 wanted,
                         u64 seen) {
  if (c.claim(args.failure)) {
    FailureRecord& record = *args.failure;
    record.rank = wait.rank;
    record.peer = wait.peer;
    record.channel = wait.channel;
    record.waits_for_credit = wait.credit;
    record.wanted = wanted;
    record.seen = seen;
    // A release, because the host reads the fields once it has seen `complete`.
    c.publish(args.failure);
  }
  c.abort(args.abort_word);
}

// Polls `word` until it has reached `wanted`; false if another block aborted or this wait has
// expired, and then the block must leave without touching a slot. The first look at the clock comes
// after kPollsPerClock polls: short waits never read it.
template <Fault F = Fault::kNone, FlagOrderedContext C>
PP_D bool wait_reached(const C& c, const FlagArgs& args, const WaitFor& wait, const u64* word,
                       u64 wanted) {
  u64 started = 0, waited = 0;
  for (u64 polls = 1;; ++polls) {
    const u64 seen = c.relaxed(word);
    if (reached(seen, wanted)) break;
    if ((polls & (C::kPollsPerClock - 1)) == 0) {
      if (c.aborted(args.abort_word)) return false;
      const u64 now = c.now_ns();
      if (polls == C::kPollsPerClock) started = now;
      waited = now - started;
      if (waited > args.timeout_ns) {
        report_expired(c, args, wait, wanted, seen);
        return false;
      }
    }
    c.pause(polls, waited);
  }
  // One acquire after the relaxed polls, because the block is about to read (data) or overwrite
  // (credit) what the peer touched before its post; in the loop it would only cost. Pairs with
  // post_slice() at the peer.
  if constexpr (F != Fault::kNoAcquire) c.acquire(word);
  return true;
}

// Waits for slice `step` (counted from 0 since the connection was made) to arrive.
template <Fault F, FlagOrderedContext C>
PP_D bool wait_data(const C& c, const FlagArgs& args, const WaitFor& wait, const RecvEnd& recv,
                    u64 step) {
  const u64 wanted = step + (F == Fault::kOffByOneSlice ? 0 : 1);
  return wait_reached<F>(c, args, wait, recv.tail, wanted);
}

// Waits until the slot of slice `step` is free: until the receiver has consumed the slice that used
// it before.
template <Fault F, FlagOrderedContext C>
PP_D bool wait_credit(const C& c, const FlagArgs& args, const WaitFor& wait, const SendEnd& send,
                      u64 step) {
  const u64 wanted = step + 1 - args.shape.slots - (F == Fault::kEarlyCredit ? 1 : 0);
  return wait_reached<F>(c, args, wait, send.credits, wanted);
}

// Tells the peer that one more slice is there (its tail) or consumed (its credits). Call after a
// barrier of the block: the barrier orders the block's loads and stores before this release, and
// the release makes them precede whatever the peer does after its acquire in wait_reached().
template <Fault F, FlagOrderedContext C>
PP_D void post_slice(const C& c, u64* peer_word, u64 count) {
  if constexpr (F == Fault::kRelaxedPost) {
    c.post_relaxed(peer_word, count);
  } else {
    c.post(peer_word, count);
  }
}

}  // namespace pyparallel
