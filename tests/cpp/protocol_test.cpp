// The flag-ordered bodies on threads: values are exact over many operations with rotating roots on
// one wiring, counters and flags wrap, and a rank that never comes is reported.
#include <chrono>

#include "random_operation.h"

using namespace pyparallel;
using namespace pyparallel::testing;

namespace {

// Counters that start at 0, just below the wrap of 64 bits and of 32, and just below what LL does
// every 2^31 operations.
constexpr u64 kFirstSteps[] = {0, ~u64{0} - 2, (u64{1} << 32) - 3, (u64{1} << 31) - 3};

// An operation on buffers of its own, filled with `fill` times the rank.
struct Operation {
  FlagArgs args;
  std::vector<std::vector<float>> inputs, outputs;

  Operation(Team& team, FlagAlgorithm algorithm, u32 root, u64 bytes, u64 slice_bytes,
            float fill = 1) {
    FlagShape shape = team.args().shape;
    shape.algorithm = algorithm;
    shape.root = root;
    shape.element_bytes = sizeof(float);
    shape.bytes = bytes;
    shape.slice_bytes = slice_bytes;
    args = team.prepare(shape);
    const u64 count = bytes / sizeof(float);
    for (u32 rank = 0; rank < shape.nranks; ++rank) {
      inputs.emplace_back(count, fill * static_cast<float>(rank + 1));
      outputs.emplace_back(count, -1.f);
      args.ranks[rank].input = reinterpret_cast<u8*>(inputs[rank].data());
      args.ranks[rank].output = reinterpret_cast<u8*>(outputs[rank].data());
    }
  }
};

}  // namespace

TEST(operations_of_all_kinds_on_one_wiring) {
  std::mt19937_64 random(11);
  for (u32 repeat = 0; repeat < 60; ++repeat) {
    const u32 nranks = 1 + random() % 6, nchannels = 1 + random() % 3, slots = 1u << random() % 4;
    const u32 nthreads = std::array{1u, 4u, 8u}[random() % 3];
    const u64 slot_bytes = (1 + random() % 5) * kUnit;
    Team team(nranks, nchannels, slots, slot_bytes, nthreads, kFirstSteps[repeat % 4]);
    for (u32 i = 0; i < 6; ++i) {
      const auto dtype = static_cast<DType>(random() % kDTypes);
      const bool right = with_element_type(dtype, [&]<class T>() {
        return run_random_operations<T, Fault::kNone>(team, 0, random, repeat % 3 == 0);
      });
      EXPECT(right, dtype_name(dtype), " ranks ", nranks, " channels ", nchannels, " slots ", slots,
             " of ", slot_bytes, " threads ", nthreads);
    }
  }
}

TEST(an_absent_rank_is_reported) {
  for (u32 absent = 0; absent < 3; ++absent) {
    for (u32 algorithm = 0; algorithm < kAlgorithms; ++algorithm) {
      for (u64 first_step : kFirstSteps) {
        Team team(3, 2, 2, 128, 4, first_step);
        team.args().timeout_ns = 50'000'000;
        // More slices than slots, and more operations than buffers of LL, so that somebody waits
        // for the absent rank whatever its place is.
        std::vector<Operation> operations;
        std::vector<FlagArgs> args;
        for (u32 i = 0; i < 4; ++i)
          operations.emplace_back(team, static_cast<FlagAlgorithm>(algorithm), 1, 4096, 128);
        for (const Operation& operation : operations) args.push_back(operation.args);
        const auto started = std::chrono::steady_clock::now();
        EXPECT(!team.run<float>(args, 7u & ~(1u << absent), 1, false), "nobody noticed that rank ",
               absent, " was absent");
        EXPECT(std::chrono::steady_clock::now() - started < std::chrono::seconds(20),
               "a wait was not bounded");
        const FailureRecord& failure = team.failure;
        EXPECT(team.abort_word == 1 && failure.claimed == 1 && failure.complete == 1,
               failure.complete);
        EXPECT(failure.rank < 3 && failure.rank != absent && failure.peer < 3 &&
                   failure.peer != failure.rank,
               "rank ", failure.rank, " waits for ", failure.peer);
        EXPECT(failure.channel < 2 && failure.waits_for_credit < 2, failure.channel);
        // LL sees flags of any age.
        const u64 behind = failure.wanted - failure.seen;
        EXPECT(
            is_ll(static_cast<FlagAlgorithm>(algorithm)) ? behind != 0 : behind >= 1 && behind <= 2,
            "wanted ", failure.wanted, " seen ", failure.seen);
      }
    }
  }
}

