// The loops that benchmarks compare with. They share the pool with the collectives, and no loop.
#include "limits.h"

#include <algorithm>
#include <cstring>

#include "../../check.h"
#include "pool.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define PP_AVX2 __attribute__((target("avx2")))
#endif

namespace pyparallel::host {
namespace {

constexpr u64 kTileBytes = 256 << 10;  // as large as those of the collectives
constexpr u64 kBlock = 4096;
constexpr u64 kUnit = 256;  // four lines

struct Job {
  Stores stores;
  std::span<const u8* const> sources;
  std::span<u8* const> destinations;
  u64 bytes;
};

void combine_words(u8* to, std::span<const u8* const> sources, u64 begin, u64 bytes) {
  std::memcpy(to, sources[0] + begin, bytes);
  for (const u8* source : sources.subspan(1)) {
    for (u64 i = 0; i < bytes; i += sizeof(u64)) {
      u64 a, b;
      std::memcpy(&a, to + i, sizeof a);
      std::memcpy(&b, source + begin + i, sizeof b);
      a ^= b;
      std::memcpy(to + i, &a, sizeof a);
    }
  }
}

void run_cached(const Job& job, u64 begin, u64 end) {
  if (job.sources.size() == 1) {
    for (u8* to : job.destinations) std::memcpy(to + begin, job.sources[0] + begin, end - begin);
    return;
  }
  for (; begin < end; begin += kBlock) {
    const u64 bytes = std::min(kBlock, end - begin);
    u8* const first = job.destinations[0] + begin;
    combine_words(first, job.sources, begin, bytes);
    for (u8* to : job.destinations.subspan(1)) std::memcpy(to + begin, first, bytes);
  }
}

#if defined(PP_AVX2)

// Four lines of every source, then four lines to each destination.
PP_AVX2 void run_streaming(const Job& job, u64 begin, u64 end) {
  constexpr u64 kVectors = kUnit / sizeof(__m256i);
  for (u64 i = begin; i < end; i += kUnit) {
    __m256i vectors[kVectors];
    const auto* first = reinterpret_cast<const __m256i*>(job.sources[0] + i);
    for (u64 u = 0; u < kVectors; ++u) vectors[u] = _mm256_load_si256(first + u);
    for (const u8* source : job.sources.subspan(1)) {
      const auto* from = reinterpret_cast<const __m256i*>(source + i);
      for (u64 u = 0; u < kVectors; ++u)
        vectors[u] = _mm256_xor_si256(vectors[u], _mm256_load_si256(from + u));
    }
    for (u8* destination : job.destinations) {
      auto* to = reinterpret_cast<__m256i*>(destination + i);
      for (u64 u = 0; u < kVectors; ++u) _mm256_stream_si256(to + u, vectors[u]);
    }
  }
  _mm_sfence();
}

bool can_stream() { return __builtin_cpu_supports("avx2"); }

#else

void run_streaming(const Job& job, u64 begin, u64 end) { run_cached(job, begin, end); }
bool can_stream() { return false; }

#endif

void run_tile(const Job& job, u64 tile) {
  const u64 begin = tile * kTileBytes, end = std::min(begin + kTileBytes, job.bytes);
  const bool streaming = job.stores == Stores::kStreaming && can_stream();
  streaming ? run_streaming(job, begin, end) : run_cached(job, begin, end);
}

void check_multiple(const char* what, u64 value, u64 of) {
  PP_CHECK_ARG(value % of == 0, "move_at_limit: ", what, " ", value, " is not a multiple of ", of);
}

}  // namespace

void move_at_limit(Stores stores, std::span<const u8* const> sources,
                   std::span<u8* const> destinations, u64 bytes) {
  for (const u64 count : {sources.size(), destinations.size()}) {
    PP_CHECK_ARG(count >= 1 && count <= kMaxRanks, "move_at_limit: got ", sources.size(),
                 " sources and ", destinations.size(), " destinations, but takes 1 to ", kMaxRanks,
                 " of each");
  }
  check_multiple("bytes", bytes, kUnit);
  for (const u8* source : sources) check_multiple("source", reinterpret_cast<u64>(source), kLine);
  for (u8* destination : destinations) {
    check_multiple("destination", reinterpret_cast<u64>(destination), kLine);
  }
  Job job{stores, sources, destinations, bytes};
  Pool::instance().run(
      (bytes + kTileBytes - 1) / kTileBytes,
      [](void* context, u64 tile) { run_tile(*static_cast<const Job*>(context), tile); }, &job);
}

}  // namespace pyparallel::host
