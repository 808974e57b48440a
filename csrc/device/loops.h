// The plain inner loops, for any context with load() and store(): copies and sums with 16-byte
// packs where all pointers allow it, after a head and before a tail of single elements.
#pragma once
#include "context.h"
#include "numeric.h"

namespace pyparallel {

PP_HD u64 address(const void* pointer) { return reinterpret_cast<u64>(pointer); }

// True if all pointers have the same position within `width` bytes.
template <class Destinations, class Sources>
PP_D bool same_alignment(const Destinations& destinations, const Sources& sources, u64 width) {
  u64 differences = 0;
  for (u32 k = 0; k < sources.size(); ++k)
    differences |= address(sources[k]) ^ address(destinations[0]);
  for (u32 k = 1; k < destinations.size(); ++k)
    differences |= address(destinations[k]) ^ address(destinations[0]);
  return (differences & (width - 1)) == 0;
}

// Bytes from `pointer` to the next multiple of `width`, at most `bytes`.
PP_HD u64 head_bytes(const void* pointer, u64 width, u64 bytes) {
  const u64 head = (width - address(pointer)) & (width - 1);
  return head < bytes ? head : bytes;
}

// ---- Copies ----------------------------------------------------------------------------------

// Copies words [0, count) at `offset` bytes, thread by thread, kUnroll words in flight a thread.
template <class W, u32 kUnroll, Context C, class Destinations>
PP_D void copy_words(const C& c, const Destinations& destinations, const u8* source, u64 offset,
                     u64 count) {
  const W* from = reinterpret_cast<const W*>(source + offset);
  const u64 stride = c.nthreads();
  u64 i = c.tid();
  for (; i + (kUnroll - 1) * stride < count; i += kUnroll * stride) {
    W words[kUnroll];
    PP_UNROLL
    for (u32 u = 0; u < kUnroll; ++u) words[u] = c.load(from + i + u * stride);
    for (u32 k = 0; k < destinations.size(); ++k) {
      W* to = reinterpret_cast<W*>(destinations[k] + offset);
      PP_UNROLL
      for (u32 u = 0; u < kUnroll; ++u) c.store(to + i + u * stride, words[u]);
    }
  }
  for (; i < count; i += stride) {
    const W word = c.load(from + i);
    for (u32 k = 0; k < destinations.size(); ++k)
      c.store(reinterpret_cast<W*>(destinations[k] + offset) + i, word);
  }
}

// The largest word that all pointers can be moved by, in one pass with byte-wise head and tail.
template <class W, u32 kUnroll, Context C, class Destinations>
PP_D void copy_aligned(const C& c, const Destinations& destinations, const u8* source, u64 bytes) {
  const u64 head = head_bytes(source, sizeof(W), bytes);
  const u64 count = (bytes - head) / sizeof(W), end = head + count * sizeof(W);
  copy_words<u8, 1>(c, destinations, source, 0, head);
  copy_words<W, kUnroll>(c, destinations, source, head, count);
  copy_words<u8, 1>(c, destinations, source, end, bytes - end);
}

// LoopContext::copy for any context.
template <u32 kUnroll, Context C, class Destinations>
PP_D void copy_loop(const C& c, const Destinations& destinations, const u8* source, u64 bytes) {
  const FixedList<const u8*, 1> sources{{source}};
  if (same_alignment(destinations, sources, sizeof(Pack))) {
    copy_aligned<Pack, kUnroll>(c, destinations, source, bytes);
  } else if (same_alignment(destinations, sources, sizeof(u32))) {
    copy_aligned<u32, kUnroll>(c, destinations, source, bytes);
  } else if (same_alignment(destinations, sources, sizeof(u16))) {
    copy_aligned<u16, kUnroll>(c, destinations, source, bytes);
  } else {
    copy_words<u8, kUnroll>(c, destinations, source, 0, bytes);
  }
}

// ---- Sums ------------------------------------------------------------------------------------

template <class T>
constexpr u32 kPackElements = sizeof(Pack) / sizeof(T);

template <class T>
PP_D void widen_pack(const Pack& pack, Accumulator<T> (&values)[kPackElements<T>]) {
  T elements[kPackElements<T>];
  __builtin_memcpy(elements, &pack, sizeof(Pack));
  PP_UNROLL
  for (u32 e = 0; e < kPackElements<T>; ++e) values[e] = widen<T>(elements[e]);
}

template <class T>
PP_D Pack narrow_pack(const Accumulator<T> (&values)[kPackElements<T>]) {
  T elements[kPackElements<T>];
  PP_UNROLL
  for (u32 e = 0; e < kPackElements<T>; ++e) elements[e] = narrow<T>(values[e]);
  Pack pack;
  __builtin_memcpy(&pack, elements, sizeof(Pack));
  return pack;
}

// Sums packs i, i + stride, ... (kUnroll of them) and stores them. All sources are read before any
// destination is written, because a destination may be a source.
template <class T, u32 kUnroll, Context C, class Destinations, class Sources>
PP_D void sum_packs(const C& c, const Destinations& destinations, const Sources& sources,
                    u64 offset, u64 i, u64 stride) {
  Accumulator<T> sums[kUnroll][kPackElements<T>];
  const Pack* first = reinterpret_cast<const Pack*>(sources[0] + offset);
  PP_UNROLL
  for (u32 u = 0; u < kUnroll; ++u) widen_pack<T>(c.load(first + i + u * stride), sums[u]);
  for (u32 k = 1; k < sources.size(); ++k) {
    const Pack* from = reinterpret_cast<const Pack*>(sources[k] + offset);
    Pack packs[kUnroll];
    PP_UNROLL
    for (u32 u = 0; u < kUnroll; ++u) packs[u] = c.load(from + i + u * stride);
    PP_UNROLL
    for (u32 u = 0; u < kUnroll; ++u) {
      Accumulator<T> values[kPackElements<T>];
      widen_pack<T>(packs[u], values);
      PP_UNROLL
      for (u32 e = 0; e < kPackElements<T>; ++e) sums[u][e] = sums[u][e] + values[e];
    }
  }
  Pack results[kUnroll];
  PP_UNROLL
  for (u32 u = 0; u < kUnroll; ++u) results[u] = narrow_pack<T>(sums[u]);
  for (u32 k = 0; k < destinations.size(); ++k) {
    Pack* to = reinterpret_cast<Pack*>(destinations[k] + offset);
    PP_UNROLL
    for (u32 u = 0; u < kUnroll; ++u) c.store(to + i + u * stride, results[u]);
  }
}

// Elements [begin, end), one at a time.
template <class T, Context C, class Destinations, class Sources>
PP_D void sum_elements(const C& c, const Destinations& destinations, const Sources& sources,
                       u64 begin, u64 end) {
  for (u64 i = begin + c.tid(); i < end; i += c.nthreads()) {
    Accumulator<T> sum = widen<T>(c.load(reinterpret_cast<const T*>(sources[0]) + i));
    for (u32 k = 1; k < sources.size(); ++k) {
      sum = sum + widen<T>(c.load(reinterpret_cast<const T*>(sources[k]) + i));
    }
    const T result = narrow<T>(sum);
    for (u32 k = 0; k < destinations.size(); ++k)
      c.store(reinterpret_cast<T*>(destinations[k]) + i, result);
  }
}

// LoopContext::sum for any context. The same element is always summed by one thread, in one go.
template <class T, u32 kUnroll, Context C, class Destinations, class Sources>
PP_D void sum_loop(const C& c, const Destinations& destinations, const Sources& sources,
                   u64 count) {
  u64 head = count, packs = 0;
  if (same_alignment(destinations, sources, sizeof(Pack))) {
    head = head_bytes(sources[0], sizeof(Pack), count * sizeof(T)) / sizeof(T);
    packs = (count - head) / kPackElements<T>;
  }
  sum_elements<T>(c, destinations, sources, 0, head);
  const u64 offset = head * sizeof(T), stride = c.nthreads();
  u64 i = c.tid();
  for (; i + (kUnroll - 1) * stride < packs; i += kUnroll * stride) {
    sum_packs<T, kUnroll>(c, destinations, sources, offset, i, stride);
  }
  for (; i < packs; i += stride) sum_packs<T, 1>(c, destinations, sources, offset, i, stride);
  sum_elements<T>(c, destinations, sources, head + packs * kPackElements<T>, count);
}

}  // namespace pyparallel
