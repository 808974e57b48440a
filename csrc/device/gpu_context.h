// The execution context on a GPU: thread indices, block barriers, and PTX for what C++ cannot say.
//
// Measured on SASS of sm_80 to sm_120 (tests/test_sass.py): a poll is one load, an acquire adds one
// invalidation of the L1 cache, a post is one MEMBAR.ALL.SYS before one store.
#pragma once
#include "context.h"
#include "loops.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#error \
    "pyparallel needs sm_70 or newer: loads with acquire and stores with release do not exist before."
#endif

namespace pyparallel {

struct GpuContext {
  // A clock and abort word that are read at each poll would be most of the traffic of a poll.
  static constexpr u64 kPollsPerClock = 8192;

  PP_D u32 tid() const { return threadIdx.x; }
  PP_D u32 nthreads() const { return blockDim.x; }
  PP_D void sync() const { __syncthreads(); }
  PP_D bool sync_and(bool ok) const { return __syncthreads_and(ok) != 0; }

  // nthreads() is a multiple of 32.
  PP_D u64 sync_sum(u64 value) const {
    __shared__ u64 warps[32];
    for (u32 step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    __syncthreads();  // because the block may still be reading the sums of the last call
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    u64 total = 0;
    for (u32 w = 0; w < blockDim.x / 32; ++w) total += warps[w];
    return total;
  }
  PP_D void add(u64* word, u64 value) const {
    __builtin_assume(__isGlobal(word));
    atomicAdd(reinterpret_cast<unsigned long long*>(word), value);
  }

  // Every pointer of ours is global memory, on this device, on a peer or mapped from the host. The
  // compiler cannot know that of pointers that it loads from memory, and would emit generic
  // accesses.
  template <class W>
  PP_D W load(const W* from) const {
    __builtin_assume(__isGlobal(from));
    return *from;
  }
  PP_D Pack load(const Pack* from) const {
    __builtin_assume(__isGlobal(from));
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    return {{words.x, words.y, words.z, words.w}};
  }
  template <class W>
  PP_D void store(W* to, W value) const {
    __builtin_assume(__isGlobal(to));
    *to = value;
  }
  PP_D void store(Pack* to, Pack value) const {
    __builtin_assume(__isGlobal(to));
    *reinterpret_cast<uint4*>(to) =
        make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]);
  }

  // Packs in flight a thread: 512 threads with 8 have 64 KiB in flight, more than a link needs (a
  // guess for GPUs that no measurement has confirmed). Sums hold an accumulator for each element
  // besides.
  static constexpr u32 kCopyUnroll = 8, kSumUnroll = 4;

  template <class Destinations>
  PP_D void copy(const Destinations& destinations, const u8* source, u64 bytes) const {
    copy_loop<kCopyUnroll>(*this, destinations, source, bytes);
  }
  template <class T, class Destinations, class Sources>
  PP_D void sum(const Destinations& destinations, const Sources& sources, u64 count) const {
    sum_loop<T, kSumUnroll>(*this, destinations, sources, count);
  }

  // The "memory" clobbers keep the compiler from moving loads and stores of data across a flag.
  PP_D u64 relaxed(const u64* word) const {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  // Call once, after a poll has succeeded: each call empties the L1 cache of the multiprocessor.
  PP_D u64 acquire(const u64* word) const {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  // A release store and not a fence and a relaxed store, because the fence would also empty the L1
  // cache.
  PP_D void post(u64* word, u64 value) const {
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
  }

  // A vector access of PTX is one atomic access a word, which is all that lines need; it is one
  // instruction.
  static constexpr u32 kLinesInFlight = 4;
  PP_D Line relaxed_line(const Line* line) const {
    Line value;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(value.words[0]), "=l"(value.words[1])
                 : "l"(line)
                 : "memory");
    return value;
  }
  PP_D void store_line(Line* line, Line value) const {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};"
                 :
                 : "l"(line), "l"(value.words[0]), "l"(value.words[1])
                 : "memory");
  }

  PP_D u64 now_ns() const {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
  }
  // Nobody else needs the thread that polls.
  PP_D void pause(u64 /*polls*/, u64 /*waited_ns*/) const {}

  PP_D bool aborted(const u32* word) const {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value != 0;
  }
  PP_D void abort(u32* word) const {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(word), "r"(1u) : "memory");
  }
  // Between GPUs on a bus without atomic operations two may both win: their records then mix, and
  // nothing else.
  PP_D bool claim(FailureRecord* record) const {
    return atomicCAS_system(&record->claimed, 0u, 1u) == 0u;
  }
  PP_D void publish(FailureRecord* record) const {
    asm volatile("st.release.sys.global.u32 [%0], %1;"
                 :
                 : "l"(&record->complete), "r"(1u)
                 : "memory");
  }
};

}  // namespace pyparallel
