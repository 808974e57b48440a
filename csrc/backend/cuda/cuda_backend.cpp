// The CUDA backend: memory that all ranks reach, and launches in the order that StreamOrder gives.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <unordered_set>

#include "../../check.h"
#include "../../hash_sender.h"
#include "cuda_check.h"
#include "cuda_info.h"
#include "device_guard.h"
#include "kernels.h"
#include "peer.h"
#include "stream_order.h"

namespace pyparallel {
namespace {

// With CUDA_LAUNCH_BLOCKING=1 a launch returns only when its kernel has ended.
bool launches_block() {
  const char* set = std::getenv("CUDA_LAUNCH_BLOCKING");
  return set && *set && std::string_view(set) != "0";
}

struct FreeDevice {
  void operator()(void* memory) const { cudaFree(memory); }
};

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  PP_CUDA(cudaDeviceGetAttribute(&value, name, device));
  return value;
}

// Native atomics work over links such as NVLink and not over the bus.
Topology topology_of(const StreamOrder& order, u32 nranks) {
  std::vector<u32> rank_device;
  for (u32 rank = 0; rank < nranks; ++rank) rank_device.push_back(order.device_index(rank));
  return Topology(rank_device, [&order](DevicePair pair) {
    int atomics = 0;
    PP_CUDA(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported,
                                      order.device(pair.from), order.device(pair.to)));
    return atomics != 0;
  });
}

class CudaBackend final : public Backend {
 public:
  // Call inside the scope of a DeviceGuard.
  explicit CudaBackend(const std::vector<int>& rank_devices);
  ~CudaBackend() override;

  const char* name() const override { return "cuda"; }
  // A torch tensor may lie where no peer reaches it (expandable segments), so only its own device
  // touches it.
  bool direct() const override { return false; }
  // 0 where several devices are launched by one thread and launches block: the first kernel would
  // wait for blocks that are launched after it. Also 0 where a device cannot launch cooperatively.
  u32 max_channels() const override { return max_channels_; }
  bool capturing(std::span<const StreamHandle> callers) override;
  Fabric fabric() const override { return topology_.fabric(); }

  void* allocate(u32 rank, u64 bytes, RankSet touched_by) override;
  void release(u32 rank, void* memory) noexcept override;
  void* allocate_host(u64 bytes) override;
  void release_host(void* memory) noexcept override;
  void write(u32 rank, void* to, const void* from, u64 bytes) override;
  void read(u32 rank, void* to, const void* from, u64 bytes) override;

  void begin(std::span<const StreamHandle> callers) override;
  void launch(u32 rank, std::span<const Task> tasks) override;
  void copy(u32 rank, const Task& task) override;
  void launch_flagged(const FlagArgs& args) override;
  void barrier() override;
  void end(std::span<const StreamHandle> callers) override;

  u64 ticket() override;
  bool finished(u64 ticket) override;
  bool wait(u64 ticket, u64 timeout_ns) override;
  std::unique_ptr<SegmentSender> make_segment_sender(const SendTable& table) override;

 private:
  int device_of(u32 rank) const { return order_->device(order_->device_index(rank)); }

  std::unique_ptr<StreamOrder>
      order_;  // a pointer, so that the destructor can end it while its DeviceGuard lives
  Topology topology_;
  std::vector<LocalRanks> local_;          // per device
  std::unordered_set<void*> host_memory_;  // what allocate() gave that lies in host memory
  u32 max_channels_ = 0;
};

// Launches of a hash sender on the communication streams.
class CudaHashSender final : public HashSender {
 public:
  CudaHashSender(CudaBackend& backend, StreamOrder& order, const SendTable& table)
      : HashSender(backend, table), order_(order) {}

 private:
  template <class Args>
  void launch(void (*kernel)(const Args&, cudaStream_t), u32 rank, const Args& args) {
    const DeviceGuard guard;
    const u32 index = order_.device_index(rank);
    set_device(order_.device(index));
    kernel(args, order_.stream(index));
  }
  void launch_send(u32 rank, const SendArgs& args) override {
    launch(launch_send_kernel, rank, args);
  }
  void launch_find(u32 rank, const SendArgs& args) override {
    launch(launch_find_kernel, rank, args);
  }
  void launch_receive(u32 rank, const ReceiveArgs& args) override {
    launch(launch_receive_kernel, rank, args);
  }

  StreamOrder& order_;
};

CudaBackend::CudaBackend(const std::vector<int>& rank_devices)
    : order_(std::make_unique<StreamOrder>(rank_devices)),
      topology_(topology_of(*order_, static_cast<u32>(rank_devices.size()))),
      local_(order_->ndevices()) {
  for (u32 rank = 0; rank < rank_devices.size(); ++rank) {
    LocalRanks& local = local_[order_->device_index(rank)];
    local.ranks[local.count++] = static_cast<u8>(rank);
  }
  u32 channels = ~0u;
  for (u32 d = 0; d < order_->ndevices(); ++d) {
    const int device = order_->device(d);
    set_device(device);
    load_event_kernels();
    load_peer_kernels();
    load_send_kernels();
    const u32 blocks =
        load_flag_kernels() * static_cast<u32>(attribute(cudaDevAttrMultiProcessorCount, device));
    const bool cooperative = attribute(cudaDevAttrCooperativeLaunch, device) != 0;
    channels = std::min(channels, cooperative ? blocks / local_[d].count : 0);
  }
  max_channels_ = order_->ndevices() > 1 && launches_block() ? 0 : channels;
}

CudaBackend::~CudaBackend() {
  try {
    const DeviceGuard guard;
    order_.reset();
  } catch (const Error&) {
    // The driver is gone at process exit, and the events with it.
    order_.release();
  }
}

