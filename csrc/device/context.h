// The execution context: what the bodies of this folder need from the machine that runs them.
//
// A body is one block: nthreads() threads that run the same code with the same arguments. On a GPU
// the context is thread indices and PTX; on a virtual device a block is one thread; a test runs
// several threads with a real barrier.
#pragma once
#include <concepts>

#include "connection.h"

namespace pyparallel {

// A list of pointers whose length is known when the body is compiled, so that it stays in
// registers.
template <class P, u32 N>
struct FixedList {
  P at[N];
  static constexpr PP_HD u32 size() { return N; }
  constexpr PP_HD P operator[](u32 k) const { return at[k]; }
};

// A list in memory whose length is known at run time; every pointer is moved on by `offset` bytes.
template <class Byte, class Void>
struct ArrayList {
  Void* const* at;
  u32 count;
  u64 offset;
  PP_HD u32 size() const { return count; }
  PP_HD Byte* operator[](u32 k) const { return static_cast<Byte*>(at[k]) + offset; }
};

// The same list with every pointer moved on by `bytes`. Bodies call it unqualified: a context's own
// lists bring theirs.
template <class P, u32 N>
PP_HD constexpr FixedList<P, N> moved(FixedList<P, N> list, u64 bytes) {
  for (u32 k = 0; k < N; ++k) list.at[k] += bytes;
  return list;
}
template <class Byte, class Void>
PP_HD constexpr ArrayList<Byte, Void> moved(ArrayList<Byte, Void> list, u64 bytes) {
  list.offset += bytes;
  return list;
}

using SourceList = ArrayList<const u8, const void>;
using DestinationList = ArrayList<u8, void>;

// Threads of a block. Every thread calls sync() and sync_and() the same number of times.
//
// - tid(), nthreads(): 0 <= tid() < nthreads(), constant.
// - sync(): a barrier of the block. What a thread wrote before it, every thread reads after it.
// - sync_and(ok): the same barrier; true in every thread if `ok` was true in every thread.
template <class C>
concept BlockContext = requires(const C& c, bool ok) {
  { c.tid() } -> std::same_as<u32>;
  { c.nthreads() } -> std::same_as<u32>;
  { c.sync() } -> std::same_as<void>;
  { c.sync_and(ok) } -> std::same_as<bool>;
};

// Plain loads and stores of packs and of single elements (u8, u16, u32, u64, float, double, ...);
// the address is a multiple of the size. Not atomic: flags order them.
template <class C, class W>
concept MemoryContext = requires(const C& c, const W* from, W* to, W value) {
  { c.load(from) } -> std::same_as<W>;
  { c.store(to, value) } -> std::same_as<void>;
};

// Two words that are stored and polled together (LL protocol). Each is written at once; together
// they may be torn.
struct alignas(16) Line {
  u64 words[2];
};

// Flags between blocks of different ranks, at system scope. Each flag belongs to one thread of a
// block.
//
// - relaxed(word): one poll; orders nothing.
// - acquire(word): pairs with post(). After it (and a barrier) the block sees what was written
//   before the post.
// - post(word, value): a release store. All that the block wrote before its last barrier, and all
//   that this thread saw, is visible to whoever acquires `value`.
// - relaxed_line(line), store_line(line, value): a poll and a store of both words, each of them
//   atomic and relaxed: they order nothing, a word carries its own flag.
// - kLinesInFlight: lines that a thread polls at the same time.
// - now_ns(): a clock that never goes back.
// - pause(polls, waited_ns): called after each poll that failed; may yield or sleep, for at most
//   about 1 ms.
// - kPollsPerClock: a power of two, the polls between two looks at the clock and the abort word.
// - aborted(word), abort(word): read and set an abort word, relaxed.
// - claim(record): true for exactly one caller ever; compare-and-swap of `claimed` from 0 to 1.
// - publish(record): sets `complete` with a release, after the claimer wrote the other fields.
template <class C>
concept FlagContext = requires(const C& c, const u64* word, u64* flag, u64 value, u32* abort_word,
                               FailureRecord* record, Line* line) {
  { c.relaxed(word) } -> std::same_as<u64>;
  { c.acquire(word) } -> std::same_as<u64>;
  { c.post(flag, value) } -> std::same_as<void>;
  { c.relaxed_line(static_cast<const Line*>(line)) } -> std::same_as<Line>;
  { c.store_line(line, Line{}) } -> std::same_as<void>;
  { c.now_ns() } -> std::same_as<u64>;
  { c.pause(value, value) } -> std::same_as<void>;
  { c.aborted(abort_word) } -> std::same_as<bool>;
  { c.abort(abort_word) } -> std::same_as<void>;
  { c.claim(record) } -> std::same_as<bool>;
  { c.publish(record) } -> std::same_as<void>;
  requires(C::kPollsPerClock & (C::kPollsPerClock - 1)) == 0;
  requires C::kLinesInFlight > 0;
};

// The two inner loops. All threads of the block call them with the same arguments; they hold no
// barrier, so the block may read what they wrote only after one. Lists are FixedList, ArrayList or
// anything with size(), [] and moved().
//
// - copy(destinations, source, bytes): any alignment, any length; destinations are u8*, the source
//   is const u8*.
// - sum<T>(destinations, sources, count): `count` elements; sources in order from the first, in
//   Accumulator<T>, rounded once; pointers are multiples of sizeof(T).
//
// A destination may equal the source (or a source of a sum) exactly; other overlaps are not
// allowed. copy_loop() and sum_loop() of loops.h implement both for any context with load() and
// store(). A context that has a faster way must give the same bits (NaN payloads aside).
template <class C>
concept LoopContext =
    requires(const C& c, const u8* source, u64 n, FixedList<u8*, 1> one, FixedList<u8*, 2> two,
             FixedList<const u8*, 2> pair, DestinationList destinations, SourceList sources) {
      { c.copy(one, source, n) } -> std::same_as<void>;
      { c.copy(two, source, n) } -> std::same_as<void>;
      { c.copy(destinations, source, n) } -> std::same_as<void>;
      { c.template sum<float>(two, pair, n) } -> std::same_as<void>;
      { c.template sum<float>(destinations, sources, n) } -> std::same_as<void>;
    };

// What event-ordered bodies need: no flags.
template <class C>
concept Context = BlockContext<C> && MemoryContext<C, Pack> && MemoryContext<C, u8> &&
                  MemoryContext<C, u64> && LoopContext<C>;

// What flag-ordered bodies need.
template <class C>
concept FlagOrderedContext = Context<C> && FlagContext<C>;

}  // namespace pyparallel
