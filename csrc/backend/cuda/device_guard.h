// Leaves the calling thread's current CUDA context as it was.
#pragma once

namespace pyparallel {

// Saves the driver's current context (none included) and restores it at the end of the scope.
//
// The driver's context and not cudaGetDevice/cudaSetDevice, because cudaSetDevice(0) in a thread
// that had no context would make one on GPU 0, which a user of GPUs 1 and 2 never asked for. The
// current context belongs to the driver, so torch's copy of the runtime sees the same one.
class DeviceGuard {
 public:
  DeviceGuard();
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  void* context_ = nullptr;  // CUcontext
};

// Makes `device`'s primary context current, creating it on first use. Call inside the scope of a
// DeviceGuard.
void set_device(int device);

}  // namespace pyparallel