void* CudaBackend::allocate(u32 rank, u64 bytes, RankSet touched_by) {
  const DeviceGuard guard;
  // PYPARALLEL_P2P=off holds for the ranks of one GPU too, so that one GPU shows what staging does.
  const bool shared = (touched_by & ~(RankSet{1} << rank)) != 0;
  const bool on_device = !(shared && peers_are_off()) &&
                         topology_.on_device(rank, touched_by, [this](DevicePair pair) {
                           return peer_usable(order_->device(pair.from), order_->device(pair.to));
                         });
  if (!on_device) return *host_memory_.insert(allocate_host(bytes)).first;
  const int device = device_of(rank);
  set_device(device);
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes);
  if (error == cudaErrorMemoryAllocation) cudaGetLastError();
  PP_CHECK(error != cudaErrorMemoryAllocation, "CUDA out of memory: cuda:", device, " has no ",
           bytes, " bytes left for pyparallel's transfer buffers.");
  if (error != cudaSuccess) throw_cuda_error(error, "cudaMalloc");
  std::unique_ptr<void, FreeDevice> owned(memory);
  PP_CUDA(cudaMemsetAsync(memory, 0, bytes, setup_stream(device)));
  PP_CUDA(cudaStreamSynchronize(setup_stream(device)));
  return owned.release();
}

// Errors are ignored, because at process exit the runtime may be gone, and all memory with it.
void CudaBackend::release(u32 rank, void* memory) noexcept {
  if (host_memory_.erase(memory) != 0) return release_host(memory);
  try {
    const DeviceGuard guard;
    set_device(device_of(rank));
    cudaFree(memory);
    cudaGetLastError();
  } catch (const Error&) {
  }
}

void* CudaBackend::allocate_host(u64 bytes) {
  const DeviceGuard guard;
  set_device(order_->device(0));
  void* memory = nullptr;
  PP_CUDA(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
  std::memset(memory, 0, bytes);
  return memory;
}

void CudaBackend::release_host(void* memory) noexcept {
  try {
    const DeviceGuard guard;
    set_device(order_->device(0));
    cudaFreeHost(memory);
    cudaGetLastError();
  } catch (const Error&) {
  }
}

void CudaBackend::write(u32 rank, void* to, const void* from, u64 bytes) {
  const DeviceGuard guard;
  const int device = device_of(rank);
  set_device(device);
  // Default, because the memory may be the host's.
  PP_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, setup_stream(device)));
  PP_CUDA(cudaStreamSynchronize(setup_stream(device)));
}

bool CudaBackend::capturing(std::span<const StreamHandle> callers) {
  const DeviceGuard guard;
  return order_->capturing(callers);
}

void CudaBackend::read(u32 rank, void* to, const void* from, u64 bytes) {
  const DeviceGuard guard;
  const int device = device_of(rank);
  set_device(device);
  // Default, because the memory may be the host's.
  PP_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, setup_stream(device)));
  PP_CUDA(cudaStreamSynchronize(setup_stream(device)));
}

void CudaBackend::begin(std::span<const StreamHandle> callers) {
  const DeviceGuard guard;
  order_->begin(callers);
}

void CudaBackend::launch(u32 rank, std::span<const Task> tasks) {
  const DeviceGuard guard;
  set_device(device_of(rank));
  launch_tasks(tasks, order_->stream(order_->device_index(rank)));
}

// cudaMemcpyDefault, because stages may lie on any device or in host memory.
void CudaBackend::copy(u32 rank, const Task& task) {
  const DeviceGuard guard;
  set_device(device_of(rank));
  PP_CUDA(cudaMemcpyAsync(task.destinations[0], task.sources[0], task.row_bytes, cudaMemcpyDefault,
                          order_->stream(order_->device_index(rank))));
}

// Nothing but launches in the loop: a device that is launched late keeps the others spinning.
void CudaBackend::launch_flagged(const FlagArgs& args) {
  PP_CHECK(args.shape.nchannels <= max_channels_, "A flag-ordered launch of ", args.shape.nchannels,
           " channels needs blocks that run at the same time, but only ", max_channels_,
           " channels fit.");
  const DeviceGuard guard;
  for (u32 d = 0; d < order_->ndevices(); ++d) {
    set_device(order_->device(d));
    launch_flag_kernel(args, local_[d], order_->stream(d));
  }
}

void CudaBackend::barrier() {
  const DeviceGuard guard;
  order_->barrier();
}

void CudaBackend::end(std::span<const StreamHandle> callers) {
  const DeviceGuard guard;
  order_->end(callers);
}

u64 CudaBackend::ticket() {
  const DeviceGuard guard;
  return order_->ticket();
}

bool CudaBackend::finished(u64 ticket) {
  const DeviceGuard guard;
  return order_->finished(ticket);
}

bool CudaBackend::wait(u64 ticket, u64 timeout_ns) {
  const DeviceGuard guard;
  return order_->wait(ticket, timeout_ns);
}

std::unique_ptr<SegmentSender> CudaBackend::make_segment_sender(const SendTable& table) {
  return std::make_unique<CudaHashSender>(*this, *order_, table);
}

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(std::vector<int> devices) {
  PP_CHECK_ARG(!devices.empty() && devices.size() <= kMaxRanks, "A communicator has 1 to ",
               kMaxRanks, " ranks, not ", devices.size(), ".");
  int count = 0;
  PP_CUDA(cudaGetDeviceCount(&count));
  for (const int device : devices) {
    PP_CHECK_ARG(device >= 0 && device < count, "Device cuda:", device,
                 " does not exist; this machine has ", count, " CUDA devices.");
  }
  const DeviceGuard guard;
  return std::make_unique<CudaBackend>(devices);
}

}  // namespace pyparallel
