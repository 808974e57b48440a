// Texts of CUDA errors.
#include "cuda_check.h"

#include "../../check.h"
#include "cuda_info.h"

namespace pyparallel {
namespace {

// The oldest driver that runs programs of a CUDA major release (minor releases are compatible with
// each other).
const char* oldest_driver(int cuda_major) {
  switch (cuda_major) {
    case 12:
      return "525";
    case 13:
      return "580";
    default:
      return nullptr;
  }
}

std::string driver_too_old() {
  constexpr int kMajor = CUDART_VERSION / 1000, kMinor = CUDART_VERSION % 1000 / 10;
  const std::string driver = cuda_driver_version();
  const char* oldest = oldest_driver(kMajor);
  std::string text =
      message("pyparallel was built with CUDA ", kMajor, ".", kMinor, ", which needs ",
              oldest ? message("NVIDIA driver ", oldest, " or newer") : "a newer NVIDIA driver");
  if (driver.empty()) return text + "; this machine has no NVIDIA driver. Install one.";
  return message(text, "; this machine's driver supports CUDA ", driver, ". Rebuild with a CUDA ",
                 driver.substr(0, driver.find('.')), " toolkit.");
}

std::string no_code() {
  int device = 0, major = 0, minor = 0;
  const bool known =
      cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  if (!known) return "pyparallel has no code for this GPU. Rebuild on this machine.";
  return message("pyparallel has no code for this GPU (sm_", major, minor,
                 "). Rebuild with TORCH_CUDA_ARCH_LIST=", major, ".", minor, ".");
}

}  // namespace

void throw_cuda_error(cudaError_t error, const char* call) {
  cudaGetLastError();  // because the error is reported here, once
  switch (error) {
    case cudaErrorInsufficientDriver:
      throw Error(driver_too_old());
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:  // what queries of a kernel return where a launch returns
                                          // "no kernel image"
    case cudaErrorUnsupportedPtxVersion:
      throw Error(no_code());
    case cudaErrorNoDevice:
      throw Error("pyparallel found no CUDA device. Check nvidia-smi and CUDA_VISIBLE_DEVICES.");
    default:
      throw Error(message("CUDA error ", cudaGetErrorName(error), " (", cudaGetErrorString(error),
                          ") in ", call, "."));
  }
}

}  // namespace pyparallel
