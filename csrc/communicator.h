// Communicator: checks arguments of all ranks, picks the algorithm, runs its schedule on a backend, reports failures.
#pragma once
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "schedule/event_plan.h"

namespace pyparallel {

struct CommunicatorOptions {
  u64 timeout_ms = 30000;
  u32 nchannels = 2;
  u32 slots = 4;
  u64 slot_bytes = 256 << 10;
  u64 stage_slot_bytes = 8 << 20;
};

class ConnectionSet;  // connections, abort word and failure record; replaced as a whole after a timeout

// Algorithms by name: "auto"; event-ordered "push" (broadcast), "owner" (reduce_add), "two_shot" (all_reduce);
// flag-ordered "chain" (broadcast, reduce_add), "ring" (all_reduce). Scatter and gather have one, "direct".
class Communicator {
 public:
  Communicator(std::unique_ptr<Backend> backend, u32 nranks, CommunicatorOptions options);
  ~Communicator();  // close()

  u32 nranks() const;
  const char* backend_name() const;

  // destinations[r] is rank r's flat buffer (ignored for root); sources[k] and segments[k] describe the root's tensors.
  void broadcast(u32 root, std::span<const void* const> sources, std::span<const Segment> segments,
                 std::span<void* const> destinations, std::span<const StreamHandle> streams, std::string_view algorithm);
  // sources[r * segments.size() + k]; null: rank r has no such tensor and takes no part in its sum.
  void reduce_add(u32 root, std::span<const void* const> sources, std::span<const Segment> segments, void* destination,
                  DType dtype, std::span<const StreamHandle> streams, std::string_view algorithm);
  // destinations[r] may be sources[r].
  void all_reduce(std::span<const void* const> sources, std::span<void* const> destinations, u64 count, DType dtype,
                  std::span<const StreamHandle> streams, std::string_view algorithm);
  // Null destinations/sources: that rank is left out.
  void scatter(u32 root, const void* source, u64 rows, u64 pitch, std::span<const Share> shares,
               std::span<void* const> destinations, std::span<const StreamHandle> streams);
  void gather(u32 root, std::span<const void* const> sources, u64 rows, u64 pitch, std::span<const Share> shares,
              void* destination, std::span<const StreamHandle> streams);

  // Waits (bounded) until all work launched so far has finished, then raises what went wrong, if anything.
  void synchronize();
  // Frees everything once running work has left; later calls raise Error. Idempotent.
  void close();
};

}  // namespace pyparallel
