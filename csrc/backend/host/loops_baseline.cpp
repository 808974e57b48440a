// Kernels for any processor. Sums use the same element arithmetic as the device code.
#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "../../device/numeric.h"
#include "loops.h"

namespace pyparallel::host {
inline namespace baseline {
namespace {

// Element i of an array at any alignment.
template <class T>
T element(const u8* from, u64 i) {
  T value;
  std::memcpy(&value, from + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
u64 sum_elements(u8* const* destinations, u32 ndestinations, const u8* const* sources, u32 nsources,
                 u64 bytes) {
  constexpr u64 kBlock =
      64;  // elements whose accumulators stay in registers or the first-level cache
  const u64 count = bytes / sizeof(T);
  for (u64 begin = 0; begin < count; begin += kBlock) {
    const u64 length = std::min(kBlock, count - begin);
    Accumulator<T> total[kBlock];
    for (u64 i = 0; i < length; ++i) total[i] = widen<T>(element<T>(sources[0], begin + i));
    for (u32 k = 1; k < nsources; ++k) {
      for (u64 i = 0; i < length; ++i) total[i] += widen<T>(element<T>(sources[k], begin + i));
    }
    T values[kBlock];
    for (u64 i = 0; i < length; ++i) values[i] = narrow<T>(total[i]);
    for (u32 m = 0; m < ndestinations; ++m)
      std::memcpy(destinations[m] + begin * sizeof(T), values, length * sizeof(T));
  }
  return bytes;
}

void stream_lines(u8* const* destinations, u32 ndestinations, const u8* source, u64 nlines) {
#if defined(__x86_64__)
  for (u64 i = 0; i < nlines * kLine; i += kLine) {
    __m128i line[kLine / 16];
    for (u32 k = 0; k < kLine / 16; ++k)
      line[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i) + k);
    for (u32 m = 0; m < ndestinations; ++m) {
      auto* to = reinterpret_cast<__m128i*>(destinations[m] + i);
      for (u32 k = 0; k < kLine / 16; ++k) _mm_stream_si128(to + k, line[k]);
    }
  }
#else
  for (u32 m = 0; m < ndestinations; ++m) std::memcpy(destinations[m], source, nlines * kLine);
#endif
}

constexpr std::array<SumKernel, kDTypes> kSums = {sum_elements<Half>,  sum_elements<BFloat16>,
                                                  sum_elements<float>, sum_elements<double>,
                                                  sum_elements<i32>,   sum_elements<i64>};
// Sums have no streaming stores here: without vectors the additions take longer than the stores.
constexpr LoopKernels kKernels = {kSums, kSums, stream_lines};

}  // namespace
}  // namespace baseline

const LoopKernels& baseline_kernels() { return baseline::kKernels; }

}  // namespace pyparallel::host
