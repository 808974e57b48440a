// The trial of peer access on GPUs: kernels that store, load and compare, and their bounded waits.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "../../check.h"
#include "../../device/gpu_context.h"
#include "../../probe.h"
#include "cuda_check.h"
#include "device_guard.h"
#include "peer.h"

namespace pyparallel {
namespace {

using Clock = std::chrono::steady_clock;

constexpr u32 kBlocks = 32, kThreads = 256;
constexpr u64 kBytes = 8 << 20;  // many pages, many packets
constexpr u64 kWords = kBytes / sizeof(u32);
// A message of a litmus run: one warp stores 16 bytes a lane, and then a flag in a line of its own.
constexpr u32 kLanes = 32;
constexpr u64 kMessages = 4096, kMessageWords = kLanes * 4;
constexpr u64 kStride = kMessageWords + 32;  // words between messages
static_assert(kMessages * kStride <= kWords, "all messages fit");
// A step of a trial takes milliseconds; broken peer access may hang.
constexpr auto kStepTime = std::chrono::seconds(10);
constexpr u64 kLitmusNs = 2'000'000'000;  // ends a wait for a flag that never comes

// Where a wrong word is and what it was, in one store, so that the reports of two threads never
// mix.
constexpr u64 kNothingWrong = ~u64{0};
__device__ __forceinline__ void report(u64* wrong, u32 word, u32 seen) {
  *wrong = u64{word} << 32 | seen;
}

__global__ void fill_kernel(u32* words, u32 seed) {
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < kWords; i += gridDim.x * blockDim.x) {
    words[i] = PairPort::pattern(i, seed);
  }
}

__global__ void check_kernel(const u32* words, u32 seed, u64* wrong) {
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < kWords; i += gridDim.x * blockDim.x) {
    const u32 seen = words[i];
    if (seen != PairPort::pattern(i, seed)) report(wrong, i, seen);
  }
}

// Posts and waits as the flag-ordered kernels do.
__global__ void send_kernel(u32* words, u32 seed) {
  const GpuContext c;
  for (u64 m = 0; m < kMessages; ++m) {
    u32* message = words + m * kStride;
    Pack pack;
    for (u32 i = 0; i < 4; ++i)
      pack.words[i] =
          PairPort::pattern(static_cast<u32>(m * kMessageWords) + c.tid() * 4 + i, seed);
    c.store(reinterpret_cast<Pack*>(message) + c.tid(), pack);
    c.sync();
    if (c.tid() == 0) c.post(reinterpret_cast<u64*>(message + kMessageWords), seed);
  }
}

__global__ void receive_kernel(const u32* words, u32 seed, u64* wrong, u32* expired) {
  const GpuContext c;
  const u64 deadline = c.now_ns() + kLitmusNs;
  for (u64 m = 0; m < kMessages; ++m) {
    const u32* message = words + m * kStride;
    const auto* flag = reinterpret_cast<const u64*>(message + kMessageWords);
    bool arrived = true;
    if (c.tid() == 0) {
      while (arrived && c.relaxed(flag) != seed) arrived = c.now_ns() < deadline;
      if (arrived) {
        c.acquire(flag);
      } else {
        *expired = 1;
      }
    }
    if (!c.sync_and(arrived)) return;
    const Pack pack = c.load(reinterpret_cast<const Pack*>(message) + c.tid());
    for (u32 i = 0; i < 4; ++i) {
      const u32 word = static_cast<u32>(m * kMessageWords) + c.tid() * 4 + i;
      if (pack.words[i] != PairPort::pattern(word, seed)) report(wrong, word, pack.words[i]);
    }
  }
}

class CudaPairPort final : public PairPort {
 public:
  CudaPairPort(int from, int to) : from_{from}, to_{to} {}
  ~CudaPairPort() override;

  u64 bytes() const override { return kBytes; }
  std::string open() override;
  void give_up() override;
  Outcome fill(Place kernel, Place memory, u32 seed) override;
  Outcome check(Place kernel, Place memory, u32 seed) override;
  Outcome copy(Place source, Place destination) override;
  Outcome litmus(u32 seed) override;

 private:
  struct Side {
    int device;
    cudaStream_t stream = nullptr;
    u32* words = nullptr;
  };
  Side& side(Place place) { return place == Place::kFrom ? from_ : to_; }
  u32* words(Place place) { return place == Place::kHost ? host_words_ : side(place).words; }

  // Calls launch() and waits until `side`'s stream has done it.
  template <class Launch>
  Outcome run(Side& side, Launch launch);
  bool wait(cudaStream_t stream);
  Outcome judged(Outcome outcome, u32 seed) const;

  Side from_, to_;
  u32* host_words_ = nullptr;
  volatile u64* wrong_ = nullptr;    // behind the words, so that one allocation holds all
  volatile u32* expired_ = nullptr;  // non-zero: the receiver gave up
  bool enabled_ = false;             // by us, not by somebody before us
  bool stuck_ = false;
};

std::string CudaPairPort::open() {
  int possible = 0;
  PP_CUDA(cudaDeviceCanAccessPeer(&possible, from_.device, to_.device));
  if (!possible) return "the driver offers no peer access";
  set_device(from_.device);
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(to_.device, 0);
  cudaGetLastError();  // "already enabled", by torch for one, is success
  if (enabled != cudaSuccess && enabled != cudaErrorPeerAccessAlreadyEnabled)
    return cudaGetErrorString(enabled);
  enabled_ = enabled == cudaSuccess;
  for (Side* side : {&from_, &to_}) {
    set_device(side->device);
    PP_CUDA(cudaStreamCreateWithFlags(&side->stream, cudaStreamNonBlocking));
    PP_CUDA(cudaMalloc(&side->words, kBytes));
  }
  void* host = nullptr;
  PP_CUDA(
      cudaHostAlloc(&host, kBytes + 2 * sizeof(u64), cudaHostAllocPortable | cudaHostAllocMapped));
  host_words_ = static_cast<u32*>(host);
  wrong_ = reinterpret_cast<u64*>(host_words_ + kWords);
  expired_ = reinterpret_cast<u32*>(host_words_ + kWords + 2);
  return {};
}

