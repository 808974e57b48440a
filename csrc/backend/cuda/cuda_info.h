// What the CUDA runtime of this build sees. Defined with and without CUDA; neither function raises
// or makes a context.
#pragma once
#include <string>

namespace pyparallel {

// Devices that this build can drive; 0 without a driver, without a device and in a build without
// CUDA.
int cuda_device_count() noexcept;

// The newest CUDA that the installed driver supports, as "12.4"; empty without a driver and in a
// build without CUDA.
std::string cuda_driver_version();

}  // namespace pyparallel
