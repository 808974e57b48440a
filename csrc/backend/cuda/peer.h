// Peer access between GPUs: enabled, and believed only after data went through it and came back
// right.
#pragma once
#include <span>

namespace pyparallel {

// True: kernels of every device may load and store memory that cudaMalloc gave on every other one.
// False: they may not, because PYPARALLEL_P2P=off or because a pair failed; then all ranks meet in
// host memory, and the first failure of the process is told on stderr with the pair and the reason.
// PYPARALLEL_P2P=force throws Error instead. Each pair is tried once a process. Call inside the
// scope of a DeviceGuard.
bool peer_access(std::span<const int> devices);

}  // namespace pyparallel
