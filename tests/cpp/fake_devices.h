// Fake GPUs behind fake_cuda.h: memory that belongs to a device, and kernels that run on the host
// as soon as they are launched. Each launch checks that it comes after all that callers had queued.
#pragma once
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

// First, because the files under test call the functions that it defines.
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/device_guard.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/peer.h"
#include "backend/cuda/stream_order.h"
#include "backend/host/flag_blocks.h"
#include "backend/host/task_batch.h"
#include "fake_cuda.h"

namespace fake {

constexpr int kHost = -2;
struct Memory {
  int device;
  size_t bytes;
};
inline std::map<const char*, Memory> memory;
inline std::vector<CUstream_st*> callers;
inline Work queued;  // by callers before the group that is being launched
inline Work group;   // launched in it
inline std::map<std::pair<int, int>, bool> bad_pairs;
inline std::vector<int> blocks_of_devices;  // ranks of the flag-ordered launch that is not complete

inline cudaError_t allocate(int device, void** result, size_t bytes) {
  *result = std::aligned_alloc(128, pyparallel::round_up(bytes, 128));
  memory[static_cast<char*>(*result)] = {device, bytes};
  return cudaSuccess;
}
inline cudaError_t release(void* address) {
  EXPECT(memory.erase(static_cast<char*>(address)) == 1, "memory that nobody has");
  std::free(address);
  return cudaSuccess;
}

// Kernels of `device` may use user memory, host memory, their own, and that of proven pairs.
inline void check_access(int device, const void* address) {
  auto found = memory.upper_bound(static_cast<const char*>(address));
  if (found == memory.begin()) return;
  --found;
  if (static_cast<const char*>(address) >= found->first + found->second.bytes) return;
  const int owner = found->second.device;
  EXPECT(owner == kHost || owner == device || !bad_pairs.contains({device, owner}), "GPU ", device,
         " uses memory of GPU ", owner);
}

inline void launched(cudaStream_t stream) {
  EXPECT(stream && stream->device == current, "a stream of another device");
  Work before;
  group.insert(launch(stream, before));
  EXPECT(std::includes(before.begin(), before.end(), queued.begin(), queued.end()),
         "a launch that does not wait for all callers");
}

}  // namespace fake

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 16;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  FAKE_CALL();
  *value = 64;  // multiprocessors, and yes to cooperative launches
  return cudaSuccess;
}
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int, int) {
  FAKE_CALL();
  *value = 0;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** result, size_t bytes) {
  FAKE_CALL();
  EXPECT(fake::current >= 0);
  return fake::allocate(fake::current, result, bytes);
}
cudaError_t cudaHostAlloc(void** result, size_t bytes, unsigned) {
  FAKE_CALL();
  EXPECT(fake::current >= 0);
  return fake::allocate(fake::kHost, result, bytes);
}
cudaError_t cudaFree(void* address) { return fake::release(address); }
cudaError_t cudaFreeHost(void* address) { return fake::release(address); }
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  FAKE_CALL();
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  FAKE_CALL();
  if (kind == cudaMemcpyDefault && stream != pyparallel::setup_stream(fake::current))
    fake::launched(stream);
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  FAKE_CALL();
  return cudaSuccess;
}

namespace pyparallel {

DeviceGuard::DeviceGuard() : context_(reinterpret_cast<void*>(static_cast<i64>(fake::current))) {}
DeviceGuard::~DeviceGuard() { fake::current = static_cast<int>(reinterpret_cast<i64>(context_)); }

void load_event_kernels() {}
void load_peer_kernels() {}
void load_send_kernels() {}
// No test sends segment tables through fake devices; hashed_backend.h runs these bodies.
void launch_send_kernel(const SendArgs&, cudaStream_t) {}
void launch_find_kernel(const SendArgs&, cudaStream_t) {}
void launch_receive_kernel(const ReceiveArgs&, cudaStream_t) {}
u32 load_flag_kernels() { return 1; }
u32 load_ll_kernels() { return 1; }
bool peers_are_off() { return false; }
bool peer_usable(int from, int to) { return !fake::bad_pairs.contains({from, to}); }

void launch_tasks(std::span<const Task> tasks, cudaStream_t stream) {
  PP_CUDA(fake::next_call());
  fake::launched(stream);
  for (const Task& task : tasks) {
    for (u32 k = 0; k < task.nsources; ++k) fake::check_access(fake::current, task.sources[k]);
    for (u32 k = 0; k < task.ndestinations; ++k)
      fake::check_access(fake::current, task.destinations[k]);
  }
  host::run_tasks(tasks);
}

// Blocks run when those of the last device are there: they wait for each other.
void launch_flag_kernel(const FlagArgs& args, const LocalRanks& local, cudaStream_t stream) {
  if (const cudaError_t error = fake::next_call(); error != cudaSuccess) {
    fake::blocks_of_devices.clear();
    throw_cuda_error(error, "cudaLaunchCooperativeKernel");
  }
  fake::launched(stream);
  for (u32 i = 0; i < local.count; ++i) fake::blocks_of_devices.push_back(local.ranks[i]);
  if (fake::blocks_of_devices.size() < args.shape.nranks) return;
  fake::blocks_of_devices.clear();
  host::run_flag_blocks(args);
}
void launch_ll_kernel(const FlagArgs& args, const LocalRanks& local, cudaStream_t stream) {
  launch_flag_kernel(args, local, stream);
}

}  // namespace pyparallel
