// The inner loops of the host backend: copy one source to several destinations, sum several sources
// to several destinations. Any alignment, any size, no destination overlapping another; a
// destination may be a source exactly.
#pragma once
#include <array>

#include "../../dtype.h"

namespace pyparallel::host {

// How results are stored. Streaming stores bypass the caches: worth it only when the data of the
// whole operation would not stay in the last-level cache anyway. Whoever asks for them calls
// stream_fence() before it tells anybody that the data are there.
enum class Stores { kCached, kStreaming };

// kStreaming when `bytes`, everything an operation reads and writes, exceeds half of the last-level
// cache.
Stores stores_for(u64 bytes);

// Makes the calling thread's streaming stores visible before its later stores: they are weakly
// ordered, and without it a release store could overtake them.
void stream_fence();

void copy(u8* const* destinations, u32 ndestinations, const u8* source, u64 bytes, Stores stores);

// Adds the sources in the order given, starting from the first, in fp32 for 16-bit types and modulo
// 2^n for integers; rounds once, to nearest even; stores NaN of 16-bit types as 0x7fff. `bytes` is
// a multiple of the element size.
void sum(DType dtype, u8* const* destinations, u32 ndestinations, const u8* const* sources,
         u32 nsources, u64 bytes, Stores stores);

constexpr u64 kLine = 64;

// Sums bytes [0, done) of the sources into every destination and returns done, at most `bytes` and
// a whole number of elements. A destination may be one of the sources.
using SumKernel = u64 (*)(u8* const* destinations, u32 ndestinations, const u8* const* sources,
                          u32 nsources, u64 bytes);

// Streams lines to every destination. The source may lie anywhere.
using StreamKernel = void (*)(u8* const* destinations, u32 ndestinations, const u8* source,
                              u64 nlines);

// Streaming kernels need destinations that lie on lines, and the caller fences. They write whole
// lines to one destination after the other, because 16-byte streaming stores that alternate between
// destinations are ten times slower.
//
// One sum kernel a dtype and kind of stores. Baseline kernels run everywhere and sum all bytes;
// AVX2 kernels sum whole vectors only and are null where the compiler or the processor has no AVX2
// and F16C. Each set lives in its own file and namespace, so that no inline function compiled for
// AVX2 can be the copy that the linker keeps for everybody.
struct LoopKernels {
  std::array<SumKernel, kDTypes> sum, sum_streaming;
  StreamKernel stream;
};
const LoopKernels& baseline_kernels();
const LoopKernels* avx2_kernels();

}  // namespace pyparallel::host
