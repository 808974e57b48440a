// Cooperative launches: all blocks of a launch run at the same time, or the launch is refused.
#pragma once
#include "cuda_check.h"
#include "kernels.h"

namespace pyparallel {

constexpr u32 kFlagThreads = 512;

using FlagKernel = void (*)(FlagArgs, LocalRanks);

// The address of a kernel is known only in the file that defines it, so both take it from there.

// Loads a kernel on the current device; how many blocks of it one multiprocessor holds.
inline u32 load_kernel(FlagKernel kernel) {
  const void* function = reinterpret_cast<const void*>(kernel);
  cudaFuncAttributes attributes;
  PP_CUDA(cudaFuncGetAttributes(&attributes, function));
  int blocks = 0;
  PP_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, kFlagThreads, 0));
  return static_cast<u32>(blocks);
}

inline void launch_cooperative(FlagKernel kernel, const FlagArgs& args, const LocalRanks& local,
                               cudaStream_t stream) {
  // cudaLaunchCooperativeKernel takes pointers to arguments that it only reads.
  void* arguments[] = {const_cast<FlagArgs*>(&args), const_cast<LocalRanks*>(&local)};
  PP_CUDA(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel),
                                      dim3(local.count * args.shape.nchannels), dim3(kFlagThreads),
                                      arguments, 0, stream));
}

}  // namespace pyparallel
