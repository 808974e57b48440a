// The two driver functions behind DeviceGuard.
#include "device_guard.h"

#include <cuda.h>

#include "../../check.h"
#include "cuda_check.h"

namespace pyparallel {
namespace {

using GetCurrent = CUresult (*)(CUcontext*);
using SetCurrent = CUresult (*)(CUcontext);

// Looked up through the runtime, so that the module needs no libcuda.so to be imported.
void* driver_function(const char* name) {
  void* function = nullptr;  // stays null where the driver has no such function
#if CUDART_VERSION >= 12050
  PP_CUDA(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, nullptr));
#else
  PP_CUDA(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault));
#endif
  PP_CHECK(function, "The NVIDIA driver has no function ", name, ".");
  return function;
}

struct Driver {
  GetCurrent get_current = reinterpret_cast<GetCurrent>(driver_function("cuCtxGetCurrent"));
  SetCurrent set_current = reinterpret_cast<SetCurrent>(driver_function("cuCtxSetCurrent"));
};

const Driver& driver() {
  static const Driver functions;
  return functions;
}

}  // namespace

DeviceGuard::DeviceGuard() {
  CUcontext context = nullptr;
  const CUresult result = driver().get_current(&context);
  // A process that has made no CUDA call yet has no context either.
  PP_CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_INITIALIZED,
           "cuCtxGetCurrent failed with CUDA error ", static_cast<int>(result), ".");
  context_ = context;
}

// A failure here means that the driver is shutting down or the context is lost; the next call
// reports it.
DeviceGuard::~DeviceGuard() { driver().set_current(static_cast<CUcontext>(context_)); }

void set_device(int device) { PP_CUDA(cudaSetDevice(device)); }

}  // namespace pyparallel
