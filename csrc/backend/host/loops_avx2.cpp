// Sum kernels for AVX2 and F16C. Everything here is compiled for those instructions, so the file
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
void store_bits(u8* to, __m256i bits) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits); }
__m128i load_half(const u8* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
void store_half(u8* to, __m128i bits) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bits); }

// Each Lanes type: how many bytes of memory one vector holds, and how it is widened, added and
// narrowed.
struct Float32Lanes {
  static constexpr u64 kBytes = 32;
  using Vector = __m256;
  static Vector load(const u8* from) { return _mm256_castsi256_ps(load_bits(from)); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static void store(u8* to, Vector v) { store_bits(to, _mm256_castps_si256(v)); }
};

struct Float64Lanes {
  static constexpr u64 kBytes = 32;
  using Vector = __m256d;
  static Vector load(const u8* from) { return _mm256_castsi256_pd(load_bits(from)); }
  static Vector add(Vector a, Vector b) { return _mm256_add_pd(a, b); }
  static void store(u8* to, Vector v) { store_bits(to, _mm256_castpd_si256(v)); }
};

struct Int32Lanes {
  static constexpr u64 kBytes = 32;
  using Vector = __m256i;
  static Vector load(const u8* from) { return load_bits(from); }
  static Vector add(Vector a, Vector b) { return _mm256_add_epi32(a, b); }
  static void store(u8* to, Vector v) { store_bits(to, v); }
};

struct Int64Lanes {
  static constexpr u64 kBytes = 32;
  using Vector = __m256i;
  static Vector load(const u8* from) { return load_bits(from); }
  static Vector add(Vector a, Vector b) { return _mm256_add_epi64(a, b); }
  static void store(u8* to, Vector v) { store_bits(to, v); }
};

struct Float16Lanes {
  static constexpr u64 kBytes = 16;
  using Vector = __m256;
  static Vector load(const u8* from) { return _mm256_cvtph_ps(load_half(from)); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static void store(u8* to, Vector v) {
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m128i nan16 =
        _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
    const __m128i rounded = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    store_half(to, _mm_blendv_epi8(rounded, _mm_set1_epi16(0x7fff), nan16));
  }
};

struct BFloat16Lanes {
  static constexpr u64 kBytes = 16;
  using Vector = __m256;
  static Vector load(const u8* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(from)), 16));
  }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static void store(u8* to, Vector v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i chosen = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fff), nan);
    store_half(
        to, _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1)));
  }
};

template <class Lanes>
u64 sum_vectors(u8* to, const u8* const* sources, u32 nsources, u64 bytes) {
  constexpr int kUnroll = 4;  // independent additions in flight, which hides their latency
  constexpr u64 kStep = kUnroll * Lanes::kBytes;
  u64 i = 0;
  for (; i + kStep <= bytes; i += kStep) {
    typename Lanes::Vector total[kUnroll];
    for (int u = 0; u < kUnroll; ++u) total[u] = Lanes::load(sources[0] + i + u * Lanes::kBytes);
    for (u32 k = 1; k < nsources; ++k) {
      for (int u = 0; u < kUnroll; ++u) {
        total[u] = Lanes::add(total[u], Lanes::load(sources[k] + i + u * Lanes::kBytes));
      }
    }
    for (int u = 0; u < kUnroll; ++u) Lanes::store(to + i + u * Lanes::kBytes, total[u]);
  }
  return i;
}

constexpr SumKernels kKernels = {{sum_vectors<Float16Lanes>, sum_vectors<BFloat16Lanes>,
                                  sum_vectors<Float32Lanes>, sum_vectors<Float64Lanes>,
                                  sum_vectors<Int32Lanes>, sum_vectors<Int64Lanes>}};

}  // namespace
}  // namespace avx2
}  // namespace pyparallel::host

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace pyparallel::host {

const SumKernels* avx2_sum_kernels() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? &avx2::kKernels
                                                                          : nullptr;
}

}  // namespace pyparallel::host

#else

namespace pyparallel::host {

const SumKernels* avx2_sum_kernels() { return nullptr; }

}  // namespace pyparallel::host

#endif
