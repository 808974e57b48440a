// Random operations for the thread sanitizer, which alone sees a missing release or acquire on x86.
// Built again with a planted fault (PP_TEST_FAULT), it must find it: by a report of the sanitizer,
// by a wrong value, or by a wait that expires. PP_TEST_ALGORITHM is the first of the algorithms.
#include "random_operation.h"

#ifndef PP_TEST_FAULT
#define PP_TEST_FAULT kNone
#endif
#ifndef PP_TEST_ALGORITHM
#define PP_TEST_ALGORITHM kChainBroadcast
#endif

using namespace pyparallel;
using namespace pyparallel::testing;

namespace {

constexpr u32 kBatches = 4;
constexpr auto kDuration = std::chrono::seconds(8);
constexpr u64 kFaultyTimeoutNs = 1'000'000'000;

// At 0, just below the wrap of counters, and just below what LL does every 2^31 operations.
constexpr u64 kFirstSteps[] = {0, ~u64{0} - 2, (u64{1} << 31) - 5};

}  // namespace

TEST(blocks_of_several_threads) {
  std::mt19937_64 random(21);
  const auto end = std::chrono::steady_clock::now() + kDuration;
  u32 batches = 0;
  while (std::chrono::steady_clock::now() < end) {
    const u32 nranks = 2 + random() % 3, nchannels = 1 + random() % 2, slots = 1u << random() % 3;
    const u32 nthreads = std::array{1u, 4u, 8u}[random() % 3];
    Team team(nranks, nchannels, slots, (1 + random() % 4) * kUnit, nthreads,
              kFirstSteps[random() % 3]);
    if (Fault::PP_TEST_FAULT != Fault::kNone) team.args().timeout_ns = kFaultyTimeoutNs;
    for (u32 i = 0; i < kBatches; ++i, ++batches) {
      EXPECT((run_random_operations<float, Fault::PP_TEST_FAULT>(
                 team, static_cast<u32>(FlagAlgorithm::PP_TEST_ALGORITHM), random, i % 2)),
             team.abort_word ? "wait expired" : "wrong value", " after ", batches, " batches");
    }
  }
  std::printf("%u batches\n", batches);
}

TEST_MAIN()
