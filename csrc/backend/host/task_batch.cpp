// Tiles: the payloads of all tasks laid end to end and cut at equal distances, so that a tile may
// be a part of one large task or many small ones.
#include "task_batch.h"

#include <algorithm>
#include <vector>

#include "float_mode.h"
#include "loops.h"
#include "pool.h"

namespace pyparallel::host {
namespace {

// Waking a sleeping thread and waiting for it costs about 10 us, in which one core moves about 100
// KiB.
constexpr u64 kInlineBytes = 64 << 10;
// Largest tile: small enough to balance the load (threads take tiles when they are free), large
// enough that taking one costs nothing, and its source stays in a second-level cache while it is
// written to every destination.
constexpr u64 kTileBytes = 256 << 10;
constexpr u64 kSmallestTileBytes = 32 << 10;
constexpr u64 kTilesPerThread = 4;  // enough to balance threads that start late
// Cuts inside a task fall on multiples of this, so that they split no element and no cache line of
// aligned data.
constexpr u64 kCut = 64;

u64 payload(const Task& task) { return task.rows * task.row_bytes; }

// Rows that follow each other without a gap on both sides are one long row.
bool contiguous(const Task& task) {
  return task.rows == 1 ||
         (task.source_pitch == task.row_bytes && task.destination_pitch == task.row_bytes);
}

struct Pointers {
  const u8* sources[kMaxRanks];
  u8* destinations[kMaxRanks];
};

Pointers advance(const Task& task, u64 source_offset, u64 destination_offset) {
  Pointers at;
  for (u32 k = 0; k < task.nsources; ++k)
    at.sources[k] = static_cast<const u8*>(task.sources[k]) + source_offset;
  for (u32 m = 0; m < task.ndestinations; ++m) {
    at.destinations[m] = static_cast<u8*>(task.destinations[m]) + destination_offset;
  }
  return at;
}

// Runs bytes [begin, end) of the task's payload.
void run_part(const Task& task, u64 begin, u64 end, Stores stores) {
  if (contiguous(task)) {
    const Pointers at = advance(task, begin, begin);
    if (task.sum) {
      sum(task.dtype, at.destinations, task.ndestinations, at.sources, task.nsources, end - begin,
          stores);
    } else {
      copy(at.destinations, task.ndestinations, at.sources[0], end - begin, stores);
    }
    return;
  }
  // Rows are often a few bytes long; cached stores, because a streamed line would be written in
  // pieces.
  while (begin < end) {
    const u64 row = begin / task.row_bytes;
    const u64 column = begin % task.row_bytes;
    const u64 length = std::min(task.row_bytes - column, end - begin);
    const Pointers at =
        advance(task, row * task.source_pitch + column, row * task.destination_pitch + column);
    copy(at.destinations, task.ndestinations, at.sources[0], length, Stores::kCached);
    begin += length;
  }
}

struct Batch {
  std::span<const Task> tasks;
  std::vector<u64> ends;  // of each task's payload, when all are laid end to end
  u64 tile_bytes;
  Stores stores;

  u64 bytes() const { return ends.back(); }

  // Where a cut at `position` falls inside the task whose payload is [begin, end).
  static u64 cut(u64 begin, u64 end, u64 position) {
    if (position <= begin) return 0;
    if (position >= end) return end - begin;
    return (position - begin) / kCut * kCut;
  }

  void run_tile(u64 tile) const {
    const u64 first = tile * tile_bytes;
    const u64 last = std::min(first + tile_bytes, bytes());
    auto k = static_cast<u64>(std::upper_bound(ends.begin(), ends.end(), first) - ends.begin());
    for (u64 begin = k ? ends[k - 1] : 0; k < tasks.size() && begin < last; begin = ends[k++]) {
      const u64 from = cut(begin, ends[k], first);
      const u64 to = cut(begin, ends[k], last);
      if (from < to) run_part(tasks[k], from, to, stores);
    }
    // Because the pool passes the tile on with release stores: once a tile and not once a task, of
    // which there may be thousands.
    if (stores == Stores::kStreaming) stream_fence();
  }
};

}  // namespace

void run_tasks(std::span<const Task> tasks) {
  u64 bytes = 0, touched = 0;
  for (const Task& task : tasks) {
    bytes += payload(task);
    touched += payload(task) * (task.nsources + task.ndestinations);
  }
  if (bytes == 0) return;
  const Stores stores = stores_for(touched);
  const DefaultFloatMode mode;
  if (bytes < kInlineBytes) {
    for (const Task& task : tasks) {
      if (payload(task) != 0) run_part(task, 0, payload(task), stores);
    }
    if (stores == Stores::kStreaming) stream_fence();  // the caller may pass the data on
    return;
  }
  Pool& pool = Pool::instance();
  const u64 share = round_up(bytes / (pool.concurrency() * kTilesPerThread), kCut);
  Batch batch{tasks, {}, std::clamp(share, kSmallestTileBytes, kTileBytes), stores};
  batch.ends.reserve(tasks.size());
  u64 end = 0;
  for (const Task& task : tasks) batch.ends.push_back(end += payload(task));
  pool.run((bytes + batch.tile_bytes - 1) / batch.tile_bytes,
           [](void* context, u64 tile) { static_cast<const Batch*>(context)->run_tile(tile); },
           &batch);
}

}  // namespace pyparallel::host
