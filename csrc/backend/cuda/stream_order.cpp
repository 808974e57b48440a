// Communication streams of the process, and the events that order a group of launches.
#include "stream_order.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "../../check.h"
#include "cuda_check.h"
#include "device_guard.h"

namespace pyparallel {
namespace {

using Clock = std::chrono::steady_clock;

struct ProcessStreams {
  cudaStream_t communication, setup;
};

// Made on first use of a device and never destroyed, because a communicator that is closed late, at
// exit, would otherwise meet a destroyed stream.
const ProcessStreams& process_streams(int device) {
  static std::mutex mutex;
  static auto& streams = *new std::map<int, ProcessStreams>;
  const std::lock_guard lock(mutex);
  const auto found = streams.find(device);
  if (found != streams.end()) return found->second;
  set_device(device);
  // Non-blocking, because the legacy stream of the caller must not serialise with ours behind our
  // back; the highest priority, because the whole model waits for a transfer while only one device
  // waits for a kernel of its own.
  int lowest = 0, highest = 0;
  PP_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  ProcessStreams made{};
  PP_CUDA(cudaStreamCreateWithPriority(&made.communication, cudaStreamNonBlocking, highest));
  PP_CUDA(cudaStreamCreateWithFlags(&made.setup, cudaStreamNonBlocking));
  return streams.emplace(device, made).first->second;
}

Event new_event() {
  cudaEvent_t event = nullptr;
  PP_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return Event(event);
}

cudaStream_t native(StreamHandle handle) { return reinterpret_cast<cudaStream_t>(handle); }

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  PP_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

cudaStream_t setup_stream(int device) { return process_streams(device).setup; }

StreamOrder::StreamOrder(std::span<const int> rank_devices) {
  for (const int id : rank_devices) {
    const auto known = std::find_if(devices_.begin(), devices_.end(),
                                    [id](const Device& d) { return d.id == id; });
    rank_device_.push_back(static_cast<u32>(known - devices_.begin()));
    if (known == devices_.end()) {
      const cudaStream_t stream = process_streams(id).communication;
      set_device(id);
      devices_.push_back({id, stream, new_event()});
    }
    set_device(id);
    ready_.push_back(new_event());
  }
  set_device(device(0));
  joined_ = new_event();
  captured_end_ = new_event();
  for (Event& event : group_ends_) event = new_event();
}

bool StreamOrder::capturing(std::span<const StreamHandle> callers) {
  for (u32 rank = 0; rank < callers.size() && rank < rank_device_.size(); ++rank) {
    set_device(device(device_index(rank)));
    if (is_capturing(native(callers[rank]))) return true;
  }
  return false;
}

void StreamOrder::begin(std::span<const StreamHandle> callers) {
  PP_CHECK(callers.size() == rank_device_.size(), "begin: got ", callers.size(), " streams for ",
           rank_device_.size(), " ranks.");
  u32 ncaptured = 0;
  for (u32 rank = 0; rank < callers.size(); ++rank) {
    set_device(device(device_index(rank)));
    if (is_capturing(native(callers[rank]))) ++ncaptured;
  }
  PP_CHECK(ncaptured == 0 || ncaptured == callers.size(), "The streams of ", ncaptured, " of ",
           callers.size(), " ranks are being captured in a CUDA graph, but all or none must be.");
  // Recorded for every rank before anything waits: a bad stream is found while nothing has been
  // queued. The handle 0 means the legacy stream of the current device, so the rank's device is
  // made current first.
  for (u32 rank = 0; rank < callers.size(); ++rank) {
    set_device(device(device_index(rank)));
    PP_CUDA(cudaEventRecord(ready_[rank].get(), native(callers[rank])));
  }
  // Ten minutes of backlog mean a caller's stream that never gets anywhere; the wait itself is
  // ordinary back pressure.
  constexpr u64 kBacklogNs = 600'000'000'000;
  captured_ = ncaptured != 0;
  if (groups_ >= kOutstanding && !captured_) {
    PP_CHECK(wait(groups_ + 1 - kOutstanding, kBacklogNs), kOutstanding,
             " operations are queued and the oldest has not finished for 600 s. Is a stream of the "
             "caller stuck?");
  }
  open_ = true;
  set_device(device(0));
  for (const Event& event : ready_) PP_CUDA(cudaStreamWaitEvent(stream(0), event.get(), 0));
  if (ndevices() == 1) return;
  PP_CUDA(cudaEventRecord(joined_.get(), stream(0)));
  fan_out(joined_.get());
}

void StreamOrder::join() {
  for (u32 d = 1; d < ndevices(); ++d) {
    set_device(device(d));
    PP_CUDA(cudaEventRecord(devices_[d].arrived.get(), stream(d)));
  }
  set_device(device(0));
  for (u32 d = 1; d < ndevices(); ++d)
    PP_CUDA(cudaStreamWaitEvent(stream(0), devices_[d].arrived.get(), 0));
}

void StreamOrder::fan_out(cudaEvent_t event) {
  for (u32 d = 1; d < ndevices(); ++d) {
    set_device(device(d));
    PP_CUDA(cudaStreamWaitEvent(stream(d), event, 0));
  }
}

void StreamOrder::barrier() {
  if (ndevices() == 1) return;  // one stream runs in order
  join();
  PP_CUDA(cudaEventRecord(joined_.get(), stream(0)));
  fan_out(joined_.get());
}

// The first device's stream waits for all others, so that one event marks the end of the group
// everywhere.
void StreamOrder::finish_group() {
  join();
  PP_CUDA(cudaEventRecord(captured_ ? captured_end_.get() : group_end(groups_ + 1), stream(0)));
  if (!captured_) ++groups_;
  open_ = false;
}

void StreamOrder::end(std::span<const StreamHandle> callers) {
  finish_group();
  const cudaEvent_t end = captured_ ? captured_end_.get() : group_end(groups_);
  for (u32 rank = 0; rank < callers.size(); ++rank) {
    set_device(device(device_index(rank)));
    PP_CUDA(cudaStreamWaitEvent(native(callers[rank]), end, 0));
  }
}

u64 StreamOrder::ticket() {
  if (open_) finish_group();  // a group that an exception cut short
  return groups_;
}

bool StreamOrder::finished(u64 ticket) {
  // The event of an older group marks a younger one by now; begin() waited for the older one before
  // that.
  if (ticket + kOutstanding <= groups_ || ticket == 0) return true;
  set_device(device(0));
  const cudaError_t state = cudaEventQuery(group_end(ticket));
  if (state == cudaErrorNotReady) {
    cudaGetLastError();  // because "not ready" counts as the last error in some releases of the
                         // runtime
    return false;
  }
  if (state != cudaSuccess) throw_cuda_error(state, "cudaEventQuery");
  return true;
}

// Polls instead of cudaEventSynchronize, because that one cannot be bounded.
bool StreamOrder::wait(u64 ticket, u64 timeout_ns) {
  const Clock::time_point start = Clock::now();
  while (!finished(ticket)) {
    const auto waited = Clock::now() - start;
    if (waited >= std::chrono::nanoseconds(timeout_ns)) return false;
    // A transfer takes 10 us to 10 ms: poll without a pause at first, then leave the core to
    // others.
    if (waited > std::chrono::microseconds(200))
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

}  // namespace pyparallel
