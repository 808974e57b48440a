#include "chunks.h"

#include <algorithm>

namespace pyparallel {

std::vector<Chunk> cut_chunks(std::span<const Segment> segments, u64 window_bytes) {
  std::vector<Chunk> chunks;
  for (u32 k = 0; k < segments.size(); ++k) {
    const auto [start, size] = segments[k];
    for (u64 done = 0; done < size;) {
      const u64 offset = start + done;
      const u64 bytes =
          std::min({u64{kChunkBytes}, size - done, window_bytes - offset % window_bytes});
      chunks.push_back({done, offset, k, static_cast<u32>(bytes)});
      done += bytes;
    }
  }
  return chunks;
}

std::vector<Window> group_windows(std::span<const Chunk> chunks, u64 window_bytes) {
  std::vector<Window> windows;
  for (u64 c = 0; c < chunks.size(); ++c) {
    const u64 begin = chunks[c].offset / window_bytes * window_bytes;
    if (windows.empty() || windows.back().offset != begin) windows.push_back({begin, c, c});
    windows.back().end = c + 1;
  }
  return windows;
}

}  // namespace pyparallel
