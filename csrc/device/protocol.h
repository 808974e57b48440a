// Waiting for and posting the flags of a connection. The thread that a flag belongs to calls these.
#pragma once
#include "context.h"

namespace pyparallel {

// Bugs that tests plant to see that they are found. kNone compiles to nothing.
enum class Fault {
  kNone,
  kNoBarrierBeforeCopy,  // threads copy before one has seen the flag
  kNoBarrierAfterCopy,   // one thread posts before the other threads have copied
  kRelaxedPost,          // the post does not order the copy before it
  kNoAcquire,            // the wait does not order the copy after it
  kEarlyCredit,          // the sender believes in one slot more than there is
  kOffByOneSlice,        // the receiver is content with the slice before
  kOneCreditForAll,      // a copy to several ranks waits for the first one's credit only
  kLlWrongBuffer,        // the receiver looks into the other buffer
  kLlOneBuffer,          // operations do not alternate between buffers
  kLlStaleFlag,          // the receiver takes any flag for the one that it waits for
  kLlNoRefresh,          // words keep their flags while the numbers of operations go once around
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

// The bound of one wait.
struct Patience {
  u64 polls = 0, started = 0, waited = 0;

  // Call after each poll that failed; false if another block aborted or the wait has expired, and
  // then the block must leave. The first look at the clock comes after kPollsPerClock polls: short
  // waits never read it.
  template <FlagOrderedContext C>
  PP_D bool go_on(const C& c, const FlagArgs& args, const WaitFor& wait, u64 wanted, u64 seen) {
    ++polls;
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
    return true;
  }
};

// Polls `word` until it has reached `wanted`; false if the block must leave without touching a
// slot. `cache` is the end's `seen`: what it has reached already is neither polled nor acquired
// again, because a GPU's acquire empties the L1 cache.
template <Fault F = Fault::kNone, FlagOrderedContext C>
PP_D bool wait_reached(const C& c, const FlagArgs& args, const WaitFor& wait, const u64* word,
                       u64* cache, u64 wanted) {
  if (reached(c.load(cache), wanted)) return true;
  Patience patience;
  u64 seen;
  while (!reached(seen = c.relaxed(word), wanted)) {
    if (!patience.go_on(c, args, wait, wanted, seen)) return false;
  }
  // One acquire after the relaxed polls, because the block is about to read (data) or overwrite
  // (credit) what the peer touched before its post; in the loop it would only cost. Pairs with
  // post_slice() at the peer, for all slices up to the number that it returns.
  if constexpr (F != Fault::kNoAcquire) seen = c.acquire(word);
  c.store(cache, seen);
  return true;
}

// Waits for slice `step` (counted from 0 since the connection was made) to arrive.
template <Fault F, FlagOrderedContext C>
PP_D bool wait_data(const C& c, const FlagArgs& args, const WaitFor& wait, RecvEnd* recv,
                    u64 step) {
  const u64 wanted = step + (F == Fault::kOffByOneSlice ? 0 : 1);
  const u64* tail = c.load(&recv->tail);
  return wait_reached<F>(c, args, wait, tail, &recv->seen, wanted);
}

// Waits until the slot of slice `step` is free: until the receiver has consumed the slice that used
// it before.
template <Fault F, FlagOrderedContext C>
PP_D bool wait_credit(const C& c, const FlagArgs& args, const WaitFor& wait, SendEnd* send,
                      u64 step) {
  const u64 wanted = step + 1 - args.shape.slots - (F == Fault::kEarlyCredit ? 1 : 0);
  const u64* credits = c.load(&send->credits);
  return wait_reached<F>(c, args, wait, credits, &send->seen, wanted);
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
