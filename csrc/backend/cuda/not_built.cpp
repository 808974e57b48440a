// Stands in for the CUDA backend where the build had no CUDA compiler.
#include "../../check.h"
#include "../backend.h"
#include "cuda_info.h"

namespace pyparallel {

int cuda_device_count() noexcept { return 0; }

std::string cuda_driver_version() { return {}; }

std::unique_ptr<Backend> make_cuda_backend(std::vector<int> devices) {
  throw Error(message(
      "pyparallel was built without CUDA (no nvcc at build time), but got a tensor on cuda:",
      devices.empty() ? 0 : devices.front(),
      ". Rebuild: pip install --force-reinstall --no-deps ."));
}

}  // namespace pyparallel
