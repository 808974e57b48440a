// The floating-point mode in which every sum of the host backend runs: round to nearest, denormals
// kept.
#pragma once
#include "../../base.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pyparallel::host {

// Sets the default mode for its scope. A new thread inherits flush-to-zero from its creator and the
// caller's own thread may have it set (torch.set_flush_denormal), and either would change the bits
// of a sum.
class DefaultFloatMode {
 public:
#if defined(__x86_64__)
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  static constexpr u32 kDefault = 0x1f80;  // all exceptions masked, nearest, no FTZ, no DAZ
  u32 saved_;
#elif defined(__aarch64__)
  DefaultFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(u64{0}));
  }
  ~DefaultFloatMode() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  u64 saved_;
#else
  DefaultFloatMode() {}
  ~DefaultFloatMode() {}

 private:
#endif
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;
};

}  // namespace pyparallel::host
