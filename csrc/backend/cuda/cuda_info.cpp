// Device count and driver version through the CUDA runtime.
#include "cuda_info.h"

#include <cuda_runtime_api.h>

namespace pyparallel {

int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // because the runtime would hand this error to the next caller that asks for
                       // the last one
  return 0;
}

std::string cuda_driver_version() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) return {};
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace pyparallel
