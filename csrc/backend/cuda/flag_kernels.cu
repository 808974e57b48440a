// Flag-ordered kernels: one cooperative launch a device runs the blocks of all its ranks.
#include <algorithm>

#include "../../check.h"
#include "../../device/flag_ordered.h"
#include "../../device/gpu_context.h"
#include "cuda_check.h"
#include "kernels.h"

namespace pyparallel {
namespace {

constexpr u32 kThreads = 512;

// T: the element type of a sum, or CopyOnly.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    flag_kernel(const __grid_constant__ FlagArgs args, const __grid_constant__ LocalRanks local) {
  const u32 nchannels = args.shape.nchannels;
  run_flag_ordered<T>(GpuContext{}, args, local.ranks[blockIdx.x / nchannels],
                      blockIdx.x % nchannels);
}

using FlagKernel = void (*)(FlagArgs, LocalRanks);
constexpr FlagKernel kCopyKernel = flag_kernel<CopyOnly>;
// By DType.
constexpr FlagKernel kReduceKernels[kDTypes] = {flag_kernel<Half>,  flag_kernel<BFloat16>,
                                                flag_kernel<float>, flag_kernel<double>,
                                                flag_kernel<i32>,   flag_kernel<i64>};

u32 load(FlagKernel kernel) {
  const void* function = reinterpret_cast<const void*>(kernel);
  cudaFuncAttributes attributes;
  PP_CUDA(cudaFuncGetAttributes(&attributes, function));
  int blocks = 0;
  PP_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, kThreads, 0));
  return static_cast<u32>(blocks);
}

}  // namespace

u32 load_flag_kernels() {
  u32 blocks = load(kCopyKernel);
  for (const FlagKernel kernel : kReduceKernels) blocks = std::min(blocks, load(kernel));
  return blocks;
}

void launch_flag_kernel(const FlagArgs& args, const LocalRanks& local, cudaStream_t stream) {
  const bool copies = args.shape.algorithm == FlagAlgorithm::kChainBroadcast;
  const FlagKernel kernel = copies ? kCopyKernel : kReduceKernels[static_cast<u32>(args.dtype)];
  // cudaLaunchCooperativeKernel takes pointers to arguments that it only reads.
  void* arguments[] = {const_cast<FlagArgs*>(&args), const_cast<LocalRanks*>(&local)};
  PP_CUDA(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel),
                                      dim3(local.count * args.shape.nchannels), dim3(kThreads),
                                      arguments, 0, stream));
}

}  // namespace pyparallel
