// CUDA errors as exceptions whose text says what to do.
#pragma once
#include <cuda_runtime_api.h>

namespace pyparallel {

// Clears the runtime's last error and throws Error. Driver and architecture mismatches get their
// remedy, every other error its name, CUDA's sentence and the failed call.
[[noreturn]] void throw_cuda_error(cudaError_t error, const char* call);

}  // namespace pyparallel

#define PP_CUDA(call)                                                             \
  do {                                                                            \
    const cudaError_t pp_error = (call);                                          \
    if (pp_error != cudaSuccess) ::pyparallel::throw_cuda_error(pp_error, #call); \
  } while (0)
