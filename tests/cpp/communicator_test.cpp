// Every collective and algorithm through the communicator: values, arguments, failures.
#include "communicator.h"

#include <cstring>
#include <functional>
#include <thread>
#include <utility>

#include "device/element_type.h"
#include "testing.h"
#include "wrapped_backend.h"

using namespace pyparallel;
using namespace pyparallel::testing;

namespace {

constexpr u8 kPoison = 0xa5;
constexpr CommunicatorOptions kSmall{
    .timeout_ms = 30000, .nchannels = 2, .slots = 4, .slot_bytes = 256, .stage_slot_bytes = 1024};

// Small whole numbers, whose sums are exact in every type and order.
u32 value_at(u32 rank, u64 i) { return static_cast<u32>((i + 3 * rank) % 7); }

using Bytes = std::vector<u8>;

template <class T>
T element_of(u32 value) {
  return narrow<T>(static_cast<Accumulator<T>>(value));
}

// Element i is value(i), as the dtype stores it.
Bytes encode(DType dtype, u64 count, const std::function<u32(u64)>& value) {
  Bytes bytes(count * element_bytes(dtype));
  with_element_type(dtype, [&]<class T>() {
    for (u64 i = 0; i < count; ++i) {
      const T element = element_of<T>(value(i));
      std::memcpy(bytes.data() + i * sizeof(T), &element, sizeof(T));
    }
  });
  return bytes;
}

struct World {
  u32 nranks;
  Communicator communicator;
  std::vector<StreamHandle> streams;

  World(u32 n, std::unique_ptr<Backend> backend, CommunicatorOptions options = kSmall)
      : nranks(n), communicator(std::move(backend), n, options), streams(n, 0) {}
  explicit World(u32 n) : World(n, make_host_backend(n)) {}

