// How segments are cut into chunks, and chunks grouped into windows.
#include "schedule/chunks.h"

#include <random>

#include "testing.h"

using namespace pyparallel;

namespace {

void check(const std::vector<Segment>& segments, u64 window_bytes) {
  const std::vector<Chunk> chunks = cut_chunks(segments, window_bytes);
  u64 c = 0;
  for (u32 k = 0; k < segments.size(); ++k) {
    u64 done = 0;
    for (; c < chunks.size() && chunks[c].segment == k; ++c) {
      const Chunk& chunk = chunks[c];
      EXPECT(chunk.source_offset == done && chunk.offset == segments[k].offset + done, "chunk ", c);
      EXPECT(chunk.bytes > 0 && chunk.bytes <= kChunkBytes, chunk.bytes);
      EXPECT(chunk.offset / window_bytes == (chunk.offset + chunk.bytes - 1) / window_bytes,
             "chunk ", c, " crosses a window of ", window_bytes);
      done += chunk.bytes;
    }
    EXPECT(done == segments[k].bytes, "segment ", k, ": ", done, " of ", segments[k].bytes);
  }
  EXPECT(c == chunks.size());
  u64 next = 0;
  for (const Window& window : group_windows(chunks, window_bytes)) {
    EXPECT(window.first == next && window.end > window.first && window.offset % window_bytes == 0);
    for (next = window.first; next < window.end; ++next) {
      EXPECT(chunks[next].offset / window_bytes * window_bytes == window.offset, "chunk ", next);
    }
  }
  EXPECT(next == chunks.size());
}

}  // namespace

TEST(every_byte_is_in_one_chunk) {
  std::mt19937_64 random(1);
  for (const u64 window : {128u, 384u, 32768u, 40064u, 8u << 20}) {
    check({}, window);
    for (int round = 0; round < 50; ++round) {
      std::vector<Segment> segments;
      u64 end = random() % 1000;
      for (u64 k = 0; k < 1 + random() % 10; ++k) {
        const u64 bytes = random() % 4 == 0 ? 0 : random() % (random() % 3 == 0 ? 150'000 : 600);
        segments.push_back({end, bytes});
        end += bytes + random() % 3 * (random() % 60'000);
      }
      check(segments, window);
    }
  }
}

TEST(sizes_past_32_bits) {
  check({{5, u64{5} << 30}, {(u64{7} << 30) + 3, (u64{1} << 30) + 1}}, 8 << 20);
}

TEST_MAIN()
