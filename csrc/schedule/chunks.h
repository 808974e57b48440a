// How a segment table cuts its segments: into chunks that are compared and sent as a whole. Pure.
#pragma once
#include <span>
#include <vector>

#include "event_plan.h"

namespace pyparallel {

// Small enough that a change inside a large tensor does not send all of it, large enough that a
// chunk's own costs (a compare, a hash, an announcement) vanish beside its bytes.
constexpr u32 kChunkBytes = 32 << 10;

// A part of one segment; never empty.
struct Chunk {
  u64 source_offset;  // from the segment's start
  u64 offset;         // in the flat buffers
  u32 segment;
  u32 bytes;
};

// All bytes of all segments, in order. No chunk crosses a multiple of `window_bytes` of the flat
// buffer.
std::vector<Chunk> cut_chunks(std::span<const Segment> segments, u64 window_bytes);

// The chunks [first, end) of each window; windows without any are left out.
struct Window {
  u64 offset;  // where the window begins in the flat buffers
  u64 first, end;
};
std::vector<Window> group_windows(std::span<const Chunk> chunks, u64 window_bytes);

}  // namespace pyparallel
