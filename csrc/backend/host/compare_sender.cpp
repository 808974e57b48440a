// Compare, then copy: chunk by chunk, in tiles on the pool.
#include "compare_sender.h"

#include <cstring>
#include <utility>

#include "pool.h"

namespace pyparallel::host {
namespace {

// As for other work of the host: below kInlineBytes waking threads costs more than they save, and a
// tile of kTileBytes balances the load at no cost.
constexpr u64 kInlineBytes = 64 << 10;
constexpr u64 kTileBytes = 128 << 10;

bool equal(const void* a, const void* b, u64 bytes) { return std::memcmp(a, b, bytes) == 0; }

}  // namespace

CompareSender::CompareSender(SendTable table)
    : flats_(std::move(table.flats)), chunks_(cut_chunks(table.segments, u64{1} << 63)) {
  flats_.erase(flats_.begin() + table.root);
  u64 tile = 0;
  for (u64 c = 0; c < chunks_.size(); ++c) {
    bytes_ += chunks_[c].bytes;
    tile += chunks_[c].bytes;
    if (tile >= kTileBytes || c + 1 == chunks_.size()) {
      tile_ends_.push_back(c + 1);
      tile = 0;
    }
  }
  stores_ = stores_for(bytes_ * (1 + flats_.size()));
}

template <void (CompareSender::*kTile)(CompareSender::Pass&, u64) const>
void CompareSender::run(Pass& pass) const {
  if (flats_.empty()) return;
  const auto body = [](void* context, u64 tile) {
    auto& running = *static_cast<Pass*>(context);
    (running.sender->*kTile)(running, tile);
  };
  if (bytes_ < kInlineBytes) {
    for (u64 tile = 0; tile < tile_ends_.size(); ++tile) body(&pass, tile);
  } else {
    Pool::instance().run(tile_ends_.size(), body, &pass);
  }
}

void CompareSender::send(std::span<const void* const> sources, std::span<const StreamHandle>,
                         bool always) {
  Pass pass{this, sources.data(), always};
  run<&CompareSender::send_tile>(pass);
  const u64 sent = pass.sent.load(std::memory_order_relaxed);  // the pool orders it
  total_.sent += sent;
  total_.skipped += bytes_ * flats_.size() - sent;
}

bool CompareSender::would_change(std::span<const void* const> sources,
                                 std::span<const StreamHandle>) {
  Pass pass{this, sources.data(), false};
  run<&CompareSender::compare_tile>(pass);
  return pass.differs.load(std::memory_order_relaxed);
}

void CompareSender::send_tile(Pass& pass, u64 tile) const {
  u64 sent = 0;
  const u64 end = tile_ends_[tile];
  for (u64 c = tile == 0 ? 0 : tile_ends_[tile - 1]; c < end; ++c) {
    if (c + 1 < end && !pass.always) prefetch(pass, chunks_[c + 1]);
    sent += send_chunk(pass, chunks_[c]);
  }
  pass.sent.fetch_add(sent, std::memory_order_relaxed);
}

void CompareSender::compare_tile(Pass& pass, u64 tile) const {
  const u64 end = tile_ends_[tile];
  for (u64 c = tile == 0 ? 0 : tile_ends_[tile - 1]; c < end; ++c) {
    if (pass.differs.load(std::memory_order_relaxed)) return;
    const Chunk& chunk = chunks_[c];
    const u8* from = static_cast<const u8*>(pass.sources[chunk.segment]) + chunk.source_offset;
    for (void* flat : flats_) {
      if (!equal(static_cast<u8*>(flat) + chunk.offset, from, chunk.bytes)) {
        pass.differs.store(true, std::memory_order_relaxed);
        return;
      }
    }
  }
}

// Returns the bytes sent to all ranks.
u64 CompareSender::send_chunk(const Pass& pass, const Chunk& chunk) const {
  const u8* from = static_cast<const u8*>(pass.sources[chunk.segment]) + chunk.source_offset;
  u8* to[kMaxRanks];
  u32 count = 0;
  for (void* flat : flats_) {
    u8* copy = static_cast<u8*>(flat) + chunk.offset;
    if (pass.always || !equal(copy, from, chunk.bytes)) to[count++] = copy;
  }
  if (count != 0) copy(to, count, from, chunk.bytes, stores_);
  return u64{count} * chunk.bytes;
}

// A copy that differs often does so in its first line, and then nothing else of it is read: no
// hardware sees that line coming.
void CompareSender::prefetch(const Pass& pass, const Chunk& chunk) const {
  for (void* flat : flats_) __builtin_prefetch(static_cast<u8*>(flat) + chunk.offset);
  __builtin_prefetch(static_cast<const u8*>(pass.sources[chunk.segment]) + chunk.source_offset);
}

}  // namespace pyparallel::host
