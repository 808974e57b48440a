// Streams and events of one communicator: what runs after what. Launches no kernel, owns no memory.
#pragma once
#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "../backend.h"

namespace pyparallel {

// Errors are ignored: at process exit the runtime may be gone (cudaErrorCudartUnloading), and its
// events with it.
struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<CUevent_st, DestroyEvent>;

// Orders groups of work: begin(), launches on stream(), barrier() between dependent launches,
// end().
//
// Every device has one communication stream for the whole process, shared by all communicators:
// groups then run in one order on every device, so two communicators cannot each hold a device that
// the other one waits for. Waits are made of events alone. A wait takes the event as recorded at
// that moment, so one event per purpose is recorded again and again; only the events that mark the
// end of a group are kept apart, because they are queried.
class StreamOrder {
 public:
  // rank_devices[r] is the device of rank r. Creates all streams and events; none is created
  // afterwards.
  explicit StreamOrder(std::span<const int> rank_devices);

  // The distinct devices, in the order in which ranks name them first.
  u32 ndevices() const { return static_cast<u32>(devices_.size()); }
  int device(u32 index) const { return devices_[index].id; }
  u32 device_index(u32 rank) const { return rank_device_[rank]; }
  cudaStream_t stream(u32 index) const { return devices_[index].stream; }

  // The contracts of the functions of the same name in Backend. Call inside the scope of a
  // DeviceGuard.
  //
  // A group whose callers are all being captured becomes a part of their graph. It has no ticket,
  // because an event of a graph can never be queried.
  bool capturing(std::span<const StreamHandle> callers);
  void begin(std::span<const StreamHandle> callers);
  void barrier();
  void end(std::span<const StreamHandle> callers);
  u64 ticket();
  bool finished(u64 ticket);
  bool wait(u64 ticket, u64 timeout_ns);

 private:
  // Groups whose end may be outstanding. A launch blocks inside the driver when about 1024 are
  // queued, and a blocked launch loop cannot launch the rank that the others wait for.
  static constexpr u64 kOutstanding = 64;

  struct Device {
    int id;
    cudaStream_t stream;
    Event arrived;  // everything on `stream` so far
  };

  void join();                      // the first device's stream waits for all others
  void fan_out(cudaEvent_t event);  // all other streams wait for an event of the first device
  void finish_group();
  cudaEvent_t group_end(u64 group) { return group_ends_[group % kOutstanding].get(); }

  std::vector<Device> devices_;
  std::vector<u32> rank_device_;
  std::vector<Event> ready_;  // per rank: everything on its caller's stream so far
  Event joined_;
  Event captured_end_;
  std::array<Event, kOutstanding> group_ends_;
  u64 groups_ = 0;  // groups finished by finish_group(); their numbers are 1 ... groups_
  bool open_ = false, captured_ = false;  // the group that has begun
};

// The stream of `device` on which memory is set up. Apart from the communication stream, because
// that one may be waiting for work of the caller, for as long as this takes. Call inside the scope
// of a DeviceGuard.
cudaStream_t setup_stream(int device);

}  // namespace pyparallel
