// Segment tables on both kinds of sender: what they send, what they skip, and what they leave
// alone.
#include "segment_table.h"

#include <random>

#include "communicator_checks.h"
#include "hashed_backend.h"

using namespace pyparallel;
using namespace pyparallel::testing;

namespace {

enum class Kind { kCompare, kHash };

std::unique_ptr<Backend> make_backend(Kind kind, u32 nranks) {
  if (kind == Kind::kHash) return std::make_unique<HashedBackend>(nranks);
  return make_host_backend(nranks);
}

// A table, the root's memory, and every rank's flat buffer with what it should hold.
struct Setup {
  World world;
  u32 root;
  std::vector<Segment> segments;
  std::vector<Bytes> memory;  // [segment], one byte longer than the segment
  u64 shift;                  // where a segment starts in its memory
  std::vector<Bytes> flats, want;
  SegmentTable table;

  Setup(std::unique_ptr<Backend> backend, u32 nranks, u32 root_rank, std::vector<Segment> pieces,
        u64 shift_bytes = 0)
      : world(nranks, std::move(backend), kTable),
        root(root_rank),
        segments(std::move(pieces)),
        shift(shift_bytes),
        flats(nranks, Bytes(end() + 64, kPoison)),
        want(flats),
        table(world.communicator, root, segments, addresses(flats)) {
    std::mt19937_64 random(end());
    for (const Segment& segment : segments) {
      memory.emplace_back(segment.bytes + shift);
      for (u8& byte : memory.back()) byte = static_cast<u8>(random());
    }
  }

  // Small stages, so that a table has several windows.
  static constexpr CommunicatorOptions kTable{.stage_slot_bytes = 32 << 10};

  u64 end() const { return segments.empty() ? 0 : segments.back().offset + segments.back().bytes; }
  u64 bytes() const {
    u64 total = 0;
    for (const Segment& segment : segments) total += segment.bytes;
    return total;
  }
  u8* source(u64 k) { return memory[k].data() + shift; }
  std::vector<const void*> sources() {
    std::vector<const void*> all;
    for (u64 k = 0; k < segments.size(); ++k) all.push_back(source(k));
    return all;
  }

  // Sends, checks every byte of every rank, and returns the bytes that were sent.
  u64 send(bool always = false) {
    const Transferred before = table.transferred();
    table.send(sources(), world.streams, always);
    const Transferred after = table.transferred();
    for (u32 rank = 0; rank < world.nranks; ++rank) {
      for (u64 k = 0; rank != root && k < segments.size(); ++k) {
        std::copy_n(source(k), segments[k].bytes,
                    want[rank].begin() + static_cast<i64>(segments[k].offset));
      }
      EXPECT(flats[rank] == want[rank], "rank ", rank, " of ", world.nranks, ", root ", root);
    }
    const u64 sent = after.sent - before.sent, skipped = after.skipped - before.skipped;
    EXPECT(sent + skipped == bytes() * (world.nranks - 1), sent, " sent, ", skipped, " skipped");
    return sent;
  }
  bool would_change() { return table.would_change(sources(), world.streams); }
};

const std::vector<Segment> kMixed = {{0, 1},        {1, 0},         {1, 3},      {512, 40000},
                                     {40960, 4},    {41000, 65536}, {110000, 7}, {120001, 32768},
                                     {152769, 500}, {200000, 0}};

template <class E>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was raised";
}

}  // namespace

TEST(everything_is_sent_once_and_then_nothing) {
  for (const Kind kind : {Kind::kCompare, Kind::kHash}) {
    for (const u32 n : {1u, 2u, 3u, 16u}) {
      for (const u32 root : {0u, n - 1}) {
        for (const u64 shift : {0, 1, 2, 4}) {
          Setup setup(make_backend(kind, n), n, root, kMixed, shift);
          const u64 all = setup.bytes() * (n - 1);
          EXPECT(setup.would_change() == (n > 1));
          EXPECT(setup.send() == all);
          EXPECT(!setup.would_change());
          EXPECT(setup.send() == 0);
          EXPECT(setup.send(true) == all);
          EXPECT(setup.send() == 0);
        }
      }
    }
  }
}

TEST(no_segments_and_empty_segments) {
  for (const Kind kind : {Kind::kCompare, Kind::kHash}) {
    for (const auto& segments : {std::vector<Segment>{}, {{0, 0}}, {{0, 0}, {5, 0}}}) {
      Setup setup(make_backend(kind, 3), 3, 1, segments);
      EXPECT(!setup.would_change() && setup.send() == 0 && setup.send(true) == 0);
    }
    // Null pointers are no fault where there is nothing to read.
    World world(2, make_backend(kind, 2));
    SegmentTable table(world.communicator, 0, {{0, 0}}, {nullptr, nullptr});
    const void* null[] = {nullptr};
    table.send(null, world.streams, false);
  }
}