// With two ranks there is no doubt about who waits for whom.
TEST(the_record_names_the_wait) {
  for (bool ll : {false, true}) {
    for (bool sender_absent : {true, false}) {
      Team team(2, 1, 2, 128, 1, 5);
      team.args().timeout_ns = 20'000'000;
      // Eight slices, or three operations of one.
      const FlagAlgorithm algorithm =
          ll ? FlagAlgorithm::kLlBroadcast : FlagAlgorithm::kChainBroadcast;
      std::vector<Operation> operations;
      std::vector<FlagArgs> args;
      for (u32 i = 0; i < (ll ? 3 : 1); ++i) operations.emplace_back(team, algorithm, 0, 1024, 128);
      for (const Operation& operation : operations) args.push_back(operation.args);
      EXPECT(!team.run<float>(args, sender_absent ? 2 : 1, 1, false));
      const FailureRecord& failure = team.failure;
      // The receiver misses its first slice; the sender has filled two slots and misses the first
      // credit.
      EXPECT(failure.rank == (sender_absent ? 1 : 0) && failure.peer == (sender_absent ? 0 : 1),
             failure.rank);
      EXPECT(failure.waits_for_credit == (sender_absent ? 0 : 1), failure.waits_for_credit);
      EXPECT(failure.wanted == 6, "wanted ", failure.wanted);
      EXPECT(failure.seen == 5 || (ll && sender_absent), "seen ", failure.seen);
    }
  }
}

// A block that comes late, after the others have given up, leaves too: its word stays set.
TEST(an_abort_word_that_is_set_ends_waits) {
  for (const auto algorithm : {FlagAlgorithm::kChainBroadcast, FlagAlgorithm::kLlBroadcast}) {
    Team team(2, 1, 2, 128, 4, 0);
    team.abort_word = 1;
    const Operation operation(team, algorithm, 0, 1024, 128);
    EXPECT(!team.run<float>({&operation.args, 1}, 2, 1, false));
    EXPECT(team.failure.claimed == 0, "an aborted wait is not the one that failed");
  }
}

namespace {

// A large LL message, then 2^32 operations of which only the ones around the wrap are run, all of
// them small. Whether a receiver then takes the words of the first for those of a large message of
// which only the first word was sent.
template <Fault F>
bool takes_old_words() {
  constexpr u64 kFirst = (u64{1} << 31) - 2, kWrap = u64{1} << 32;
  Team team(2, 1, 2, 128, 4, kFirst);
  const Operation large(team, FlagAlgorithm::kLlBroadcast, 0, 4096, 128, 1);
  const Operation small(team, FlagAlgorithm::kLlBroadcast, 0, 4, 128, 2);
  EXPECT((team.run<float, F>({&large.args, 1}, 3, 1, false)) && large.outputs[1].back() == 1);
  team.set_steps(kWrap - 1);
  for (u32 i = 0; i < 3; ++i) EXPECT((team.run<float, F>({&small.args, 1}, 3, 1, false)));
  team.set_steps(kFirst + kWrap);
  Operation partly_sent(team, FlagAlgorithm::kLlBroadcast, 0, 4096, 128, 3);
  partly_sent.args.timeout_ns = 20'000'000;
  EXPECT((team.run<float, F>({&small.args, 1}, 1, 1, false)));
  return team.run<float, F>({&partly_sent.args, 1}, 2, 1, false);
}

}  // namespace

TEST(old_words_do_not_pass_for_new_when_flags_repeat) {
  EXPECT(takes_old_words<Fault::kLlNoRefresh>(), "the test would not notice");
  EXPECT(!takes_old_words<Fault::kNone>());
}

// Cached credits spare polls, but allow no more than polls would.
TEST(what_a_flag_has_shown_is_not_polled_again) {
  Team team(2, 1, 8, 128, 1, 0);
  const Operation operation(team, FlagAlgorithm::kChainBroadcast, 0, 1024, 128);
  EXPECT(team.run<float>({&operation.args, 1}, 3, 1, false));
  const SendEnd& send = operation.args.ranks[0].sends[1];
  const RecvEnd& recv = operation.args.ranks[1].recvs[0];
  // Eight slices fit into the slots: the sender looked at no credit.
  EXPECT(send.sent == 8 && send.seen == 0, "sent ", send.sent, " seen ", send.seen);
  EXPECT(recv.received == 8 && recv.seen == 8, "received ", recv.received, " seen ", recv.seen);
  EXPECT(team.run<float>({&operation.args, 1}, 3, 1, false));
  EXPECT(send.sent == 16 && reached(send.seen, 8) && reached(16, send.seen), "seen ", send.seen);
}

TEST_MAIN()
