// Random operations for the thread sanitizer, which alone sees a missing release or acquire on x86.
// Built again with a planted fault (PP_TEST_FAULT), it must find it: by a report of the sanitizer,
// or by a wrong value.
#include "random_operation.h"

#ifndef PP_TEST_FAULT
#define PP_TEST_FAULT kNone
#endif

using namespace pyparallel;
using namespace pyparallel::testing;

namespace {

constexpr u32 kOperations = 8;
constexpr auto kDuration = std::chrono::seconds(8);

}  // namespace

TEST(blocks_of_several_threads) {
  std::mt19937_64 random(21);
  const auto end = std::chrono::steady_clock::now() + kDuration;
  u32 operations = 0;
  while (std::chrono::steady_clock::now() < end) {
    const u32 nranks = 2 + random() % 3, nchannels = 1 + random() % 2, slots = 1u << random() % 3;
    const u32 nthreads = std::array{1u, 4u, 8u}[random() % 3];
    Team team(nranks, nchannels, slots, (1 + random() % 4) * kUnit, nthreads,
              random() % 2 ? 0 : ~u64{0} - 2);
    for (u32 i = 0; i < kOperations; ++i, ++operations) {
      EXPECT((run_random_operation<float, Fault::PP_TEST_FAULT>(team, 6000, random, i % 2)),
             "wrong value after ", operations, " operations");
    }
  }
  std::printf("%u operations\n", operations);
}

TEST_MAIN()
