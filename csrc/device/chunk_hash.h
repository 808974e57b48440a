// The hash of a chunk: two sums of NH, 128 bits, equal for different bytes with probability at most
// 2^-64 (docs/design.md has the argument).
//
// NH multiplies pairs of 32-bit words, each with a random key added first:
//   sum over packs of (m0 + k0) * (m1 + k1) + (m2 + k2) * (m3 + k3),
// additions modulo 2^32 inside the brackets, modulo 2^64 outside. The second sum takes each pack
// with the key of the next one. A key belongs to a position in the chunk, so the sum is the same
// whichever threads add it up.
#pragma once
#include "context.h"

namespace pyparallel {

struct ChunkHash {
  u64 first, second;
  PP_HD bool operator==(const ChunkHash& other) const {
    return first == other.first && second == other.second;
  }
};

// Keys for chunks of at most `bytes` bytes.
constexpr u32 hash_keys(u32 bytes) { return (bytes + sizeof(Pack) - 1) / sizeof(Pack) + 1; }

// What hashing needs besides a Context.
//
// - sync_sum(value): the sum over all threads, in every thread. A barrier as sync() is.
// - add(word, value): an atomic addition within this device, relaxed.
template <class C>
concept HashContext = Context<C> && requires(const C& c, u64* word, u64 value) {
  { c.sync_sum(value) } -> std::same_as<u64>;
  { c.add(word, value) } -> std::same_as<void>;
};

PP_HD u64 nh(const Pack& pack, const Pack& key) {
  const u32 a = pack.words[0] + key.words[0], b = pack.words[1] + key.words[1];
  const u32 c = pack.words[2] + key.words[2], d = pack.words[3] + key.words[3];
  return u64{a} * b + u64{c} * d;
}

PP_HD void add_pack(ChunkHash& hash, const Pack& pack, const Pack& key, const Pack& next_key) {
  hash.first += nh(pack, key);
  hash.second += nh(pack, next_key);
}

// 16 bytes at an address that is a multiple of sizeof(W) only.
template <class W, Context C>
PP_D Pack load_pack(const C& c, const u8* from) {
  W words[sizeof(Pack) / sizeof(W)];
  PP_UNROLL
  for (u32 i = 0; i < sizeof(Pack) / sizeof(W); ++i)
    words[i] = c.load(reinterpret_cast<const W*>(from) + i);
  Pack pack;
  __builtin_memcpy(&pack, words, sizeof(Pack));
  return pack;
}

// The last bytes of a chunk, fewer than a pack, and zeros.
template <Context C>
PP_D Pack load_tail(const C& c, const u8* from, u32 bytes) {
  Pack pack{};
  for (u32 i = 0; i < bytes; ++i) pack.words[i / 4] |= u32{c.load(from + i)} << (8 * (i % 4));
  return pack;
}

// This thread's part of the hash of all whole packs, kUnroll packs in flight.
template <class W, u32 kUnroll, Context C>
PP_D ChunkHash hash_part(const C& c, const Pack* keys, const u8* source, u32 bytes) {
  ChunkHash hash{0, 0};
  const u32 npacks = bytes / sizeof(Pack), stride = c.nthreads();
  u32 i = c.tid();
  for (; i + (kUnroll - 1) * stride < npacks; i += kUnroll * stride) {
    Pack packs[kUnroll];
    PP_UNROLL
    for (u32 u = 0; u < kUnroll; ++u)
      packs[u] = load_pack<W>(c, source + u64{i + u * stride} * sizeof(Pack));
    PP_UNROLL
    for (u32 u = 0; u < kUnroll; ++u) {
      const Pack* key = keys + i + u * stride;
      add_pack(hash, packs[u], c.load(key), c.load(key + 1));
    }
  }
  for (; i < npacks; i += stride) {
    const Pack pack = load_pack<W>(c, source + u64{i} * sizeof(Pack));
    add_pack(hash, pack, c.load(keys + i), c.load(keys + i + 1));
  }
  return hash;
}

// The hash of bytes at any address, in every thread of the block. All threads call it.
template <u32 kUnroll, HashContext C>
PP_D ChunkHash hash_chunk(const C& c, const Pack* keys, const u8* source, u32 bytes) {
  const u64 misaligned = reinterpret_cast<u64>(source) % sizeof(Pack);
  ChunkHash hash;
  if (misaligned == 0) {
    hash = hash_part<Pack, kUnroll>(c, keys, source, bytes);
  } else if (misaligned % sizeof(u32) == 0) {
    hash = hash_part<u32, 2>(c, keys, source, bytes);
  } else if (misaligned % sizeof(u16) == 0) {
    hash = hash_part<u16, 1>(c, keys, source, bytes);
  } else {
    hash = hash_part<u8, 1>(c, keys, source, bytes);
  }
  const u32 npacks = bytes / sizeof(Pack), tail = bytes % sizeof(Pack);
  if (tail != 0 && c.tid() == npacks % c.nthreads()) {
    const Pack pack = load_tail(c, source + u64{npacks} * sizeof(Pack), tail);
    add_pack(hash, pack, c.load(keys + npacks), c.load(keys + npacks + 1));
  }
  return {c.sync_sum(hash.first), c.sync_sum(hash.second)};
}

}  // namespace pyparallel
