// Flag-ordered kernels of the LL protocol.
#include <algorithm>

#include "../../device/gpu_context.h"
#include "../../device/ll.h"
#include "cooperative.h"

namespace pyparallel {
namespace {

template <class T>
__global__ void __launch_bounds__(kFlagThreads, 1)
    ll_kernel(const __grid_constant__ FlagArgs args, const __grid_constant__ LocalRanks local) {
  const u32 nchannels = args.shape.nchannels;
  run_ll<T>(GpuContext{}, args, local.ranks[blockIdx.x / nchannels], blockIdx.x % nchannels);
}

// By DType.
constexpr FlagKernel kKernels[kDTypes] = {ll_kernel<Half>,   ll_kernel<BFloat16>, ll_kernel<float>,
                                          ll_kernel<double>, ll_kernel<i32>,      ll_kernel<i64>};

}  // namespace

u32 load_ll_kernels() {
  u32 blocks = ~0u;
  for (const FlagKernel kernel : kKernels) blocks = std::min(blocks, load_kernel(kernel));
  return blocks;
}

void launch_ll_kernel(const FlagArgs& args, const LocalRanks& local, cudaStream_t stream) {
  const bool copies = is_broadcast(args.shape.algorithm);
  const DType dtype = copies ? DType::kInt32 : args.dtype;
  launch_cooperative(kKernels[static_cast<u32>(dtype)], args, local, stream);
}

}  // namespace pyparallel