  std::vector<Bytes> sources(DType dtype, u64 count) const {
    std::vector<Bytes> all;
    for (u32 r = 0; r < nranks; ++r) {
      all.push_back(encode(dtype, count, [r](u64 i) { return value_at(r, i); }));
    }
    return all;
  }
  Bytes sum(DType dtype, u64 count) const {
    return encode(dtype, count, [this](u64 i) {
      u32 total = 0;
      for (u32 r = 0; r < nranks; ++r) total += value_at(r, i);
      return total;
    });
  }
};

std::vector<const void*> addresses(const std::vector<Bytes>& all) {
  std::vector<const void*> pointers;
  for (const Bytes& bytes : all) pointers.push_back(bytes.data());
  return pointers;
}
std::vector<void*> addresses(std::vector<Bytes>& all) {
  std::vector<void*> pointers;
  for (Bytes& bytes : all) pointers.push_back(bytes.data());
  return pointers;
}

void check_broadcast(World& world, u32 root, u64 bytes, std::string_view algorithm) {
  const std::vector<Bytes> sources = world.sources(DType::kInt32, (bytes + 3) / 4);
  std::vector<Bytes> destinations(world.nranks, Bytes(bytes, kPoison));
  const void* source[] = {sources[root].data()};
  const Segment segment[] = {{0, bytes}};
  world.communicator.broadcast(root, source, segment, addresses(destinations), world.streams,
                               algorithm);
  for (u32 r = 0; r < world.nranks; ++r) {
    const Bytes want =
        r == root ? Bytes(bytes, kPoison)
                  : Bytes(sources[root].begin(), sources[root].begin() + static_cast<i64>(bytes));
    EXPECT(destinations[r] == want, algorithm, ", ", world.nranks, " ranks, root ", root, ", rank ",
           r, ", ", bytes, " bytes");
  }
}

void check_reduce_add(World& world, u32 root, u64 count, DType dtype, std::string_view algorithm) {
  const std::vector<Bytes> sources = world.sources(dtype, count);
  const u64 bytes = count * element_bytes(dtype);
  Bytes destination(bytes, kPoison);
  const Segment segment[] = {{0, bytes}};
  world.communicator.reduce_add(root, addresses(sources), segment, destination.data(), dtype,
                                world.streams, algorithm);
  EXPECT(destination == world.sum(dtype, count), algorithm, ", ", world.nranks, " ranks, root ",
         root, ", ", count, " ", dtype_name(dtype));
}

void check_all_reduce(World& world, u64 count, DType dtype, bool in_place,
                      std::string_view algorithm) {
  std::vector<Bytes> sources = world.sources(dtype, count);
  std::vector<Bytes> fresh(world.nranks, Bytes(count * element_bytes(dtype), kPoison));
  std::vector<Bytes>& destinations = in_place ? sources : fresh;
  world.communicator.all_reduce(addresses(std::as_const(sources)), addresses(destinations), count,
                                dtype, world.streams, algorithm);
  for (u32 r = 0; r < world.nranks; ++r) {
    EXPECT(destinations[r] == world.sum(dtype, count), algorithm, ", rank ", r, " of ",
           world.nranks, ", ", count, " ", dtype_name(dtype), in_place ? ", in place" : "");
  }
}

// Rank r gets a share of r + 1 columns of 3 bytes; ranks in `skip` are left out.
void check_scatter_and_gather(World& world, u32 root, u64 rows, u32 skip) {
  const u32 n = world.nranks;
  std::vector<Share> shares;
  u64 pitch = 2;  // columns of nobody around the shares
  for (u32 r = 0; r < n; ++r) {
    shares.push_back({pitch, 3 * (r + 1)});
    pitch += 3 * (r + 1);
  }
  pitch += 2;
  Bytes matrix(rows * pitch);
  for (u64 i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<u8>(i % 251);
  std::vector<Bytes> pieces;
  std::vector<void*> to;
  for (u32 r = 0; r < n; ++r) pieces.emplace_back(rows * shares[r].bytes, kPoison);
  for (u32 r = 0; r < n; ++r) to.push_back((skip >> r & 1) != 0 ? nullptr : pieces[r].data());
  world.communicator.scatter(root, matrix.data(), rows, pitch, shares, to, world.streams);
  Bytes want_matrix(matrix.size(), kPoison);
  for (u32 r = 0; r < n; ++r) {
    for (u64 row = 0; row < rows; ++row) {
      for (u64 i = 0; i < shares[r].bytes; ++i) {
        const u64 at = row * pitch + shares[r].offset + i;
        const bool skipped = (skip >> r & 1) != 0;
        EXPECT(pieces[r][row * shares[r].bytes + i] == (skipped ? kPoison : matrix[at]),
               "scatter, rank ", r, " of ", n, ", root ", root, ", row ", row, ", byte ", i);
        if (!skipped) want_matrix[at] = matrix[at];
      }
    }
  }
  Bytes gathered(matrix.size(), kPoison);
  const std::vector<const void*> from(to.begin(), to.end());
  world.communicator.gather(root, from, rows, pitch, shares, gathered.data(), world.streams);
  EXPECT(gathered == want_matrix, "gather, ", n, " ranks, root ", root, ", ", rows, " rows");
}

void check_everything(World& world) {
  for (u32 root = 0; root < world.nranks; ++root) {
    for (const u64 size : {0, 1, 5, 127, 128, 129, 1000, 5003, 20001}) {
      for (const auto algorithm : {"auto", "push", "chain"})
        check_broadcast(world, root, size, algorithm);
      for (const auto algorithm : {"auto", "owner", "chain"}) {
        check_reduce_add(world, root, size, static_cast<DType>(size % kDTypes), algorithm);
      }
    }
    for (const u64 rows : {0, 1, 7, 400}) {
      check_scatter_and_gather(world, root, rows, 0);
      check_scatter_and_gather(world, root, rows, 1u << root);
    }
  }
  for (const u64 count : {0, 1, 5, 127, 1000, 5003}) {
    for (u32 dtype = 0; dtype < kDTypes; ++dtype) {
      for (const auto algorithm : {"auto", "two_shot", "ring"}) {
        check_all_reduce(world, count, static_cast<DType>(dtype), false, algorithm);
        check_all_reduce(world, count, static_cast<DType>(dtype), true, algorithm);
      }
    }
  }
}

template <class E>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was raised";
}

void expect_text(const std::string& got, const std::string& want) {
  EXPECT(got == want, "'", got, "', not '", want, "'");
}

}  // namespace

TEST(every_collective_is_right_for_every_rank_count_and_root) {
  for (const u32 n : {1u, 2u, 3u, 4u, 5u}) {
    World world(n);
    check_everything(world);
  }
}

TEST(every_collective_is_right_through_stages) {
  for (const u32 n : {1u, 2u, 3u, 5u}) {
    World world(n, std::make_unique<StagedBackend>(n));
    check_everything(world);
  }
}

