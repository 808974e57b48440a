// Communicator: checks arguments of all ranks, picks the algorithm, runs its schedule on a backend,
// reports failures.
#pragma once
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "connection_set.h"
#include "last_plan.h"
#include "plan_runner.h"
#include "selection.h"

namespace pyparallel {

struct CommunicatorOptions {
  u64 timeout_ms = 30000;
  u32 nchannels = 2;
  u32 slots = 4;
  u64 slot_bytes = 256 << 10;
  u64 stage_slot_bytes = 8 << 20;
  std::string algorithms = {};  // instead of defaults, as in "broadcast:chain,reduce_add:owner"
};

// Throws ArgumentError for a number of ranks or options that no communicator can have.
void check_communicator(u32 nranks, const CommunicatorOptions& options);

// Algorithms go by the names of algorithm.h, or "auto". Scatter and gather have one.
//
// May be used from several threads; one call runs at a time in the whole process, because two
// threads that launched on the same devices in different orders could wait for each other for ever.
// All arguments of all ranks are checked before the first launch (ArgumentError). When a wait
// inside a flag-ordered operation expires, Error is raised by the call itself if the backend has
// finished its work by then, else by the next call or by synchronize(); after that the communicator
// works again. Flag-ordered operations that were launched behind the one that failed, before that
// was known, end with it and leave undefined results; event-ordered ones are not concerned.
// `streams` holds one handle a rank.
class Communicator {
 public:
  Communicator(std::unique_ptr<Backend> backend, u32 nranks, CommunicatorOptions options);
  ~Communicator();  // close(), without raising

  u32 nranks() const { return nranks_; }
  const char* backend_name() const { return backend_->name(); }
  // What "auto" gives: selection.h.
  std::string describe_selection() const;
  bool closed() const { return closed_.load(std::memory_order_relaxed); }

  // destinations[r] is rank r's flat buffer (ignored for root); sources[k] and segments[k] describe
  // the root's tensors.
  void broadcast(u32 root, std::span<const void* const> sources, std::span<const Segment> segments,
                 std::span<void* const> destinations, std::span<const StreamHandle> streams,
                 std::string_view algorithm);
  // sources[r * segments.size() + k]; null: rank r has no such tensor and takes no part in its sum.
  // The destination overlaps no source.
  void reduce_add(u32 root, std::span<const void* const> sources, std::span<const Segment> segments,
                  void* destination, DType dtype, std::span<const StreamHandle> streams,
                  std::string_view algorithm);
  // The same without waiting where the host computes: the sum is queued, all queued sums of the
  // process run in the order of calls, and the memory stays in use until it is done. Arguments are
  // checked before this returns. The ticket is for wait(); 0 means that there is nothing to wait
  // for: the sum was small and is done, or it is ordered by streams as reduce_add() is.
  u64 reduce_add_async(u32 root, std::vector<const void*> sources, std::vector<Segment> segments,
                       void* destination, DType dtype, std::vector<StreamHandle> streams,
                       std::string algorithm);
  // Returns when the sum of the ticket is done. Throws Error if it failed, or if no queued sum was
  // finished for twice the timeout; then it is still queued. A failure that no wait() has raised is
  // raised by the next call, synchronize() or close().
  void wait(u64 ticket);
  // destinations[r] may be sources[r].
  void all_reduce(std::span<const void* const> sources, std::span<void* const> destinations,
                  u64 count, DType dtype, std::span<const StreamHandle> streams,
                  std::string_view algorithm);
  // Null destinations/sources: that rank is left out.
  void scatter(u32 root, const void* source, u64 rows, u64 pitch, std::span<const Share> shares,
               std::span<void* const> destinations, std::span<const StreamHandle> streams);
  void gather(u32 root, std::span<const void* const> sources, u64 rows, u64 pitch,
              std::span<const Share> shares, void* destination,
              std::span<const StreamHandle> streams);

  // Waits (bounded) until all work launched so far has finished, then raises what went wrong, if
  // anything.
  void synchronize();
  // Frees everything once queued and running work has left; later calls raise Error. Idempotent.
  void close();

 private:
  friend class SegmentTable;

  // One rank's contiguous memory in a flag-ordered operation.
  struct FlagBuffers {
    const u8* inputs[kMaxRanks] = {};
    u8* outputs[kMaxRanks] = {};
  };

  // What a checked sum is run with.
  struct Sum {
    u64 bytes;
    std::vector<u32> present;  // [segment]: the ranks that have it
    const Algorithm* algorithm;
  };

  void check_open() const;
  const Algorithm& choose(Collective collective, u64 bytes, u32 element_bytes, bool one_piece,
                          std::span<const StreamHandle> streams, std::string_view requested) const;
  Sum check_sum(u32 root, std::span<const void* const> sources, std::span<const Segment> segments,
                const void* destination, DType dtype, std::span<const StreamHandle> streams,
                std::string_view algorithm) const;
  void run_plan(const EventPlan& plan, const PlanBuffers& buffers, DType dtype,
                std::span<const StreamHandle> streams);
  void run_flagged(Collective collective, const Algorithm& algorithm, u32 root, u64 bytes,
                   DType dtype, const FlagBuffers& buffers, std::span<const StreamHandle> streams);
  void raise_failure();
  void retire_connections();
  void free_retired();
  void free_all();

  const std::unique_ptr<Backend> backend_;
  const u32 nranks_;
  const CommunicatorOptions options_;
  const Selection selection_;
  std::atomic<bool> closed_{false};

  std::unique_ptr<PlanRunner> plan_runner_;
  LastPlan broadcast_plan_, sum_plan_;
  std::unique_ptr<ConnectionSet>
      connections_;  // made by the first flag-ordered operation, replaced after a failure
  // Poisoned sets, kept until the work that may use them has finished.
  struct Retired {
    std::unique_ptr<ConnectionSet> connections;
    u64 ticket;
  };
  std::vector<Retired> retired_;
};

}  // namespace pyparallel
