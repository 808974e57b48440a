// The kernels of segment tables.
#include <algorithm>

#include "../../device/gpu_context.h"
#include "../../device/send_changed.h"
#include "cuda_check.h"
#include "kernels.h"

namespace pyparallel {
namespace {

// A whole chunk is in flight in a block: 256 threads with 8 packs have 32 KiB. 256 blocks read as
// fast as memory gives. Guesses: not yet measured on a GPU.
constexpr u32 kThreads = 256;
constexpr u32 kUnroll = kChunkBytes / sizeof(Pack) / kThreads;
constexpr u32 kMaxBlocks = 256;

__global__ void __launch_bounds__(kThreads, 1) send_kernel(const __grid_constant__ SendArgs args) {
  send_changed<kUnroll>(GpuContext{}, args, blockIdx.x, gridDim.x);
}

__global__ void __launch_bounds__(kThreads, 1) find_kernel(const __grid_constant__ SendArgs args) {
  find_changes<kUnroll>(GpuContext{}, args, blockIdx.x, gridDim.x);
}

__global__ void __launch_bounds__(kThreads, 1)
    receive_kernel(const __grid_constant__ ReceiveArgs args) {
  receive_changed(GpuContext{}, args, blockIdx.x, gridDim.x);
}

template <class Args>
void launch(void (*kernel)(Args), Args args, cudaStream_t stream) {
  void* arguments[] = {&args};
  PP_CUDA(cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                           dim3(std::min(args.nchunks, kMaxBlocks)), dim3(kThreads), arguments, 0,
                           stream));
}

}  // namespace

void load_send_kernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel :
       {reinterpret_cast<const void*>(send_kernel), reinterpret_cast<const void*>(find_kernel),
        reinterpret_cast<const void*>(receive_kernel)}) {
    PP_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  }
}

void launch_send_kernel(const SendArgs& args, cudaStream_t stream) {
  launch(send_kernel, args, stream);
}

void launch_find_kernel(const SendArgs& args, cudaStream_t stream) {
  launch(find_kernel, args, stream);
}

void launch_receive_kernel(const ReceiveArgs& args, cudaStream_t stream) {
  launch(receive_kernel, args, stream);
}

}  // namespace pyparallel
