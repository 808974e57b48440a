// Every collective and algorithm through the communicator: values.
#include <thread>

#include "communicator_checks.h"

using namespace pyparallel;
using namespace pyparallel::testing;

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
    for (const auto algorithm : names_of(Collective::kBroadcast, 5003))
      check_broadcast(world, root, 5003, algorithm);
    for (const auto algorithm : names_of(Collective::kReduceAdd, 4 * 3001))
      check_reduce_add(world, root, 3001, DType::kFloat32, algorithm);
    check_scatter_and_gather(world, root, 50, 0);
  }
  for (const auto algorithm : names_of(Collective::kAllReduce, 2 * 3001))
    check_all_reduce(world, 3001, DType::kFloat16, true, algorithm);
}

TEST(megabytes_run_on_the_pool) {
  World world(4, make_host_backend(4), CommunicatorOptions{});
  for (const auto algorithm : names_of(Collective::kBroadcast, 9'000'003)) {
    check_broadcast(world, 1, 3'000'001, algorithm);
    check_broadcast(world, 2, 9'000'003, algorithm);
  }
  for (const auto algorithm : names_of(Collective::kReduceAdd, 4 * 1'700'001))
    check_reduce_add(world, 1, 1'700'001, DType::kFloat32, algorithm);
  for (const auto algorithm : names_of(Collective::kAllReduce, 2 * 700'001))
    check_all_reduce(world, 700'001, DType::kBFloat16, true, algorithm);
  check_scatter_and_gather(world, 3, 60'000, 0);
}

TEST(low_latency_carries_up_to_its_largest_payload) {
  World world(3, make_host_backend(3), CommunicatorOptions{});
  for (u32 repeat = 0; repeat < 5; ++repeat) {
    check_broadcast(world, repeat % 3, kLlMaxBytes - repeat, "ll");
    check_reduce_add(world, repeat % 3, kLlMaxBytes / 8, DType::kInt64, "ll");
    check_all_reduce(world, kLlMaxBytes / 2 - repeat, DType::kFloat16, true, "one_shot_ll");
  }
}

// 3 MB in one row: pieces of the last two ranks go by copy engines.
TEST(large_pieces_go_by_copy_engines) {
  auto owned = std::make_unique<StagedBackend>(3);
  StagedBackend& backend = *owned;
  World world(3, std::move(owned), CommunicatorOptions{});
  const Share shares[] = {{0, 500'000}, {500'000, 1'500'001}, {2'000'001, 1 << 20}};
  const u64 bytes = 2'000'001 + (1 << 20);
  Bytes whole(bytes), gathered(bytes, kPoison);
  for (u64 i = 0; i < bytes; ++i) whole[i] = static_cast<u8>(i * 7 % 251);
  std::vector<Bytes> pieces;
  for (const Share& share : shares) pieces.emplace_back(share.bytes, kPoison);
  world.communicator.scatter(0, whole.data(), 1, bytes, shares, addresses(pieces), world.streams);
  world.communicator.gather(0, addresses(std::as_const(pieces)), 1, bytes, shares, gathered.data(),
                            world.streams);
  EXPECT(gathered == whole);
  EXPECT(backend.engine_copies == 4, backend.engine_copies);
}

// Which memory of a rank is touched by which ranks decides where it can lie.
TEST(chains_of_copies_ask_for_memory_of_neighbours) {
  const u32 n = 5;
  auto owned = std::make_unique<StagedBackend>(n);
  StagedBackend& backend = *owned;
  World world(n, std::move(owned));
  const auto neighbours = [](u32 rank) {
    return RankSet{1} << (rank + 1) % n | RankSet{1} << (rank + n - 1) % n;
  };
  check_broadcast(world, 2, 3000, "copy_chain");
  check_reduce_add(world, 2, 3000, DType::kInt32, "copy_chain");
  check_all_reduce(world, 3000, DType::kInt32, true, "copy_chain");
  EXPECT(backend.touched_by.size() == n, backend.touched_by.size());
  for (u32 rank = 0; rank < n; ++rank)
    EXPECT(backend.touched_by[rank] == neighbours(rank), backend.touched_by[rank]);
  check_broadcast(world, 2, 3000, "push");
  check_reduce_add(world, 2, 3000, DType::kInt32, "owner");
  EXPECT(backend.touched_by.size() == 2 * n, backend.touched_by.size());
  EXPECT(backend.touched_by.back() == all_ranks(n), backend.touched_by.back());
}

TEST(segments_lie_at_their_offsets_and_absent_ranks_add_nothing) {
  for (const u32 n : {2u, 4u}) {
    for (const std::string_view chosen :
         {"", "broadcast:two_hop", "broadcast:copy_chain,reduce_add:copy_chain"})
      for (const bool staged : {false, true}) {
        CommunicatorOptions options = kSmall;
        options.algorithms = chosen;
        World world(n, staged ? std::make_unique<StagedBackend>(n) : make_host_backend(n), options);
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
            if (segments[k].bytes == 0) continue;  // memcmp takes no null pointer
            EXPECT(std::memcmp(destinations[r].data() + segments[k].offset, root_sources[k],
                               segments[k].bytes) == 0,
                   "rank ", r, ", segment ", k);
          }
        }
      }
  }
}

// A communicator keeps its last plan of a broadcast and of a sum. Neighbours in this list differ in
// one thing that a plan depends on; a new communicator has no plan.
TEST(a_plan_is_used_again_only_for_what_it_was_made_for) {
  struct Subject {
    std::string_view algorithm;
    u32 root;
    std::vector<Segment> segments;
    bool absent;  // rank 2 lacks the second segment
  };
  const std::vector<Segment> segments{{0, 1200}, {1280, 800}};
  std::vector<Segment> moved = segments, longer = segments, more = segments;
  moved[1].offset += 64;
  longer[1].bytes += 16;
  more.push_back({2176, 8});
  const Subject subjects[] = {
      {"push", 0, segments, false}, {"push", 0, segments, false},   {"push", 1, segments, false},
      {"push", 1, moved, false},    {"push", 1, segments, false},   {"push", 1, longer, false},
      {"push", 1, more, false},     {"copy_chain", 1, more, false}, {"copy_chain", 1, more, true},
      {"push", 1, more, true},      {"push", 1, more, false},
  };
  for (const bool staged : {false, true}) {
    const auto make = [&] {
      return staged ? std::make_unique<StagedBackend>(3) : make_host_backend(3);
    };
    World world(3, make());
    std::vector<std::vector<Bytes>> memory(3);
    for (u32 r = 0; r < 3; ++r) {
      for (u64 k = 0; k < 3; ++k)
        memory[r].push_back(encode(DType::kInt32, 300, [=](u64 i) { return value_at(r, i + k); }));
    }
    const auto results = [&](World& of, const Subject& subject) {
      std::vector<const void*> sources, roots;
      for (u32 r = 0; r < 3; ++r) {
        for (u64 k = 0; k < subject.segments.size(); ++k) {
          const bool absent = subject.absent && r == 2 && k == 1;
          sources.push_back(absent ? nullptr : memory[r][k].data());
          if (r == subject.root) roots.push_back(memory[r][k].data());
        }
      }
      std::vector<Bytes> all(4, Bytes(2200, kPoison));
      of.communicator.reduce_add(subject.root, sources, subject.segments, all[3].data(),
                                 DType::kInt32, of.streams,
                                 subject.algorithm == "push" ? "owner" : subject.algorithm);
      const std::vector<void*> to{all[0].data(), all[1].data(), all[2].data()};
      of.communicator.broadcast(subject.root, roots, subject.segments, to, of.streams,
                                subject.algorithm);
      return all;
    };
    for (u64 i = 0; i < std::size(subjects); ++i) {
      World fresh(3, make());
      EXPECT(results(world, subjects[i]) == results(fresh, subjects[i]), "subject ", i);
    }
  }
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
