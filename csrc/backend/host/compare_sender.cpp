// Compare, then copy: chunk by chunk, in tiles on the pool.
#include "compare_sender.h"

#include <algorithm>
#include <cstring>

#include "pool.h"

namespace pyparallel::host {
namespace {

// As for other work of the host: below kInlineBytes waking threads costs more than they save, and a
// tile of kTileBytes balances the load at no cost.
constexpr u64 kInlineBytes = 64 << 10;
constexpr u64 kTileBytes = 128 << 10;
// Read of the root's chunk, then of each copy: the root's bytes stay in the first-level cache, and
// memory is read in as many streams as there are ranks, which is faster than in one.
constexpr u64 kBlock = 4096;

}  // namespace

CompareSender::CompareSender(const SendTable& table)
    : chunks_(cut_chunks(table.segments, u64{1} << 63)) {
  for (u32 rank = 0; rank < table.nranks; ++rank) {
    if (rank != table.root) flats_.push_back(static_cast<u8*>(table.flats[rank]));
  }
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
    const Chunk& chunk = chunks_[c];
    const u32 ranks = pass.always ? (1u << flats_.size()) - 1 : different_ranks(pass, chunk);
    u8* to[kMaxRanks];
    u32 count = 0;
    for (u32 m = 0; m < flats_.size(); ++m) {
      if ((ranks >> m & 1) != 0) to[count++] = flats_[m] + chunk.offset;
    }
    if (count == 0) continue;
    copy(to, count, source_of(pass, chunk), chunk.bytes, stores_);
    sent += u64{count} * chunk.bytes;
  }
  pass.sent.fetch_add(sent, std::memory_order_relaxed);
}

void CompareSender::compare_tile(Pass& pass, u64 tile) const {
  const u64 end = tile_ends_[tile];
  for (u64 c = tile == 0 ? 0 : tile_ends_[tile - 1]; c < end; ++c) {
    if (pass.differs.load(std::memory_order_relaxed)) return;
    if (different_ranks(pass, chunks_[c]) != 0) pass.differs.store(true, std::memory_order_relaxed);
  }
}

const u8* CompareSender::source_of(const Pass& pass, const Chunk& chunk) {
  return static_cast<const u8*>(pass.sources[chunk.segment]) + chunk.source_offset;
}

// Each copy is read up to the block of its first difference.
u32 CompareSender::different_ranks(const Pass& pass, const Chunk& chunk) const {
  const u8* const from = source_of(pass, chunk);
  const u32 all = (1u << flats_.size()) - 1;
  u32 same = all;
  for (u64 at = 0; at < chunk.bytes && same != 0; at += kBlock) {
    const u64 bytes = std::min(kBlock, chunk.bytes - at);
    for (u32 m = 0; m < flats_.size(); ++m) {
      const bool equal =
          (same >> m & 1) == 0 || std::memcmp(flats_[m] + chunk.offset + at, from + at, bytes) == 0;
      if (!equal) same &= ~(1u << m);
    }
  }
  return all & ~same;
}

// A copy that differs often does so in its first line, and then nothing else of it is read: no
// hardware sees that line coming.
void CompareSender::prefetch(const Pass& pass, const Chunk& chunk) const {
  for (const u8* flat : flats_) __builtin_prefetch(flat + chunk.offset);
  __builtin_prefetch(source_of(pass, chunk));
}

}  // namespace pyparallel::host
