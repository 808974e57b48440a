// A segment table: what root sends again and again, described once.
#pragma once
#include "backend/segment_sender.h"
#include "communicator.h"

namespace pyparallel {

// The communicator must outlive it. May be used from several threads; arguments are checked before
// anything starts (ArgumentError). The memory of flat buffers stays the caller's.
class SegmentTable {
 public:
  // flats[r] is rank r's flat buffer (ignored for root), in which segment k of the root lies at
  // segments[k].offset. Segments ascend and do not overlap.
  SegmentTable(Communicator& communicator, u32 root, std::vector<Segment> segments,
               std::vector<void*> flats);
  ~SegmentTable();
  SegmentTable(const SegmentTable&) = delete;
  SegmentTable& operator=(const SegmentTable&) = delete;

  // Makes every rank's copy equal to the root's segments, sources[k], which may lie elsewhere at
  // each call. Chunks that are equal already are not written: found by comparing bytes where any
  // rank's memory can be read, else by the hash of what was sent last. `always` writes them all.
  void send(std::span<const void* const> sources, std::span<const StreamHandle> streams,
            bool always);
  // Whether send() would write anything.
  bool would_change(std::span<const void* const> sources, std::span<const StreamHandle> streams);
  // The rank's copy may be wrong: where hashes decide, the next send() writes all of it.
  void refresh(u32 rank);
  // Of all send() so far. Waits for the last one where the device counts.
  Transferred transferred();

 private:
  void check(std::span<const void* const> sources, std::span<const StreamHandle> streams) const;

  Communicator& communicator_;
  const u64 nsegments_;
  std::vector<u32> nonempty_;
  std::unique_ptr<SegmentSender> sender_;
};

}  // namespace pyparallel
