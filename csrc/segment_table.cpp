// Checks and the launch lock around a backend's segment sender.
#include "segment_table.h"

#include "arguments.h"
#include "check.h"
#include "launch_lock.h"

namespace pyparallel {

SegmentTable::SegmentTable(Communicator& communicator, u32 root, std::vector<Segment> segments,
                           std::vector<void*> flats)
    : communicator_(communicator), nsegments_(segments.size()) {
  const u32 nranks = communicator.nranks();
  check_root("segment table", root, nranks);
  check_one_per_rank("segment table", "flats", flats.size(), nranks);
  check_segments("segment table", segments);
  for (u32 k = 0; k < nsegments_; ++k) {
    if (segments[k].bytes != 0) nonempty_.push_back(k);
  }
  for (u32 rank = 0; rank < nranks; ++rank) {
    PP_CHECK_ARG(flats[rank] || rank == root || nonempty_.empty(), "segment table: rank ", rank,
                 " has no flat buffer");
  }
  const auto lock = lock_launches();
  communicator_.check_open();
  sender_ = communicator_.backend_->make_segment_sender(
      {nranks, root, std::move(segments), std::move(flats), communicator_.options_.stage_slot_bytes,
       communicator_.options_.timeout_ms * 1'000'000});
}

SegmentTable::~SegmentTable() {
  const auto lock = lock_launches();
  sender_.reset();
}

void SegmentTable::check(std::span<const void* const> sources,
                         std::span<const StreamHandle> streams) const {
  check_one_per_rank("segment table", "streams", streams.size(), communicator_.nranks());
  PP_CHECK_ARG(sources.size() == nsegments_, "segment table: got ", sources.size(), " sources for ",
               nsegments_, " segments");
  for (const u32 k : nonempty_) {
    PP_CHECK_ARG(sources[k], "segment table: source ", k, " is null");
  }
}

void SegmentTable::send(std::span<const void* const> sources, std::span<const StreamHandle> streams,
                        bool always) {
  check(sources, streams);
  const auto lock = lock_launches();
  communicator_.check_open();
  communicator_.raise_failure();
  sender_->send(sources, streams, always);
}

bool SegmentTable::would_change(std::span<const void* const> sources,
                                std::span<const StreamHandle> streams) {
  check(sources, streams);
  const auto lock = lock_launches();
  communicator_.check_open();
  return sender_->would_change(sources, streams);
}

void SegmentTable::refresh(u32 rank) {
  PP_CHECK_ARG(rank < communicator_.nranks(), "segment table: rank is ", rank,
               ", but the communicator has ranks 0 to ", communicator_.nranks() - 1);
  const auto lock = lock_launches();
  sender_->refresh(rank);
}

Transferred SegmentTable::transferred() {
  const auto lock = lock_launches();
  return sender_->transferred();
}

}  // namespace pyparallel
