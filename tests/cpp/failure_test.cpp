// Ranks that are absent, late or wrong: what is reported, and that the next call works.
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "backend/host/faulty_backend.h"
#include "communicator_checks.h"

using namespace pyparallel;
using namespace pyparallel::testing;
using host::FaultPlan;
using Kind = host::FaultPlan::Kind;

namespace {

CommunicatorOptions with_timeout(u64 ms, u32 nchannels = 2) {
  CommunicatorOptions options = kSmall;
  options.timeout_ms = ms;
  options.nchannels = nchannels;
  return options;
}

// A communicator on the host backend with a faulty rank, and what it has allocated.
struct FaultyWorld {
  std::unique_ptr<host::FaultyBackend> owned_faulty;
  FaultPlan& plan;
  std::unique_ptr<WrappedBackend> owned;
  WrappedBackend& backend;
  World world;

  FaultyWorld(u32 n, FaultPlan first, CommunicatorOptions options)
      : owned_faulty(std::make_unique<host::FaultyBackend>(first)),
        plan(owned_faulty->plan),
        owned(std::make_unique<WrappedBackend>(std::move(owned_faulty))),
        backend(*owned),
        world(n, std::move(owned), options) {}
};

void check_flag_ordered(World& world, Collective collective, std::string_view algorithm) {
  constexpr u64 kCount = 5003;
  if (collective == Collective::kBroadcast) {
    check_broadcast(world, 0, 4 * kCount, algorithm);
  } else if (collective == Collective::kReduceAdd) {
    check_reduce_add(world, 0, kCount, DType::kFloat32, algorithm);
  } else {
    check_all_reduce(world, kCount, DType::kFloat32, false, algorithm);
  }
}

// On a busy machine a healthy rank may be late too, where the timeout is short.
template <class Call>
void eventually(Call call) {
  std::string text;
  for (int attempt = 0; attempt < 20; ++attempt) {
    text = message_of<Error>(call);
    if (text == "nothing was raised") return;
  }
  EXPECT(false, "twenty times: ", text);
}

// The same without a look at the values, on memory that outlives late ranks.
void run_flag_ordered(World& world, Collective collective, std::string_view algorithm) {
  constexpr u64 kBytes = 20'012;
  static std::vector<Bytes> memory(6, Bytes(kBytes));
  const std::vector<void*> all = addresses(memory);
  const std::span<void* const> to(all.data(), 3);
  const std::vector<const void*> from(all.begin() + 3, all.end());
  const Segment segment[] = {{0, kBytes}};
  Communicator& communicator = world.communicator;
  if (collective == Collective::kBroadcast) {
    communicator.broadcast(0, {from.data(), 1}, segment, to, world.streams, algorithm);
  } else if (collective == Collective::kReduceAdd) {
    communicator.reduce_add(0, from, segment, to[0], DType::kFloat32, world.streams, algorithm);
  } else {
    communicator.all_reduce(from, to, kBytes / 4, DType::kFloat32, world.streams, algorithm);
  }
}

// The words of a failure's text; fails unless all are there.
struct Failure {
  char operation[40];
  unsigned rank, ms, peer, channel;
  unsigned long long wanted, seen;
};
Failure parse(const std::string& text) {
  Failure failure{};
  for (const char* what : {"data", "a credit"}) {
    const std::string format = message("%39[a-z_ ]: rank %u waited %u ms for ", what,
                                       " from rank %u on channel %u: wanted step %llu, saw %llu%n");
    int length = 0;
    const int words =
        std::sscanf(text.c_str(), format.c_str(), failure.operation, &failure.rank, &failure.ms,
                    &failure.peer, &failure.channel, &failure.wanted, &failure.seen, &length);
    if (words == 7 && static_cast<size_t>(length) == text.size()) return failure;
  }
  EXPECT(false, text);
  return failure;
}

void expect_words(const std::string& text, const Algorithm& algorithm, u32 rank, Kind kind) {
  const Failure failure = parse(text);
  EXPECT(failure.operation == message(algorithm.name, " ", collective_name(algorithm.collective)),
         text);
  EXPECT(failure.rank < 3 && failure.peer < 3 && failure.rank != failure.peer, text);
  EXPECT(failure.ms == 50 && failure.channel < 2 && failure.wanted > failure.seen, text);
  EXPECT(kind != Kind::kAbsent || failure.rank != rank, text);
}

int nthreads() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    (void)task;
    ++count;
  }
  return count;
}

u64 resident_bytes() {
  std::ifstream file("/proc/self/statm");
  u64 total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<u64>(sysconf(_SC_PAGESIZE));
}

}  // namespace

TEST(an_absent_rank_is_reported_by_the_call_and_the_next_call_works) {
  // Rank 0 has slots for all slices, so rank 2 is the only one that waits.
  FaultyWorld faulty(3, {Kind::kAbsent, 1}, with_timeout(500, 1));
  World& world = faulty.world;
  check_broadcast(world, 0, 600, "chain");  // 3 slices
  faulty.plan.launches = 1;
  EXPECT_TEXT(message_of<Error>([&] { check_broadcast(world, 0, 600, "chain"); }),
              "chain broadcast: rank 2 waited 500 ms for data from rank 1 on channel 0: wanted "
              "step 4, saw 3");
  check_broadcast(world, 0, 600, "chain");
  check_everything(world);
}

