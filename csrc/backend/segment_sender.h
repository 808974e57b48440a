// Sends the root's segments into persistent flat buffers of the other ranks, where they differ.
// Each backend has its own way to find out.
#pragma once
#include <span>
#include <vector>

#include "../schedule/event_plan.h"
#include "backend.h"

namespace pyparallel {

// What a table is built of, checked. flats[root] is not used.
struct SendTable {
  u32 nranks, root;
  std::vector<Segment> segments;
  std::vector<void*> flats;
  u64 slot_bytes;  // of stages, where the backend needs them; a multiple of 128
  u64 timeout_ns;  // for half of each wait for the device
};

// Bytes over all ranks.
struct Transferred {
  u64 sent = 0, skipped = 0;
};

// Called under the launch lock, like a backend. sources[k] is the root's segment k.
class SegmentSender {
 public:
  virtual ~SegmentSender() = default;
  virtual void send(std::span<const void* const> sources, std::span<const StreamHandle> streams,
                    bool always) = 0;
  virtual bool would_change(std::span<const void* const> sources,
                            std::span<const StreamHandle> streams) = 0;
  // The rank's copy may be wrong.
  virtual void refresh(u32 rank) = 0;
  virtual Transferred transferred() = 0;
};

}  // namespace pyparallel
