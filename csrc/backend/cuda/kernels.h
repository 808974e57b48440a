// The launchers of the kernels. Each acts on the current device and throws Error where CUDA
// refuses.
#pragma once
#include <cuda_runtime_api.h>

#include <span>

#include "../../device/send_changed.h"
#include "../backend.h"

namespace pyparallel {

// Loading is lazy by default and may wait for running kernels, which would hang a group of spinning
// kernels that is launched half; so every kernel is loaded on every device before the first group.
void load_event_kernels();
void load_send_kernels();
// Return how many blocks of the largest flag-ordered kernel (of the LL protocol) one multiprocessor
// holds.
u32 load_flag_kernels();
u32 load_ll_kernels();

// Runs tasks that do not depend on each other.
void launch_tasks(std::span<const Task> tasks, cudaStream_t stream);

// The bodies of the same names, see device/send_changed.h.
void launch_send_kernel(const SendArgs& args, cudaStream_t stream);
void launch_find_kernel(const SendArgs& args, cudaStream_t stream);
void launch_receive_kernel(const ReceiveArgs& args, cudaStream_t stream);

// The ranks whose blocks one launch runs.
struct LocalRanks {
  u32 count;
  u8 ranks[kMaxRanks];
};

// One cooperative launch: block b runs rank ranks[b / nchannels] on channel b % nchannels.
void launch_flag_kernel(const FlagArgs& args, const LocalRanks& local, cudaStream_t stream);
void launch_ll_kernel(const FlagArgs& args, const LocalRanks& local, cudaStream_t stream);

}  // namespace pyparallel