TEST(a_sender_without_credit_is_reported) {
  FaultyWorld faulty(2, {Kind::kAbsent, 1, 1}, with_timeout(50, 1));
  EXPECT_TEXT(message_of<Error>([&] { check_broadcast(faulty.world, 0, 5000, "chain"); }),
              "chain broadcast: rank 0 waited 50 ms for a credit from rank 1 on channel 0: wanted "
              "step 1, saw 0");
}

// A rank that is wrong about the size stops early, and who depends on it waits.
TEST(every_algorithm_survives_every_fault_of_every_rank) {
  for (u32 c = 0; c < kCollectives; ++c) {
    const auto collective = static_cast<Collective>(c);
    for (const Algorithm& algorithm : algorithms_of(collective)) {
      if (!algorithm.flag_ordered) continue;
      for (const Kind kind : {Kind::kAbsent, Kind::kLate, Kind::kWrong}) {
        for (u32 rank = 0; rank < 3; ++rank) {
          FaultyWorld faulty(3, {kind, rank, 0, 1}, with_timeout(50));
          WrappedBackend& backend = faulty.backend;
          World& world = faulty.world;
          eventually([&] { check_flag_ordered(world, collective, algorithm.name); });
          const std::string failure = message_of<Error>([&] {
            // A rank that nobody waits for is missed when what it should have freed runs out.
            for (int launch = 0; launch < 4; ++launch) {
              faulty.plan.launches = 1;
              run_flag_ordered(world, collective, algorithm.name);
              world.communicator.synchronize();
            }
          });
          // In LL a rank that comes late to take what it gets, or takes less, keeps nobody waiting.
          const bool unnoticed = kind != Kind::kAbsent && is_ll(algorithm.flag_algorithm) &&
                                 failure == "nothing was raised";
          if (!unnoticed) expect_words(failure, algorithm, rank, kind);
          eventually([&] { check_flag_ordered(world, collective, algorithm.name); });
          world.communicator.close();
          EXPECT(backend.allocations == 0, backend.allocations, " allocations after ", failure);
        }
      }
    }
  }
}

TEST(a_late_rank_finishes_on_retired_connections_while_new_calls_run) {
  FaultyWorld faulty(3, {Kind::kLate, 1, 1, 100}, with_timeout(50));
  WrappedBackend& backend = faulty.backend;
  World& world = faulty.world;
  std::vector<Bytes> memory(3, Bytes(600));  // outlives the late blocks
  const void* source[] = {memory[0].data()};
  const Segment segment[] = {{0, 600}};
  world.communicator.broadcast(0, source, segment, addresses(memory), world.streams, "chain");
  const int allocations = backend.allocations;
  // The failure is known, but the late blocks still refer to their connections: these are kept.
  const std::string text = message_of<Error>([&] { check_broadcast(world, 2, 3000, "chain"); });
  EXPECT(text.starts_with("chain broadcast: rank 2 waited 50 ms for data from rank 1 on channel "),
         text);
  EXPECT(backend.allocations == allocations, backend.allocations, " allocations, not ",
         allocations);
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(150);
  do {
    eventually([&] { check_broadcast(world, 2, 3000, "chain"); });
    eventually([&] { check_all_reduce(world, 600, DType::kFloat32, false, "ring"); });
  } while (std::chrono::steady_clock::now() < end);
  world.communicator.close();
  EXPECT(backend.allocations == 0, backend.allocations, " allocations were not released");
}

TEST(a_thousand_failures_leave_no_thread_and_no_memory_behind) {
  FaultyWorld faulty(3, {Kind::kAbsent, 1, 0, 1}, with_timeout(1));
  WrappedBackend& backend = faulty.backend;
  World& world = faulty.world;
  std::vector<Bytes> memory(3, Bytes(600));
  const void* source[] = {memory[0].data()};
  const Segment segment[] = {{0, 600}};
  const auto fail = [&](int count) {
    for (int i = 0; i < count; ++i) {
      faulty.plan.kind = i % 2 ? Kind::kLate : Kind::kAbsent;
      faulty.plan.launches = 1;
      const std::string text = message_of<Error>([&] {
        world.communicator.broadcast(0, source, segment, addresses(memory), world.streams, "chain");
        world.communicator.synchronize();
      });
      EXPECT(text.starts_with("chain broadcast: rank 2 waited 1 ms for data from rank 1"), text);
    }
    eventually([&] {
      check_broadcast(world, 0, 600, "chain");
      world.communicator.synchronize();  // the last late rank has left
    });
  };
  fail(50);
  const int threads = nthreads(), allocations = backend.allocations;
  [[maybe_unused]] const u64 resident = resident_bytes();
  fail(1000);
  EXPECT(nthreads() == threads, nthreads(), " threads, not ", threads);
  EXPECT(backend.allocations == allocations, backend.allocations, " allocations, not ",
         allocations);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they keep freed memory
  EXPECT(resident_bytes() < resident + (1 << 20), resident_bytes(), " bytes, not ", resident);
#endif
}

TEST(each_of_several_threads_gets_its_own_failure) {
  constexpr u32 kFailures = 6;
  FaultyWorld faulty(3, {Kind::kAbsent, 1, kFailures}, with_timeout(1000));
  World& world = faulty.world;
  std::atomic<u32> failures{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        try {
          check_broadcast(world, 0, 5003, "chain");
        } catch (const Error&) {
          ++failures;
        }
        check_broadcast(world, 0, 700, "push");
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT(failures == kFailures, failures.load(), " calls raised");
}

TEST_MAIN()
