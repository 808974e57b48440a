// The trial of a directed pair: one GPU stores a pattern into the other's memory and loads it back.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../base.h"
#include "../../check.h"
#include "cuda_check.h"
#include "device_guard.h"
#include "peer.h"
#include "stream_order.h"

namespace pyparallel {
namespace {

constexpr u32 kWords = 1u << 18;  // 1 MiB: many pages and many packets
constexpr u32 kBlocks = 32, kThreads = 256;
constexpr auto kTrialTime =
    std::chrono::seconds(10);  // a trial takes under 1 ms; broken peer access may hang

PP_HD u32 pattern(u32 i, u32 seed) {
  const u32 x = (i + seed) * 0x9e3779b1u;
  return x ^ (x >> 15);
}

__global__ void store_pattern(u32* to, u32 seed) {
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < kWords; i += gridDim.x * blockDim.x)
    to[i] = pattern(i, seed);
}

__global__ void load_pattern(const u32* from, u32 seed, u32* wrong) {
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < kWords; i += gridDim.x * blockDim.x) {
    if (from[i] != pattern(i, seed)) *wrong = 1;  // every writer stores the same value
  }
}

struct FreeDevice {
  void operator()(void* memory) const { cudaFree(memory); }
};
struct FreeHost {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
struct DestroyStream {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};

bool finished_in_time(cudaStream_t stream) {
  const auto deadline = std::chrono::steady_clock::now() + kTrialTime;
  while (true) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state == cudaSuccess) return true;
    if (state != cudaErrorNotReady) throw_cuda_error(state, "cudaStreamQuery");
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// What went wrong when kernels of `from` stored to and loaded from memory of `to`; empty if nothing
// did.
std::string data_fault(int from, int to) {
  set_device(to);
  void* memory = nullptr;
  PP_CUDA(cudaMalloc(&memory, kWords * sizeof(u32)));
  std::unique_ptr<void, FreeDevice> owned(memory);
  u32* words = static_cast<u32*>(memory);

  set_device(from);
  void* host = nullptr;
  PP_CUDA(cudaHostAlloc(&host, sizeof(u32), cudaHostAllocPortable | cudaHostAllocMapped));
  std::unique_ptr<void, FreeHost> owned_host(host);
  volatile u32* wrong = static_cast<u32*>(host);
  cudaStream_t stream = nullptr;
  PP_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::unique_ptr<CUstream_st, DestroyStream> owned_stream(stream);

  // Twice, because stale words of the first round would pass a second round with the same seed.
  std::vector<u32> seen(kWords);
  for (const u32 seed : {0x51edu, 0xc0ffeeu}) {
    *wrong = 0;
    store_pattern<<<kBlocks, kThreads, 0, stream>>>(words, seed);
    PP_CUDA(cudaGetLastError());
    load_pattern<<<kBlocks, kThreads, 0, stream>>>(words, seed, static_cast<u32*>(host));
    PP_CUDA(cudaGetLastError());
    if (!finished_in_time(stream)) {
      // Memory that a hung kernel still uses cannot be freed: cudaFree would wait for it.
      owned.release();
      owned_host.release();
      owned_stream.release();
      return "a kernel that used it did not finish";
    }
    set_device(to);
    PP_CUDA(cudaMemcpyAsync(seen.data(), words, kWords * sizeof(u32), cudaMemcpyDeviceToHost,
                            setup_stream(to)));
    PP_CUDA(cudaStreamSynchronize(setup_stream(to)));
    set_device(from);
    for (u32 i = 0; i < kWords; ++i) {
      if (seen[i] != pattern(i, seed))
        return message("word ", i, " was stored as ", pattern(i, seed), " and is ", seen[i]);
    }
    if (*wrong) return "loads gave other words than were stored";
  }
  return {};
}

std::string pair_fault(int from, int to) {
  int possible = 0;
  PP_CUDA(cudaDeviceCanAccessPeer(&possible, from, to));
  if (!possible) return "the driver offers no peer access";
  set_device(from);
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(to, 0);
  cudaGetLastError();  // "already enabled", by torch for one, is success
  if (enabled != cudaSuccess && enabled != cudaErrorPeerAccessAlreadyEnabled)
    return cudaGetErrorString(enabled);
  std::string fault = data_fault(from, to);
  if (!fault.empty() && enabled == cudaSuccess) {
    set_device(from);
    cudaDeviceDisablePeerAccess(
        to);  // because copies of others between the two would use it from now on
    cudaGetLastError();
  }
  return fault;
}

enum class Policy { kAuto, kOff, kForce };

Policy policy() {
  const char* set = std::getenv("PYPARALLEL_P2P");
  const std::string value = set ? set : "auto";
  if (value == "off") return Policy::kOff;
  if (value == "force") return Policy::kForce;
  PP_CHECK_ARG(value == "auto" || value.empty(),
               "PYPARALLEL_P2P must be auto, off or force, but is ", value, ".");
  return Policy::kAuto;
}

}  // namespace

bool peer_access(std::span<const int> devices) {
  static std::mutex mutex;
  static std::map<std::pair<int, int>, std::string> faults;
  static bool warned = false;

  const Policy wanted = policy();
  if (wanted == Policy::kOff) return false;
  const std::lock_guard lock(mutex);
  for (const int from : devices) {
    for (const int to : devices) {
      if (from == to) continue;
      const std::pair pair(from, to);
      if (!faults.contains(pair)) faults.emplace(pair, pair_fault(from, to));
      if (faults[pair].empty()) continue;
      const std::string text =
          message("GPU ", from, " cannot use the memory of GPU ", to, " (", faults[pair], ")");
      PP_CHECK(wanted != Policy::kForce, "PYPARALLEL_P2P=force, but ", text, ".");
      if (!warned) {
        std::fprintf(
            stderr,
            "pyparallel: %s; transfers go through host memory. PYPARALLEL_P2P=off silences this.\n",
            text.c_str());
      }
      warned = true;
      return false;
    }
  }
  return true;
}

}  // namespace pyparallel
