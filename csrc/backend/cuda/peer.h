// Peer access between GPUs: enabled, and believed only after data went through it and came back
// right.
#pragma once

namespace pyparallel {

// Loads the kernels of the trial on the current device, for the reason given in kernels.h.
void load_peer_kernels();

// True: kernels of device `from` may load and store memory that cudaMalloc gave on `to`, and the
// copy engine may move between the two. False: they may not, because PYPARALLEL_P2P=off or because
// the pair failed; the first failure of the process is told on stderr with the pair and the reason.
// PYPARALLEL_P2P=force throws Error instead. Each pair is tried once a process. Call inside the
// scope of a DeviceGuard.
bool peer_usable(int from, int to);

// Whether PYPARALLEL_P2P=off.
bool peers_are_off();

}  // namespace pyparallel
