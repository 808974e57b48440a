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

// The piece that is read once and then written to every destination: it stays in the first-level
// cache.
constexpr u64 kBlock = 4096;
const LoopKernels* vector_kernels() {
  static const LoopKernels* const kernels = avx2_kernels();
  return kernels;
}

// Bytes up to the next line, at most `bytes`.
u64 head_of(const u8* to, u64 bytes) {
  return std::min<u64>(-reinterpret_cast<std::uintptr_t>(to) % kLine, bytes);
}

// True if all lie at the same position within a line.
bool lie_alike(u8* const* destinations, u32 ndestinations) {
  for (u32 m = 1; m < ndestinations; ++m) {
    const auto difference = reinterpret_cast<std::uintptr_t>(destinations[m]) ^
                            reinterpret_cast<std::uintptr_t>(destinations[0]);
    if (difference % kLine != 0) return false;
  }
  return true;
}

// Streams to destinations that lie alike; bytes before the first and after the last whole line are
// stored normally.
void stream(u8* const* destinations, u32 ndestinations, const u8* from, u64 bytes) {
  const u64 head = head_of(destinations[0], bytes);
  const u64 nlines = (bytes - head) / kLine, tail = head + nlines * kLine;
  u8* lines[kMaxRanks];
  for (u32 m = 0; m < ndestinations; ++m) {
    lines[m] = destinations[m] + head;
    // A part of a line is merged with what memory holds. Fetched now, that is here when the whole
    // lines are done; else every later store would wait for it.
    if (head != 0) __builtin_prefetch(destinations[m], 1);
    if (tail != bytes) __builtin_prefetch(destinations[m] + tail, 1);
  }
  const LoopKernels* kernels = vector_kernels();
  (kernels ? *kernels : baseline_kernels()).stream(lines, ndestinations, from + head, nlines);
  for (u32 m = 0; m < ndestinations; ++m) {
    if (head != 0) std::memcpy(destinations[m], from, head);
    if (tail != bytes) std::memcpy(destinations[m] + tail, from + tail, bytes - tail);
  }
}

// Streams to any destinations.
void stream_to_all(u8* const* destinations, u32 ndestinations, const u8* from, u64 bytes) {
  if (lie_alike(destinations, ndestinations)) {
    if (ndestinations != 0) stream(destinations, ndestinations, from, bytes);
    return;
  }
  for (u64 begin = 0; begin < bytes; begin += kBlock) {
    for (u32 m = 0; m < ndestinations; ++m) {
      u8* const to = destinations[m] + begin;
      stream(&to, 1, from + begin, std::min(kBlock, bytes - begin));
    }
  }
}

u64 last_level_cache_bytes() {
  long bytes = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  return bytes > 0 ? static_cast<u64>(bytes)
                   : u64{32} << 20;  // 32 MiB where the system does not say
}

struct Sum {
  DType dtype;
  u8* const* destinations;
  u32 ndestinations;
  const u8* const* sources;
  u32 nsources;

  // Sums bytes [begin, end).
  void run(u64 begin, u64 end, Stores stores) const {
    const LoopKernels* kernels = vector_kernels();
    if (kernels) begin += run_with(*kernels, begin, end, stores);
    if (begin < end) run_with(baseline_kernels(), begin, end, stores);
  }
  // As a kernel does: returns how many bytes it summed.
  u64 run_with(const LoopKernels& kernels, u64 begin, u64 end, Stores stores) const {
    u8* to[kMaxRanks];
    const u8* from[kMaxRanks];
    for (u32 m = 0; m < ndestinations; ++m) to[m] = destinations[m] + begin;
    for (u32 k = 0; k < nsources; ++k) from[k] = sources[k] + begin;
    const auto& sums = stores == Stores::kStreaming ? kernels.sum_streaming : kernels.sum;
    return sums[static_cast<u32>(dtype)](to, ndestinations, from, nsources, end - begin);
  }
  bool in_place() const {
    return std::find_first_of(sources, sources + nsources, destinations,
                              destinations + ndestinations) != sources + nsources;
  }
};

}  // namespace

void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

Stores stores_for(u64 bytes) {
  static const u64 limit = last_level_cache_bytes() / 2;
  return bytes > limit ? Stores::kStreaming : Stores::kCached;
}

void copy(u8* const* destinations, u32 ndestinations, const u8* source, u64 bytes, Stores stores) {
  u8* to[kMaxRanks];
  u32 n = 0;
  for (u32 m = 0; m < ndestinations; ++m) {
    if (destinations[m] != source) to[n++] = destinations[m];
  }
  if (stores == Stores::kStreaming) {
    stream_to_all(to, n, source, bytes);
    return;
  }
  const u64 block = n == 1 ? bytes : kBlock;
  for (u64 begin = 0; begin < bytes; begin += block) {
    for (u32 m = 0; m < n; ++m)
      std::memcpy(to[m] + begin, source + begin, std::min(block, bytes - begin));
  }
}

void sum(DType dtype, u8* const* destinations, u32 ndestinations, const u8* const* sources,
         u32 nsources, u64 bytes, Stores stores) {
  const Sum sum{dtype, destinations, ndestinations, sources, nsources};
  const u64 head = head_of(destinations[0], bytes);
  // Cached stores all the same where the first line would cut an element, and in place: what was
  // just read is in the cache, and storing past the cache would throw it out first.
  if (stores == Stores::kCached || !lie_alike(destinations, ndestinations) ||
      head % element_bytes(dtype) != 0 || sum.in_place()) {
    return sum.run(0, bytes, Stores::kCached);
  }
  sum.run(0, head, Stores::kCached);
  sum.run(head, bytes, Stores::kStreaming);
}

}  // namespace pyparallel::host
