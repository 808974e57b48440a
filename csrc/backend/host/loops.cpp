// Block-wise drivers of the host loops: how results reach their destinations, and which kernels
// this CPU gets.
#include "loops.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace pyparallel::host {
namespace {

constexpr u64 kLine = 64;
// The piece that is read once and then written to every destination: it stays in the first-level
// cache, and every destination gets many whole lines at a time (16-byte streaming stores that
// alternate between destinations are ten times slower).
constexpr u64 kBlock = 4096;

// Streams whole lines; the bytes before the first and after the last line of `to` are stored
// normally.
void stream(u8* to, const u8* from, u64 bytes) {
#if defined(__x86_64__)
  const u64 head = std::min<u64>(-reinterpret_cast<std::uintptr_t>(to) % kLine, bytes);
  std::memcpy(to, from, head);
  u64 i = head;
  for (; i + kLine <= bytes; i += kLine) {
    for (u64 k = 0; k < kLine; k += 16) {
      const __m128i pack = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + k));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + k), pack);
    }
  }
  std::memcpy(to + i, from + i, bytes - i);
#else
  std::memcpy(to, from, bytes);
#endif
}

void store(u8* to, const u8* from, u64 bytes, Stores stores) {
  if (stores == Stores::kStreaming) {
    stream(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

// Because streaming stores are weakly ordered: without it a later release store could become
// visible before them.
void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

u64 last_level_cache_bytes() {
  long bytes = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  return bytes > 0 ? static_cast<u64>(bytes)
                   : u64{32} << 20;  // 32 MiB where the system does not say
}

void sum_block(DType dtype, u8* to, const u8* const* sources, u32 nsources, u64 bytes) {
  static const SumKernels* const vector_kernels = avx2_sum_kernels();
  const auto index = static_cast<u32>(dtype);
  const u64 done = vector_kernels ? vector_kernels->of[index](to, sources, nsources, bytes) : 0;
  if (done == bytes) return;
  const u8* rest[kMaxRanks];
  for (u32 k = 0; k < nsources; ++k) rest[k] = sources[k] + done;
  baseline_sum_kernels().of[index](to + done, rest, nsources, bytes - done);
}

}  // namespace

Stores stores_for(u64 bytes) {
  static const u64 limit = last_level_cache_bytes() / 2;
  return bytes > limit ? Stores::kStreaming : Stores::kCached;
}

void copy(u8* const* destinations, u32 ndestinations, const u8* source, u64 bytes, Stores stores) {
  const u64 block = ndestinations == 1 ? bytes : kBlock;
  for (u64 begin = 0; begin < bytes; begin += block) {
    const u64 length = std::min(block, bytes - begin);
    for (u32 m = 0; m < ndestinations; ++m) {
      u8* const to = destinations[m] + begin;
      if (to != source + begin) store(to, source + begin, length, stores);
    }
  }
  if (stores == Stores::kStreaming) stream_fence();
}

void sum(DType dtype, u8* const* destinations, u32 ndestinations, const u8* const* sources,
         u32 nsources, u64 bytes, Stores stores) {
  if (ndestinations == 1 && stores == Stores::kCached) {
    sum_block(dtype, destinations[0], sources, nsources, bytes);
    return;
  }
  // What was just read is in the cache, and storing past the cache would throw it out first.
  Stores stores_to[kMaxRanks];
  for (u32 m = 0; m < ndestinations; ++m) {
    const bool in_place =
        std::find(sources, sources + nsources, destinations[m]) != sources + nsources;
    stores_to[m] = in_place ? Stores::kCached : stores;
  }
  alignas(kLine) u8 total[kBlock];
  const u8* at[kMaxRanks];
  for (u64 begin = 0; begin < bytes; begin += kBlock) {
    const u64 length = std::min(kBlock, bytes - begin);
    for (u32 k = 0; k < nsources; ++k) at[k] = sources[k] + begin;
    sum_block(dtype, total, at, nsources, length);
    for (u32 m = 0; m < ndestinations; ++m) {
      store(destinations[m] + begin, total, length, stores_to[m]);
    }
  }
  if (stores == Stores::kStreaming) stream_fence();
}

}  // namespace pyparallel::host
