// The interface that both backends implement: memory, streams and events, launches. No torch, no
// Python.
//
// A backend serves one communicator: devices[r] is the device of rank r, and several ranks may
// share a device. Calls come from one thread at a time (the communicator holds the process-wide
// launch lock).
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "../device/connection.h"
#include "../topology.h"

namespace pyparallel {

// A native stream handle (cudaStream_t) of the caller for each rank; 0 is the legacy default
// stream. Host: ignored.
using StreamHandle = std::uintptr_t;

// A Move of an event plan with its places resolved. Copies: one source. Sums: sources are added in
// order, in fp32 for 16-bit types, starting from the first, rounded once. Destinations do not
// overlap each other; a destination may equal a source exactly.
struct Task {
  const void* const* sources;
  void* const* destinations;
  u32 nsources, ndestinations;
  u64 rows, row_bytes, source_pitch, destination_pitch;
  bool sum;
  DType dtype;
};

namespace host {
class CommunicationThread;
}
class SegmentSender;
struct SendTable;

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  // True: any rank's task may touch any rank's user memory, so event plans need no stages.
  virtual bool direct() const = 0;
  // Blocks of a flag-ordered launch that can be resident at the same time, per rank, for any rank.
  // 0: blocks of all ranks cannot run at the same time here, and launch_flagged() must not be
  // called.
  virtual u32 max_channels() const = 0;
  // Whether work on these streams goes into a CUDA graph now, of which nothing is known until it
  // runs. Only event-ordered work may.
  virtual bool capturing(std::span<const StreamHandle> callers) = 0;
  // What connects the devices. Known without trying a pair.
  virtual Fabric fabric() const = 0;

  // Memory of `rank` that the kernels of `touched_by` (and of rank itself) may touch, zeroed,
  // aligned to 128 bytes: on the rank's device if all of these ranks reach it there, else in host
  // memory. Ask for no rank that does not need it, because each pair of devices is tried at its
  // first use, which takes milliseconds. Not called in steady state.
  virtual void* allocate(u32 rank, u64 bytes, RankSet touched_by) = 0;
  virtual void release(u32 rank, void* memory) noexcept = 0;
  // Host memory that kernels of every rank may touch, zeroed (abort words, failure records).
  virtual void* allocate_host(u64 bytes) = 0;
  virtual void release_host(void* memory) noexcept = 0;
  // Writes host bytes into memory from allocate(); complete on return.
  virtual void write(u32 rank, void* to, const void* from, u64 bytes) = 0;
  // Reads such memory, which no running work may write.
  virtual void read(u32 rank, void* to, const void* from, u64 bytes) = 0;

  // Work launched next starts after everything queued so far on every rank's caller stream, because
  // one rank's kernels read and write other ranks' memory.
  virtual void begin(std::span<const StreamHandle> callers) = 0;
  // Runs tasks on the rank's communication stream. Tasks and their pointer arrays stay valid until
  // end().
  // Tasks launched between two barriers are unordered among each other.
  virtual void launch(u32 rank, std::span<const Task> tasks) = 0;
  // The same for one copy of one row to one destination, by the copy engine of the rank's device.
  virtual void copy(u32 rank, const Task& task) = 0;
  // Runs blocks (rank, channel) of all ranks, co-resident; ordered like launch(). With begin() and
  // end() around each launch, blocks start on no rank before those of the launch before have left
  // all ranks. As long as no wait expires the protocols do not need that; recovery does
  // (protocol.pml): a rank that gives up would otherwise start the next launch, on the same
  // connections, while blocks of other ranks still use their slots.
  virtual void launch_flagged(const FlagArgs& args) = 0;
  // Everything launched before has finished everywhere before anything launched afterwards starts.
  virtual void barrier() = 0;
  // Work that callers queue from now on starts after all launched work. Host: all work is done on
  // return.
  virtual void end(std::span<const StreamHandle> callers) = 0;

  // A ticket for all work launched so far, whether it has finished, and a bounded wait (false:
  // still running).
  virtual u64 ticket() = 0;
  virtual bool finished(u64 ticket) = 0;
  virtual bool wait(u64 ticket, u64 timeout_ns) = 0;

  // Refers to this backend.
  virtual std::unique_ptr<SegmentSender> make_segment_sender(const SendTable& table) = 0;

  // Where end() returns only when all work is done: the thread that runs operations for callers who
  // do not want to wait. Null where launches return at once.
  virtual host::CommunicationThread* communication_thread() { return nullptr; }
};

std::unique_ptr<Backend> make_host_backend(u32 nranks);
// Throws Error with one sentence that says what to do where there is no driver, no device or no
// code for it.
std::unique_ptr<Backend> make_cuda_backend(std::vector<int> devices);

}  // namespace pyparallel