CudaPairPort::~CudaPairPort() {
  if (stuck_) return;  // because the frees would wait for the stuck kernel
  for (Side* side : {&from_, &to_}) {
    if (!side->stream) continue;
    cudaSetDevice(side->device);
    cudaFree(side->words);
    cudaStreamDestroy(side->stream);
  }
  if (host_words_) cudaFreeHost(host_words_);
  cudaGetLastError();
}

// Copies of others between the two would use the access from now on.
void CudaPairPort::give_up() {
  if (!enabled_ || stuck_) return;
  set_device(from_.device);
  cudaDeviceDisablePeerAccess(to_.device);
  cudaGetLastError();
}

bool CudaPairPort::wait(cudaStream_t stream) {
  const auto start = Clock::now();
  for (;;) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state == cudaSuccess) return true;
    if (state != cudaErrorNotReady) throw_cuda_error(state, "cudaStreamQuery");
    cudaGetLastError();  // because "not ready" counts as the last error in some releases
    const auto waited = Clock::now() - start;
    if (waited > kStepTime) return false;
    // Steps are timed: sleep only where it no longer shows.
    if (waited > std::chrono::milliseconds(5))
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

template <class Launch>
PairPort::Outcome CudaPairPort::run(Side& side, Launch launch) {
  *wrong_ = kNothingWrong;
  *expired_ = 0;
  set_device(side.device);
  const auto start = Clock::now();
  launch();
  PP_CUDA(cudaGetLastError());
  Outcome outcome;
  outcome.finished = wait(side.stream);
  stuck_ = !outcome.finished;
  outcome.ns = static_cast<u64>(std::chrono::nanoseconds(Clock::now() - start).count());
  return outcome;
}

PairPort::Outcome CudaPairPort::judged(Outcome outcome, u32 seed) const {
  const u64 wrong = *wrong_;
  if (!outcome.finished || wrong == kNothingWrong) return outcome;
  outcome.right = false;
  outcome.word = wrong >> 32;
  outcome.wanted = pattern(static_cast<u32>(outcome.word), seed);
  outcome.seen = static_cast<u32>(wrong);
  return outcome;
}

PairPort::Outcome CudaPairPort::fill(Place kernel, Place memory, u32 seed) {
  Side& runs = side(kernel);
  return run(runs,
             [&] { fill_kernel<<<kBlocks, kThreads, 0, runs.stream>>>(words(memory), seed); });
}

PairPort::Outcome CudaPairPort::check(Place kernel, Place memory, u32 seed) {
  Side& runs = side(kernel);
  const Outcome outcome = run(runs, [&] {
    check_kernel<<<kBlocks, kThreads, 0, runs.stream>>>(words(memory), seed,
                                                        const_cast<u64*>(wrong_));
  });
  return judged(outcome, seed);
}

PairPort::Outcome CudaPairPort::copy(Place source, Place destination) {
  Side& from = side(source);
  Side& to = side(destination);
  return run(from, [&] {
    PP_CUDA(cudaMemcpyPeerAsync(to.words, to.device, from.words, from.device, kBytes, from.stream));
  });
}

PairPort::Outcome CudaPairPort::litmus(u32 seed) {
  const Outcome cleared = run(
      to_, [&] { PP_CUDA(cudaMemsetAsync(to_.words, 0, kMessages * kStride * 4, to_.stream)); });
  if (!cleared.finished) return cleared;
  // The receiver first, so that it is waiting when the first message comes.
  Outcome outcome = run(from_, [&] {
    set_device(to_.device);
    receive_kernel<<<1, kLanes, 0, to_.stream>>>(to_.words, seed, const_cast<u64*>(wrong_),
                                                 const_cast<u32*>(expired_));
    PP_CUDA(cudaGetLastError());
    set_device(from_.device);
    send_kernel<<<1, kLanes, 0, from_.stream>>>(to_.words, seed);
  });
  if (!outcome.finished) return outcome;
  stuck_ = !wait(to_.stream);
  outcome.finished = !stuck_ && *expired_ == 0;
  return judged(outcome, seed);
}

}  // namespace

void load_peer_kernels() {
  cudaFuncAttributes attributes;
  PP_CUDA(cudaFuncGetAttributes(&attributes, fill_kernel));
  PP_CUDA(cudaFuncGetAttributes(&attributes, check_kernel));
  PP_CUDA(cudaFuncGetAttributes(&attributes, send_kernel));
  PP_CUDA(cudaFuncGetAttributes(&attributes, receive_kernel));
}

static PairVerdicts::Policy policy() {
  return PairVerdicts::parse_policy(std::getenv("PYPARALLEL_P2P"));
}

bool peers_are_off() { return policy() == PairVerdicts::Policy::kOff; }

bool peer_usable(int from, int to) {
  // Never destroyed, because a communicator may be used while the process exits.
  static auto& verdicts = *new PairVerdicts(
      [](int a, int b) { return std::make_unique<CudaPairPort>(a, b); },
      [](const std::string& text) { std::fprintf(stderr, "%s\n", text.c_str()); });
  return verdicts.usable(from, to, policy());
}

}  // namespace pyparallel