// Changes of one bit at each byte of a chunk and around its ends; 4096 and 256 are the steps in
// which bytes are compared.
TEST(a_change_at_any_byte_sends_its_chunk_alone) {
  for (const Kind kind : {Kind::kCompare, Kind::kHash}) {
    Setup setup(make_backend(kind, 3), 3, 0, {{0, 3}, {64, 2 * kChunkBytes + 77}, {66000, 5}});
    setup.send();
    std::vector<u64> positions = {0,
                                  1,
                                  kChunkBytes - 1,
                                  kChunkBytes,
                                  2 * kChunkBytes - 1,
                                  2 * kChunkBytes,
                                  2 * kChunkBytes + 76};
    for (u64 i = 0; i < 600; ++i) positions.push_back(4096 - 300 + i);
    for (u64 i = 0; i < 64; ++i) positions.push_back(kChunkBytes - 32 + i);
    for (u64 i = 0; i < 77; ++i) positions.push_back(2 * kChunkBytes + i);
    for (const u64 position : positions) {
      setup.source(1)[position] ^= static_cast<u8>(1u << position % 8);
      EXPECT(setup.would_change(), position);
      // The chunks of the second segment, which a window of 32 KiB may have cut in two.
      const u64 sent = setup.send();
      EXPECT(sent > 0 && sent <= 2 * kChunkBytes, sent, " bytes for a change at ", position);
      EXPECT(!setup.would_change() && setup.send() == 0, position);
    }
    setup.source(0)[2] ^= 1;
    EXPECT(setup.send() == 2 * 3);
    setup.source(2)[0] ^= 1;
    setup.source(0)[0] ^= 1;
    EXPECT(setup.send() == 2 * 8);
  }
}

TEST(sources_may_move) {
  for (const Kind kind : {Kind::kCompare, Kind::kHash}) {
    Setup setup(make_backend(kind, 3), 3, 2, kMixed);
    setup.send();
    std::vector<Bytes> moved = setup.memory;
    std::swap(moved, setup.memory);
    EXPECT(setup.send() == 0, "equal bytes at other addresses were sent");
    std::swap(moved, setup.memory);
    setup.source(3)[39999] ^= 1;
    EXPECT(setup.send() > 0);
    setup.memory[5].insert(setup.memory[5].begin(), 0);
    setup.shift = 0;
    EXPECT(setup.send() > 0, "shifted bytes were not sent");
  }
}

TEST(a_changed_copy_is_seen_by_comparing) {
  Setup setup(make_host_backend(4), 4, 1, kMixed);
  setup.send();
  for (const u32 rank : {0u, 2u, 3u}) {
    for (const u64 k : {0, 3, 5, 8}) {
      const u64 last = setup.segments[k].offset + setup.segments[k].bytes - 1;
      setup.flats[rank][last] ^= 0x80;
      EXPECT(setup.would_change());
      const u64 sent = setup.send();
      EXPECT(sent > 0 && sent <= kChunkBytes && sent <= setup.segments[k].bytes, sent);
    }
  }
  // Different chunks of different ranks, and one that the root changed too.
  setup.flats[0][600] ^= 1;
  setup.flats[3][41000] ^= 1;
  setup.source(8)[0] ^= 1;
  EXPECT(setup.send() == 2 * kChunkBytes + 3 * 500);
  setup.flats[0][508] = setup.want[0][508] = 1;  // between segments: not ours
  EXPECT(setup.send() == 0);
}

TEST(a_stale_rank_gets_everything_once) {
  Setup setup(make_backend(Kind::kHash, 4), 4, 1, kMixed);
  setup.send();
  for (const u32 rank : {0u, 3u}) {
    for (u8& byte : setup.flats[rank]) byte ^= 0xff;
    for (u64 i = 0; i < setup.flats[rank].size(); ++i) setup.want[rank][i] = setup.flats[rank][i];
    setup.table.refresh(rank);
  }
  EXPECT(setup.would_change());
  setup.source(4)[0] ^= 1;  // 4 bytes, which rank 2 gets too
  EXPECT(setup.send() == 2 * setup.bytes() + 4);
  setup.table.refresh(1);  // the root has no copy
  EXPECT(!setup.would_change() && setup.send() == 0);
}

TEST(a_send_that_failed_half_way_is_made_up_for) {
  for (int launches = 0; launches < 8; ++launches) {
    auto owned = std::make_unique<HashedBackend>(3);
    HashedBackend& backend = *owned;
    Setup setup(std::move(owned), 3, 0, kMixed);
    setup.send();
    setup.source(3)[0] ^= 1;
    setup.source(7)[9] ^= 1;
    backend.launches_left = launches;
    const std::string text =
        message_of<Error>([&] { setup.table.send(setup.sources(), setup.world.streams, false); });
    EXPECT(text == "the launch failed", text);
    backend.launches_left = -1;
    EXPECT(setup.would_change());
    setup.send();
    EXPECT(setup.send() == 0);
  }
}

