// Kernels for AVX2 and F16C. Everything here is compiled for those instructions, so the file
// calls no inline function of another header.
#include "loops.h"

#if defined(__x86_64__) && defined(__GNUC__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#include <immintrin.h>

namespace pyparallel::host {
inline namespace avx2 {
namespace {

__m256i load_bits(const u8* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
__m128i load_half(const u8* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

template <Stores kStores>
void store_bits(u8* to, __m256i bits) {
  auto* const at = reinterpret_cast<__m256i*>(to);
  kStores == Stores::kStreaming ? _mm256_stream_si256(at, bits) : _mm256_storeu_si256(at, bits);
}
template <Stores kStores>
void store_bits(u8* to, __m128i bits) {
  auto* const at = reinterpret_cast<__m128i*>(to);
  kStores == Stores::kStreaming ? _mm_stream_si128(at, bits) : _mm_storeu_si128(at, bits);
}

// Each Lanes type: how many bytes of memory one vector holds, and how it is widened, added and
// narrowed.
struct Float32Lanes {
  static constexpr u64 kBytes = 32;
  using Vector = __m256;
  static Vector load(const u8* from) { return _mm256_castsi256_ps(load_bits(from)); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static __m256i narrow(Vector v) { return _mm256_castps_si256(v); }
};

struct Float64Lanes {
  static constexpr u64 kBytes = 32;
  using Vector = __m256d;
  static Vector load(const u8* from) { return _mm256_castsi256_pd(load_bits(from)); }
  static Vector add(Vector a, Vector b) { return _mm256_add_pd(a, b); }
  static __m256i narrow(Vector v) { return _mm256_castpd_si256(v); }
};

struct Int32Lanes {
  static constexpr u64 kBytes = 32;
  using Vector = __m256i;
  static Vector load(const u8* from) { return load_bits(from); }
  static Vector add(Vector a, Vector b) { return _mm256_add_epi32(a, b); }
  static __m256i narrow(Vector v) { return v; }
};

struct Int64Lanes {
  static constexpr u64 kBytes = 32;
  using Vector = __m256i;
  static Vector load(const u8* from) { return load_bits(from); }
  static Vector add(Vector a, Vector b) { return _mm256_add_epi64(a, b); }
  static __m256i narrow(Vector v) { return v; }
};

struct Float16Lanes {
  static constexpr u64 kBytes = 16;
  using Vector = __m256;
  static Vector load(const u8* from) { return _mm256_cvtph_ps(load_half(from)); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static __m128i narrow(Vector v) {
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m128i nan16 =
        _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
    const __m128i rounded = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm_blendv_epi8(rounded, _mm_set1_epi16(0x7fff), nan16);
  }
};

struct BFloat16Lanes {
  static constexpr u64 kBytes = 16;
  using Vector = __m256;
  static Vector load(const u8* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(from)), 16));
  }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static __m128i narrow(Vector v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i chosen = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fff), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
  }
};

template <class Lanes, Stores kStores>
u64 sum_vectors(u8* const* destinations, u32 ndestinations, const u8* const* sources, u32 nsources,
                u64 bytes) {
  constexpr int kUnroll = 4;  // independent additions in flight, which hides their latency
  constexpr u64 kStep = kUnroll * Lanes::kBytes;
  static_assert(kStep % kLine == 0);
  // How far ahead lines are fetched: without it 16-bit sums take a fifth longer on a Xeon, because
  // their arithmetic fills the window in which the processor finds the next loads by itself.
  constexpr u64 kAhead = 1024;
  u64 i = 0;
  for (; i + kStep <= bytes; i += kStep) {
    if constexpr (kStores == Stores::kStreaming) {  // from and to memory
      for (u32 k = 0; k < nsources; ++k) {
        for (u64 line = 0; line < kStep; line += kLine)
          _mm_prefetch(reinterpret_cast<const char*>(sources[k] + i + kAhead + line), _MM_HINT_T0);
      }
    }
    typename Lanes::Vector total[kUnroll];
    for (int u = 0; u < kUnroll; ++u) total[u] = Lanes::load(sources[0] + i + u * Lanes::kBytes);
    for (u32 k = 1; k < nsources; ++k) {
      for (int u = 0; u < kUnroll; ++u) {
        total[u] = Lanes::add(total[u], Lanes::load(sources[k] + i + u * Lanes::kBytes));
      }
    }
    decltype(Lanes::narrow(total[0])) bits[kUnroll];
    for (int u = 0; u < kUnroll; ++u) bits[u] = Lanes::narrow(total[u]);
    for (u32 m = 0; m < ndestinations; ++m) {
      for (int u = 0; u < kUnroll; ++u)
        store_bits<kStores>(destinations[m] + i + u * Lanes::kBytes, bits[u]);
    }
  }
  return i;
}

void stream_lines(u8* const* destinations, u32 ndestinations, const u8* source, u64 nlines) {
  for (u64 i = 0; i < nlines * kLine; i += kLine) {
    const __m256i low = load_bits(source + i), high = load_bits(source + i + kLine / 2);
    for (u32 m = 0; m < ndestinations; ++m) {
      store_bits<Stores::kStreaming>(destinations[m] + i, low);
      store_bits<Stores::kStreaming>(destinations[m] + i + kLine / 2, high);
    }
  }
}

template <Stores kStores>
constexpr std::array<SumKernel, kDTypes> kSums = {
    sum_vectors<Float16Lanes, kStores>, sum_vectors<BFloat16Lanes, kStores>,
    sum_vectors<Float32Lanes, kStores>, sum_vectors<Float64Lanes, kStores>,
    sum_vectors<Int32Lanes, kStores>,   sum_vectors<Int64Lanes, kStores>};
constexpr LoopKernels kKernels = {kSums<Stores::kCached>, kSums<Stores::kStreaming>, stream_lines};

}  // namespace
}  // namespace avx2
}  // namespace pyparallel::host

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace pyparallel::host {

const LoopKernels* avx2_kernels() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? &avx2::kKernels
                                                                          : nullptr;
}

}  // namespace pyparallel::host

#else

namespace pyparallel::host {

const LoopKernels* avx2_kernels() { return nullptr; }

}  // namespace pyparallel::host

#endif
