// Integer names, the 16-byte pack and the macros that let one source compile for host and device.
#pragma once
#include <cstddef>
#include <cstdint>

// PP_HD: callable from host and device code (pure arithmetic). PP_D: bodies of kernels; with nvcc
// they are device-only because they use device intrinsics, with a C++ compiler they run on virtual
// devices.
#if defined(__CUDACC__)
#define PP_HD __host__ __device__ __forceinline__
#define PP_D __device__ __forceinline__
#define PP_UNROLL _Pragma("unroll")
#else
#define PP_HD inline
#define PP_D inline
#define PP_UNROLL
#endif

namespace pyparallel {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

// Ranks in one communicator. Kernel arguments hold one entry a rank by value, so this bounds their
// size.
constexpr u32 kMaxRanks = 16;

// The unit of vector loads and stores.
struct alignas(16) Pack {
  u32 words[4];
};

PP_HD constexpr u64 round_up(u64 value, u64 unit) { return (value + unit - 1) / unit * unit; }

}  // namespace pyparallel
