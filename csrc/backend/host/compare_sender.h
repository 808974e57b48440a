// The segment sender of the host: compares every rank's copy with the root's bytes and copies what
// differs, in one pass.
#pragma once
#include <atomic>

#include "../../schedule/chunks.h"
#include "../segment_sender.h"
#include "loops.h"

namespace pyparallel::host {

class CompareSender final : public SegmentSender {
 public:
  explicit CompareSender(const SendTable& table);

  void send(std::span<const void* const> sources, std::span<const StreamHandle> streams,
            bool always) override;
  bool would_change(std::span<const void* const> sources,
                    std::span<const StreamHandle> streams) override;
  void refresh(u32) override {}  // every send compares
  Transferred transferred() override { return total_; }

 private:
  // One pass over all chunks.
  struct Pass {
    const CompareSender* sender;
    const void* const* sources;
    bool always;
    std::atomic<u64> sent{0};
    std::atomic<bool> differs{false};
  };
  template <void (CompareSender::*kTile)(Pass&, u64) const>
  void run(Pass& pass) const;
  void send_tile(Pass& pass, u64 tile) const;
  void compare_tile(Pass& pass, u64 tile) const;
  u32 different_ranks(const Pass& pass, const Chunk& chunk) const;  // bit m: flats_[m]
  static const u8* source_of(const Pass& pass, const Chunk& chunk);
  void prefetch(const Pass& pass, const Chunk& chunk) const;

  std::vector<u8*> flats_;  // of the ranks other than the root
  std::vector<Chunk> chunks_;
  std::vector<u64> tile_ends_;  // chunks of tile t end here, and those of tile t + 1 begin
  u64 bytes_ = 0;
  Stores stores_;
  Transferred total_;
};

}  // namespace pyparallel::host
