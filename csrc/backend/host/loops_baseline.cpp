// Sum kernels for any processor, from the same element arithmetic as the device code.
#include <algorithm>
#include <cstring>

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
u64 sum_elements(u8* to, const u8* const* sources, u32 nsources, u64 bytes) {
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
    for (u64 i = 0; i < length; ++i) {
      const T value = narrow<T>(total[i]);
      std::memcpy(to + (begin + i) * sizeof(T), &value, sizeof(T));
    }
  }
  return bytes;
}

constexpr SumKernels kKernels = {{sum_elements<Half>, sum_elements<BFloat16>, sum_elements<float>,
                                  sum_elements<double>, sum_elements<i32>, sum_elements<i64>}};

}  // namespace
}  // namespace baseline

const SumKernels& baseline_sum_kernels() { return baseline::kKernels; }

}  // namespace pyparallel::host
