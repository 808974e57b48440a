// Element types of sums: how each is widened, added and rounded. Bits are equal on host and device,
// NaN payloads aside.
//
// 16-bit floats add in fp32 and round once, to nearest even; a NaN is stored as 0x7fff, which is
// what GPUs store. Integers add as unsigned, so that overflow wraps on the host too instead of
// being undefined.
#pragma once
#include "../base.h"
#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <bit>
#endif

namespace pyparallel {

struct Half {
  u16 bits;
};
struct BFloat16 {
  u16 bits;
};

template <class T>
struct AccumulatorOf {
  using type = T;
};
template <>
struct AccumulatorOf<Half> {
  using type = float;
};
template <>
struct AccumulatorOf<BFloat16> {
  using type = float;
};
template <>
struct AccumulatorOf<i32> {
  using type = u32;
};
template <>
struct AccumulatorOf<i64> {
  using type = u64;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

template <class T>
PP_D Accumulator<T> widen(T value) {
  return static_cast<Accumulator<T>>(value);
}
template <class T>
PP_D T narrow(Accumulator<T> value) {
  return static_cast<T>(value);
}

#if defined(__CUDACC__)

template <>
PP_D float widen<Half>(Half value) {
  return __half2float(__ushort_as_half(value.bits));
}
template <>
PP_D float widen<BFloat16>(BFloat16 value) {
  return __uint_as_float(static_cast<u32>(value.bits) << 16);
}
template <>
PP_D Half narrow<Half>(float value) {
  return {__half_as_ushort(__float2half_rn(value))};
}
template <>
PP_D BFloat16 narrow<BFloat16>(float value) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
}

#else

// Without a branch, so that loops over arrays vectorise.
template <>
inline float widen<Half>(Half value) {
  const u32 sign = (value.bits & 0x8000u) << 16;
  const u32 magnitude = value.bits & 0x7fffu;
  // Normal numbers need a new exponent bias (127 - 15); infinities and NaNs the largest exponent.
  const u32 normal = (magnitude << 13) + (112u << 23);
  const u32 special = (magnitude << 13) | 0x7f800000u;
  // Subnormals are magnitude * 2^-24: placed in the mantissa of 0.5 (where a unit is 2^-24), 0.5 is
  // taken away.
  const u32 subnormal = std::bit_cast<u32>(std::bit_cast<float>(0x3f000000u + magnitude) - 0.5f);
  const u32 bits = magnitude >= 0x7c00u ? special : magnitude < 0x0400u ? subnormal : normal;
  return std::bit_cast<float>(bits | sign);
}

template <>
inline float widen<BFloat16>(BFloat16 value) {
  return std::bit_cast<float>(static_cast<u32>(value.bits) << 16);
}

template <>
inline Half narrow<Half>(float value) {
  const u32 bits = std::bit_cast<u32>(value);
  const u32 sign = (bits >> 16) & 0x8000u;
  const u32 magnitude = bits & 0x7fffffffu;
  // 13 mantissa bits go: half of a unit less one, plus the kept lowest bit, rounds to nearest even.
  const u32 normal = (magnitude + 0x0fffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Below 2^-14 the fp32 adder rounds: a unit of 0.5 + x is 2^-24, the unit of half subnormals.
  const u32 subnormal = std::bit_cast<u32>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  // 65520 = 0x477ff000 is the first value that rounds to infinity.
  const u32 finite = magnitude < 0x38800000u ? subnormal : normal;
  const u32 rounded = magnitude >= 0x477ff000u ? 0x7c00u : finite;
  return {static_cast<u16>(magnitude > 0x7f800000u ? 0x7fffu : rounded | sign)};
}

template <>
inline BFloat16 narrow<BFloat16>(float value) {
  const u32 bits = std::bit_cast<u32>(value);
  const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<u16>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded)};
}

#endif

}  // namespace pyparallel
