// The inner loops of the host backend: copy one source to several destinations, sum several sources
// to several destinations. Any alignment, any size, no destination overlapping another; a
// destination may be a source exactly.
#pragma once
#include "../../dtype.h"

namespace pyparallel::host {

// How results are stored. Streaming stores bypass the caches: worth it only when the data of the
// whole operation would not stay in the last-level cache anyway. They are fenced before the loop
// returns.
enum class Stores { kCached, kStreaming };

// kStreaming when `bytes`, everything an operation reads and writes, exceeds half of the last-level
// cache.
Stores stores_for(u64 bytes);

void copy(u8* const* destinations, u32 ndestinations, const u8* source, u64 bytes, Stores stores);

// Adds the sources in the order given, starting from the first, in fp32 for 16-bit types and modulo
// 2^n for integers; rounds once, to nearest even; stores NaN of 16-bit types as 0x7fff. `bytes` is
// a multiple of the element size.
void sum(DType dtype, u8* const* destinations, u32 ndestinations, const u8* const* sources,
         u32 nsources, u64 bytes, Stores stores);

// Sums bytes [0, done) of the sources into `to` and returns done, at most `bytes` and a whole
// number of elements. `to` may be one of the sources.
using SumKernel = u64 (*)(u8* to, const u8* const* sources, u32 nsources, u64 bytes);

// One kernel a dtype. Baseline kernels run everywhere and do all bytes; AVX2 kernels do whole
// vectors only and are null where the compiler or the processor has no AVX2 and F16C. Each set
// lives in its own file and namespace, so that no inline function compiled for AVX2 can be the copy
// that the linker keeps for everybody.
struct SumKernels {
  SumKernel of[kDTypes];
};
const SumKernels& baseline_sum_kernels();
const SumKernels* avx2_sum_kernels();

}  // namespace pyparallel::host
