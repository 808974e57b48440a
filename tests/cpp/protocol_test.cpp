// The flag-ordered body on threads: values are exact over many operations with rotating roots on
// one wiring, counters wrap, and a rank that never comes is reported.
#include <chrono>

#include "device/element_type.h"
#include "random_operation.h"

using namespace pyparallel;
using namespace pyparallel::testing;

namespace {

// Counters that start just below the wrap of 64 bits, and at 0.
constexpr u64 kFirstSteps[] = {0, ~u64{0} - 2};

}  // namespace

TEST(operations_of_all_kinds_on_one_wiring) {
  std::mt19937_64 random(11);
  for (u32 repeat = 0; repeat < 40; ++repeat) {
    const u32 nranks = 1 + random() % 6, nchannels = 1 + random() % 3, slots = 1u << random() % 4;
    const u32 nthreads = std::array{1u, 4u, 8u}[random() % 3];
    const u64 slot_bytes = (1 + random() % 5) * kUnit;
    Team team(nranks, nchannels, slots, slot_bytes, nthreads, kFirstSteps[repeat % 2]);
    for (u32 i = 0; i < 12; ++i) {
      const auto dtype = static_cast<DType>(random() % kDTypes);
      const bool right = with_element_type(dtype, [&]<class T>() {
        return run_random_operation<T, Fault::kNone>(team, 6000, random, repeat % 3 == 0);
      });
      EXPECT(right, dtype_name(dtype), " algorithm ", static_cast<u32>(team.args().shape.algorithm),
             " ranks ", nranks, " root ", team.args().shape.root, " channels ", nchannels,
             " slots ", slots, " threads ", nthreads, " bytes ", team.args().shape.bytes, " slice ",
             team.args().shape.slice_bytes, " of ", slot_bytes);
    }
  }
}

TEST(an_absent_rank_is_reported) {
  std::mt19937_64 random(12);
  for (u32 absent = 0; absent < 3; ++absent) {
    for (auto algorithm : {FlagAlgorithm::kChainBroadcast, FlagAlgorithm::kChainReduce,
                           FlagAlgorithm::kRingAllReduce}) {
      for (u64 first_step : kFirstSteps) {
        Team team(3, 2, 2, 128, 4, first_step);
        RandomOperation<float> operation(team, algorithm, 64, random);
        FlagShape& shape = team.args().shape;
        // More slices than slots, so that somebody waits for the absent rank whatever its place is.
        std::vector<float> input(1024), output(1024);
        shape.bytes = 4096;
        shape.slice_bytes = 128;
        shape.root = 1;
        std::vector<std::vector<float>> buffers(6, input);
        for (u32 rank = 0; rank < 3; ++rank) {
          team.args().ranks[rank].input = reinterpret_cast<u8*>(buffers[rank].data());
          team.args().ranks[rank].output = reinterpret_cast<u8*>(buffers[3 + rank].data());
        }
        team.args().timeout_ns = 50'000'000;
        const auto started = std::chrono::steady_clock::now();
        const u32 ranks = 7u & ~(1u << absent);
        const bool ok = algorithm == FlagAlgorithm::kChainBroadcast
                            ? team.run<CopyOnly, Fault::kNone>(ranks, 1, false)
                            : team.run<float, Fault::kNone>(ranks, 1, false);
        EXPECT(!ok, "nobody noticed that rank ", absent, " was absent");
        EXPECT(std::chrono::steady_clock::now() - started < std::chrono::seconds(20),
               "a wait was not bounded");
        const FailureRecord& failure = team.failure;
        EXPECT(team.abort_word == 1 && failure.claimed == 1 && failure.complete == 1,
               failure.complete);
        EXPECT(failure.rank < 3 && failure.rank != absent && failure.peer < 3 &&
                   failure.peer != failure.rank,
               "rank ", failure.rank, " waits for ", failure.peer);
        EXPECT(failure.channel < 2 && failure.waits_for_credit < 2, failure.channel);
        EXPECT(!reached(failure.seen, failure.wanted) && failure.wanted - failure.seen <= 2,
               "wanted ", failure.wanted, " seen ", failure.seen);
      }
    }
  }
}

// With two ranks there is no doubt about who waits for whom.
TEST(the_record_names_the_wait) {
  for (bool sender_absent : {true, false}) {
    Team team(2, 1, 2, 128, 1, 5);
    std::vector<u8> bytes(1024);
    team.args().shape = {FlagAlgorithm::kChainBroadcast, 2, 0, 1, 2, 1, 1024, 128};
    for (u32 rank = 0; rank < 2; ++rank) {
      team.args().ranks[rank].input = team.args().ranks[rank].output = bytes.data();
    }
    team.args().timeout_ns = 20'000'000;
    EXPECT((!team.run<CopyOnly, Fault::kNone>(sender_absent ? 2 : 1, 1, false)));
    const FailureRecord& failure = team.failure;
    // The receiver misses its first slice; the sender has filled two slots and misses the first
    // credit.
    EXPECT(failure.rank == (sender_absent ? 1 : 0) && failure.peer == (sender_absent ? 0 : 1),
           failure.rank);
    EXPECT(failure.waits_for_credit == (sender_absent ? 0 : 1), failure.waits_for_credit);
    EXPECT(failure.wanted == 6 && failure.seen == 5, "wanted ", failure.wanted, " seen ",
           failure.seen);
  }
}

// A block that comes late, after the others have given up, leaves too: its word stays set.
TEST(an_abort_word_that_is_set_ends_waits) {
  Team team(2, 1, 2, 128, 4, 0);
  std::vector<u8> bytes(1024);
  team.args().shape = {FlagAlgorithm::kChainBroadcast, 2, 0, 1, 2, 1, 1024, 128};
  for (u32 rank = 0; rank < 2; ++rank)
    team.args().ranks[rank].input = team.args().ranks[rank].output = bytes.data();
  team.abort_word = 1;
  EXPECT((!team.run<CopyOnly, Fault::kNone>(2, 1, false)));
  EXPECT(team.failure.claimed == 0, "an aborted wait is not the one that failed");
}

TEST_MAIN()