TEST(sixteen_ranks) {
  World world(16);
  for (const u32 root : {0u, 7u, 15u}) {
    for (const auto algorithm : {"push", "chain"}) check_broadcast(world, root, 5003, algorithm);
    for (const auto algorithm : {"owner", "chain"})
      check_reduce_add(world, root, 3001, DType::kFloat32, algorithm);
    check_scatter_and_gather(world, root, 50, 0);
  }
  for (const auto algorithm : {"two_shot", "ring"})
    check_all_reduce(world, 3001, DType::kFloat16, true, algorithm);
}

TEST(megabytes_run_on_the_pool) {
  World world(4, make_host_backend(4), CommunicatorOptions{});
  check_broadcast(world, 1, 3'000'001, "push");
  check_broadcast(world, 2, 3'000'001, "chain");
  check_reduce_add(world, 1, 700'001, DType::kFloat32, "owner");
  check_all_reduce(world, 700'001, DType::kBFloat16, true, "two_shot");
  check_scatter_and_gather(world, 3, 60'000, 0);
}

TEST(segments_lie_at_their_offsets_and_absent_ranks_add_nothing) {
  for (const u32 n : {2u, 4u}) {
    for (const bool staged : {false, true}) {
      World world(n, staged ? std::make_unique<StagedBackend>(n) : make_host_backend(n));
      const std::vector<Segment> segments = {{0, 12}, {128, 0}, {128, 4000}, {4224, 8}};
      std::vector<Bytes> memory;
      std::vector<const void*> sources(n * segments.size(), nullptr);
      for (u32 r = 0; r < n; ++r) {
        for (u64 k = 0; k < segments.size(); ++k) {
          memory.push_back(encode(DType::kFloat32, segments[k].bytes / 4,
                                  [=](u64 i) { return value_at(r, i + k); }));
          const bool absent = (k == 0 && r == 0) || (k == 3 && r != n - 1);
          if (!absent) sources[r * segments.size() + k] = memory.back().data();
        }
      }
      Bytes sums(4232, kPoison);
      world.communicator.reduce_add(1, sources, segments, sums.data(), DType::kFloat32,
                                    world.streams, "auto");
      for (u64 k = 0; k < segments.size(); ++k) {
        const Bytes want = encode(DType::kFloat32, segments[k].bytes / 4, [&](u64 i) {
          u32 total = 0;
          for (u32 r = 0; r < n; ++r)
            total += sources[r * segments.size() + k] ? value_at(r, i + k) : 0;
          return total;
        });
        EXPECT(std::equal(want.begin(), want.end(),
                          sums.begin() + static_cast<i64>(segments[k].offset)),
               "segment ", k);
      }
      std::vector<Bytes> destinations(n, Bytes(4232, kPoison));
      const std::span<const void* const> root_sources(sources.data() + (n - 1) * segments.size(),
                                                      segments.size());
      world.communicator.broadcast(n - 1, root_sources, segments, addresses(destinations),
                                   world.streams, "auto");
      for (u32 r = 0; r + 1 < n; ++r) {
        for (u64 k = 0; k < segments.size(); ++k) {
          EXPECT(std::memcmp(destinations[r].data() + segments[k].offset, root_sources[k],
                             segments[k].bytes) == 0,
                 "rank ", r, ", segment ", k);
        }
      }
    }
  }
}

TEST(arguments_are_checked_before_anything_runs) {
  auto owned = std::make_unique<WrappedBackend>(2);
  WrappedBackend& backend = *owned;
  World world(2, std::move(owned));
  Communicator& c = world.communicator;
  Bytes a(64), b(64);
  const void* const one[] = {a.data()};
  const void* const null[] = {nullptr};
  const void* const both[] = {a.data(), b.data()};
  void* const to[] = {a.data(), b.data()};
  void* const partly[] = {a.data(), nullptr};
  const Segment whole[] = {{0, 64}}, odd[] = {{0, 10}}, overlapping[] = {{0, 8}, {4, 8}};
  const Share shares[] = {{0, 4}, {4, 8}}, meeting[] = {{0, 5}, {4, 4}};
  const auto& s = world.streams;
  const std::pair<std::function<void()>, const char*> wrong[] = {
      {[&] { c.broadcast(2, one, whole, to, s, "auto"); },
       "broadcast: root is 2, but the communicator has ranks 0 to 1"},
      {[&] { c.broadcast(0, one, whole, {to, 1}, s, "auto"); },
       "broadcast: got 1 destinations for 2 ranks"},
      {[&] { c.broadcast(0, one, whole, to, {}, "auto"); }, "broadcast: got 0 streams for 2 ranks"},
      {[&] { c.broadcast(0, both, whole, to, s, "auto"); },
       "broadcast: got 2 sources for 1 segments"},
      {[&] { c.broadcast(0, null, whole, to, s, "auto"); },
       "broadcast: source 0 is null, but has 64 bytes"},
      {[&] { c.broadcast(0, one, whole, partly, s, "auto"); },
       "broadcast: rank 1 has no destination for 64 bytes"},
      {[&] { c.broadcast(0, both, overlapping, to, s, "auto"); },
       "broadcast: segment 1 starts at byte 4, but segment 0 ends at byte 8"},
      {[&] { c.broadcast(0, one, whole, to, s, "ring"); },
       "broadcast: unknown algorithm 'ring'; choose auto, push or chain"},
      {[&] { c.reduce_add(0, both, odd, a.data(), DType::kFloat32, s, "auto"); },
       "reduce_add: segment 0 has 10 bytes at byte 0, but an element of float32 has 4"},
      {[&] { c.reduce_add(0, one, whole, a.data(), DType::kFloat32, s, "auto"); },
       "reduce_add: got 1 sources for 2 ranks with 1 segments"},
      {[&] {
         const void* const none[] = {nullptr, nullptr};
         c.reduce_add(0, none, whole, a.data(), DType::kFloat32, s, "auto");
       },
       "reduce_add: no rank has segment 0 of 64 bytes"},
      {[&] {
         const void* const half[] = {a.data(), nullptr};
         c.reduce_add(0, half, whole, a.data(), DType::kFloat32, s, "chain");
       },
       "reduce_add: chain needs a source of every rank"},
      {[&] { c.reduce_add(0, both, whole, nullptr, DType::kFloat32, s, "auto"); },
       "reduce_add: the destination is null, but gets 64 bytes"},
      {[&] { c.all_reduce(both, partly, 16, DType::kFloat32, s, "auto"); },
       "all_reduce: rank 1 has no destination for 16 elements"},
      {[&] { c.all_reduce(both, to, 16, DType::kFloat32, s, "push"); },
       "all_reduce: unknown algorithm 'push'; choose auto, two_shot or ring"},
      {[&] { c.scatter(0, a.data(), 2, 11, shares, to, s); },
       "scatter: rank 1 has bytes 4 to 12 of a row, but a row has 11 bytes"},
      {[&] { c.scatter(0, nullptr, 2, 12, shares, to, s); },
       "scatter: the source of 2 rows of 12 bytes is null"},
      {[&] { c.gather(0, both, 2, 12, meeting, a.data(), s); },
       "gather: the shares of ranks 0 and 1 overlap at byte 4 of a row"},
      {[&] { c.gather(0, both, 2, 12, shares, nullptr, s); },
       "gather: the destination of 2 rows of 12 bytes is null"},
  };
  for (const auto& [call, text] : wrong) expect_text(message_of<ArgumentError>(call), text);
  const Segment two[] = {{0, 4}, {4, 4}};
  expect_text(message_of<ArgumentError>([&] { c.broadcast(0, both, two, to, s, "chain"); }),
              "broadcast: chain takes one segment, not 2");
  EXPECT(backend.launches == 0, backend.launches);
}

TEST(options_are_checked) {
  const auto make = [](u32 nranks, CommunicatorOptions options) {
    return message_of<ArgumentError>(
        [&] { Communicator(make_host_backend(nranks), nranks, options); });
  };
  expect_text(make(17, {}), "a communicator has 1 to 16 ranks, not 17");
  expect_text(make(2, {.slots = 3}), "slots is 3, but must be a power of two from 2 on");
  expect_text(make(2, {.slot_bytes = 100}), "slot_bytes is 100, but must be a multiple of 128");
  expect_text(make(2, {.timeout_ms = 0}), "timeout_ms is 0, but must be from 1 to 1000000000");
}

TEST(nothing_to_move_launches_nothing) {
  auto owned = std::make_unique<WrappedBackend>(3);
  WrappedBackend& backend = *owned;
  World world(3, std::move(owned));
  for (const auto algorithm : {"push", "chain"}) check_broadcast(world, 1, 0, algorithm);
  for (const auto algorithm : {"two_shot", "ring"})
    check_all_reduce(world, 0, DType::kFloat32, false, algorithm);
  check_scatter_and_gather(world, 0, 0, 0);
  check_scatter_and_gather(world, 0, 5, 7);
  EXPECT(backend.launches == 0, backend.launches);
}

TEST(a_closed_communicator_says_so) {
  World world(2);
  world.communicator.close();
  world.communicator.close();
  EXPECT(world.communicator.closed());
  expect_text(message_of<Error>([&] { check_broadcast(world, 0, 8, "auto"); }),
              "the communicator is closed");
  expect_text(message_of<Error>([&] { world.communicator.synchronize(); }),
              "the communicator is closed");
}

TEST(an_absent_rank_is_reported_by_the_call_and_the_next_call_works) {
  auto owned = std::make_unique<AbsentRankBackend>(3, 1, false);
  AbsentRankBackend& backend = *owned;
  CommunicatorOptions options = kSmall;
  // Rank 0 has slots for all slices, so rank 2 is the only one that waits.
  options.timeout_ms = 100;
  options.nchannels = 1;
  World world(3, std::move(owned), options);
  backend.is_absent = false;
  check_broadcast(world, 0, 600, "chain");  // 3 slices
  backend.is_absent = true;
  expect_text(message_of<Error>([&] { check_broadcast(world, 0, 600, "chain"); }),
              "chain broadcast: rank 2 waited 100 ms for data from rank 1 on channel 0: wanted "
              "step 4, saw 3");
  backend.is_absent = false;
  check_broadcast(world, 0, 600, "chain");
  check_all_reduce(world, 600, DType::kFloat32, false, "ring");
  backend.is_absent = true;
  const std::string text =
      message_of<Error>([&] { check_all_reduce(world, 600, DType::kFloat32, false, "ring"); });
  EXPECT(text.starts_with("ring all_reduce: rank ") &&
             text.find(" 100 ms for data from rank ") != text.npos,
         text);
  backend.is_absent = false;
  check_everything(world);
}

TEST(a_sender_without_credit_is_reported) {
  auto owned = std::make_unique<AbsentRankBackend>(2, 1, false);
  CommunicatorOptions options = kSmall;
  options.timeout_ms = 50;
  options.nchannels = 1;
  World world(2, std::move(owned), options);
  expect_text(message_of<Error>([&] { check_broadcast(world, 0, 5000, "chain"); }),
              "chain broadcast: rank 0 waited 50 ms for a credit from rank 1 on channel 0: wanted "
              "step 1, saw 0");
}

TEST(a_late_rank_is_reported_by_the_next_call_and_cannot_disturb_it) {
  auto owned = std::make_unique<AbsentRankBackend>(3, 1, true);
  AbsentRankBackend& backend = *owned;
  CommunicatorOptions options = kSmall;
  options.timeout_ms = 50;
  World world(3, std::move(owned), options);
  std::vector<Bytes> memory(3, Bytes(600));  // outlives the late blocks
  const void* source[] = {memory[0].data()};
  const Segment segment[] = {{0, 600}};
  world.communicator.broadcast(0, source, segment, addresses(memory), world.streams, "chain");
  const int allocations = backend.allocations;
  const std::string want = "chain broadcast: rank 2 waited 50 ms for data from rank 1 on channel ";
  const std::string text = message_of<Error>([&] { world.communicator.synchronize(); });
  EXPECT(text.starts_with(want), text);
  // The late blocks still refer to the old set: it is kept, and new operations get another one.
  EXPECT(backend.allocations == allocations, backend.allocations, " allocations, not ",
         allocations);
  backend.is_absent = false;
  check_broadcast(world, 2, 3000, "chain");
  backend.run_late();  // receives what was sent to it and posts to the old connections
  check_broadcast(world, 2, 3000, "chain");
  check_all_reduce(world, 600, DType::kFloat32, false, "ring");
  world.communicator.close();
  EXPECT(backend.allocations == 0, backend.allocations, " allocations were not released");
}

TEST(memory_is_released_by_close) {
  auto owned = std::make_unique<StagedBackend>(3);
  StagedBackend& backend = *owned;
  World world(3, std::move(owned));
  check_everything(world);
  EXPECT(backend.allocations > 0);
  world.communicator.close();
  EXPECT(backend.allocations == 0, backend.allocations, " allocations were not released");
}

TEST(communicators_may_be_used_from_several_threads) {
  World first(2), second(3);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        check_broadcast(t % 2 ? first : second, 1, 700, i % 2 ? "push" : "chain");
        check_all_reduce(t % 2 ? second : first, 700, DType::kInt64, true,
                         i % 2 ? "ring" : "two_shot");
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_MAIN()