TEST(large_tables_run_on_the_pool) {
  std::vector<Segment> segments;
  for (u64 k = 0; k < 300; ++k) segments.push_back({k * 14336, 14000});
  segments.push_back({300 * 14336, 3'000'001});
  Setup setup(make_host_backend(4), 4, 0, segments);
  EXPECT(setup.send() == 3 * setup.bytes());
  EXPECT(!setup.would_change());
  std::mt19937_64 random(4);
  for (int round = 0; round < 20; ++round) {
    const u64 k = random() % segments.size();
    setup.source(k)[random() % segments[k].bytes] ^= 1;
    setup.flats[3][segments[300].offset + random() % segments[300].bytes] ^= 1;
    EXPECT(setup.would_change());
    const u64 sent = setup.send();
    EXPECT(sent > 0 && sent <= 4 * kChunkBytes, sent);
  }
}

// Where work is queued, the addresses that it reads must stay, and nothing that it writes is freed.
TEST(a_device_that_is_behind_is_waited_for) {
  auto owned = std::make_unique<HashedBackend>(2);
  HashedBackend& backend = *owned;
  World world(2, std::move(owned), {.timeout_ms = 40});
  Bytes a(100, 1), b(100, 2), flat(100);
  const void* const first[] = {a.data()};
  const void* const second[] = {b.data()};
  auto table = std::make_unique<SegmentTable>(world.communicator, 0, std::vector<Segment>{{0, 100}},
                                              std::vector<void*>{nullptr, flat.data()});
  table->send(first, world.streams, false);
  backend.waits = 0;
  table->send(first, world.streams, false);
  EXPECT(backend.waits == 0, "the same addresses were waited for");
  table->send(second, world.streams, false);
  EXPECT(backend.waits == 1 && flat == b, backend.waits);
  backend.busy = true;
  const auto expect = [](const std::function<void()>& call, const char* what) {
    const std::string text = message_of<Error>(call);
    EXPECT(
        text == message(what, ": the last work of the segment table was still running after 80 ms"),
        text);
  };
  table->send(second, world.streams, false);  // ordered by streams
  expect([&] { table->send(first, world.streams, false); }, "send");
  expect([&] { table->would_change(second, world.streams); }, "would_change");
  expect([&] { table->transferred(); }, "transferred");
  const int allocations = backend.allocations;
  table.reset();
  EXPECT(backend.allocations == allocations, "memory was freed that a kernel may write");
  backend.busy = false;
}

TEST(memory_is_released_with_the_table) {
  auto owned = std::make_unique<HashedBackend>(3);
  HashedBackend& backend = *owned;
  World world(3, std::move(owned));
  std::vector<Bytes> flats(3, Bytes(100));
  const int before = backend.allocations;
  {
    SegmentTable table(world.communicator, 0, {{0, 100}}, addresses(flats));
    EXPECT(backend.allocations == before + 3, backend.allocations);
  }
  EXPECT(backend.allocations == before, backend.allocations, " allocations were not released");
}

TEST(arguments_are_checked) {
  World world(2);
  Bytes a(16), b(16);
  void* const flats[] = {a.data(), b.data()};
  const auto make = [&](u32 root, std::vector<Segment> segments, std::vector<void*> to) {
    return message_of<ArgumentError>(
        [&] { SegmentTable(world.communicator, root, std::move(segments), std::move(to)); });
  };
  const auto expect = [](const std::string& got, const char* want) { EXPECT(got == want, got); };
  expect(make(2, {}, {flats[0], flats[1]}),
         "segment table: root is 2, but the communicator has ranks 0 to 1");
  expect(make(0, {}, {flats[0]}), "segment table: got 1 flats for 2 ranks");
  expect(make(0, {{0, 8}, {4, 8}}, {flats[0], flats[1]}),
         "segment table: segment 1 starts at byte 4, but segment 0 ends at byte 8");
  expect(make(0, {{0, 8}}, {flats[0], nullptr}), "segment table: rank 1 has no flat buffer");
  EXPECT(make(0, {{0, 8}}, {nullptr, flats[1]}) == "nothing was raised");
  SegmentTable table(world.communicator, 0, {{0, 8}}, {nullptr, b.data()});
  const void* const one[] = {a.data()};
  const void* const two[] = {a.data(), a.data()};
  const void* const null[] = {nullptr};
  const auto send = [&](std::span<const void* const> sources, u64 nstreams) {
    const std::vector<StreamHandle> streams(nstreams, 0);
    const auto would = message_of<ArgumentError>([&] { table.would_change(sources, streams); });
    const auto sent = message_of<ArgumentError>([&] { table.send(sources, streams, false); });
    EXPECT(would == sent, would, " / ", sent);
    return sent;
  };
  expect(send(two, 2), "segment table: got 2 sources for 1 segments");
  expect(send(null, 2), "segment table: source 0 is null");
  expect(send(one, 1), "segment table: got 1 streams for 2 ranks");
  expect(message_of<ArgumentError>([&] { table.refresh(2); }),
         "segment table: rank is 2, but the communicator has ranks 0 to 1");
  world.communicator.close();
  expect(message_of<Error>([&] { table.send(one, world.streams, false); }),
         "the communicator is closed");
  expect(message_of<Error>([&] { SegmentTable(world.communicator, 0, {}, {flats[0], flats[1]}); }),
         "the communicator is closed");
}

TEST_MAIN()
