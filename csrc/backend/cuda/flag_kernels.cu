// Flag-ordered kernels of the Simple protocol: one cooperative launch a device runs the blocks of
// all its ranks.
#include <algorithm>

#include "../../check.h"
#include "../../device/flag_ordered.h"
#include "../../device/gpu_context.h"
#include "cooperative.h"
#include "kernels.h"

namespace pyparallel {
namespace {

// T: the element type of a sum, or CopyOnly.
template <class T>
__global__ void __launch_bounds__(kFlagThreads, 1)
    flag_kernel(const __grid_constant__ FlagArgs args, const __grid_constant__ LocalRanks local) {
  const u32 nchannels = args.shape.nchannels;
  run_flag_ordered<T>(GpuContext{}, args, local.ranks[blockIdx.x / nchannels],
                      blockIdx.x % nchannels);
}

constexpr FlagKernel kCopyKernel = flag_kernel<CopyOnly>;
// By DType.
constexpr FlagKernel kReduceKernels[kDTypes] = {flag_kernel<Half>,  flag_kernel<BFloat16>,
                                                flag_kernel<float>, flag_kernel<double>,
                                                flag_kernel<i32>,   flag_kernel<i64>};

}  // namespace

u32 load_flag_kernels() {
  u32 blocks = std::min(load_kernel(kCopyKernel), load_ll_kernels());
  for (const FlagKernel kernel : kReduceKernels) blocks = std::min(blocks, load_kernel(kernel));
  return blocks;
}

void launch_flag_kernel(const FlagArgs& args, const LocalRanks& local, cudaStream_t stream) {
  if (is_ll(args.shape.algorithm)) return launch_ll_kernel(args, local, stream);
  const bool copies = is_broadcast(args.shape.algorithm);
  launch_cooperative(copies ? kCopyKernel : kReduceKernels[static_cast<u32>(args.dtype)], args,
                     local, stream);
}

}  // namespace pyparallel
