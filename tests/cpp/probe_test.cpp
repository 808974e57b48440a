// The trial of a pair of devices: every fault gets its verdict, every step counts, and transfers
// are right whatever the pairs do.
#include "probe.h"

#include <set>

#include "communicator_checks.h"
#include "simulated_peers.h"

using namespace pyparallel;
using namespace pyparallel::testing;

namespace {

using Policy = PairVerdicts::Policy;

// Counts calls and spoils one of them.
class SpoiledPair : public SimulatedPair {
 public:
  enum class Spoil { kNothing, kWrong, kUnfinished };
  SpoiledPair(Spoil spoil, int call)
      : SimulatedPair(PairFault::kNone), spoil_(spoil), call_(call) {}

  Outcome fill(Place kernel, Place memory, u32 seed) override {
    return spoiled(SimulatedPair::fill(kernel, memory, seed), false);
  }
  Outcome check(Place kernel, Place memory, u32 seed) override {
    return spoiled(SimulatedPair::check(kernel, memory, seed), true);
  }
  Outcome copy(Place source, Place destination) override {
    return spoiled(SimulatedPair::copy(source, destination), false);
  }
  Outcome litmus(u32 seed) override { return spoiled(SimulatedPair::litmus(seed), true); }

  int calls = 0;
  bool checked = false;  // the spoiled call was one that compares

 private:
  Outcome spoiled(Outcome outcome, bool compares) {
    if (calls++ != call_) return outcome;
    checked = compares;
    if (spoil_ == Spoil::kUnfinished) outcome.finished = false;
    if (spoil_ == Spoil::kWrong && compares) outcome = {true, 1, false, 7, 1, 0};
    return outcome;
  }

  const Spoil spoil_;
  const int call_;
};

constexpr PairFault kDataFaults[] = {PairFault::kNoAccess,      PairFault::kDropsStores,
                                     PairFault::kDropsRewrites, PairFault::kStaleLoads,
                                     PairFault::kDropsCopies,   PairFault::kFlagBeforeData};

World simulated(u32 n, SimulatedPeersBackend*& backend, PairFaults faults,
                Policy policy = Policy::kAuto) {
  std::vector<u32> devices;
  for (u32 rank = 0; rank < n; ++rank) devices.push_back(rank);
  auto owned = std::make_unique<SimulatedPeersBackend>(devices, std::move(faults), policy);
  backend = owned.get();
  return World(n, std::move(owned));
}

}  // namespace

TEST(a_pair_that_works_may_be_used) {
  SimulatedPair pair(PairFault::kNone);
  EXPECT(try_pair(pair).empty());
  EXPECT(!pair.gave_up);
}

TEST(every_fault_gets_its_verdict) {
  const std::pair<PairFault, const char*> verdicts[] = {
      {PairFault::kNoAccess, "the driver offers no peer access"},
      {PairFault::kDropsStores, "word 0 of what it stored there should be "},
      {PairFault::kDropsRewrites, "word 0 of what it stored there should be "},
      {PairFault::kStaleLoads, "word 0 of what it loaded should be "},
      {PairFault::kDropsCopies, "word 0 of what was copied to it should be "},
      {PairFault::kFlagBeforeData, "word 512 of data behind a flag should be "},
      {PairFault::kSlowStores, "stores move 2048 MB/s, the way through host memory 10240"},
      {PairFault::kSlowLoads, "loads move 2048 MB/s, the way through host memory 10240"},
  };
  for (const auto& [fault, text] : verdicts) {
    SimulatedPair pair(fault);
    const std::string verdict = try_pair(pair);
    EXPECT(verdict.starts_with(text), "'", verdict, "', not '", text, "'");
    EXPECT(pair.gave_up == (fault != PairFault::kNoAccess));
  }
}

TEST(no_comparison_is_passed_over_and_nothing_follows_work_that_hangs) {
  SpoiledPair whole(SpoiledPair::Spoil::kNothing, -1);
  EXPECT(try_pair(whole).empty());
  int comparisons = 0;
  for (int call = 0; call < whole.calls; ++call) {
    SpoiledPair stuck(SpoiledPair::Spoil::kUnfinished, call);
    const std::string hung = try_pair(stuck);
    EXPECT(hung.ends_with(" did not finish"), hung);
    EXPECT(stuck.calls == call + 1, "a call after work that hangs");
    SpoiledPair wrong(SpoiledPair::Spoil::kWrong, call);
    const std::string verdict = try_pair(wrong);
    EXPECT(verdict.empty() != wrong.checked, "call ", call, ": ", verdict);
    comparisons += wrong.checked;
    if (wrong.checked) EXPECT(verdict.find("should be 1, but is 0") != verdict.npos, verdict);
  }
  EXPECT(comparisons >= 12, comparisons, " comparisons of ", whole.calls, " calls");
}

TEST(policies_are_checked) {
  EXPECT(PairVerdicts::parse_policy(nullptr) == Policy::kAuto);
  EXPECT(PairVerdicts::parse_policy("") == Policy::kAuto);
  EXPECT(PairVerdicts::parse_policy("off") == Policy::kOff);
  EXPECT(PairVerdicts::parse_policy("force") == Policy::kForce);
  const std::string text = message_of<ArgumentError>([] { PairVerdicts::parse_policy("on"); });
  EXPECT(text == "PYPARALLEL_P2P must be auto, off or force, but is on.", text);
}

TEST(each_pair_is_tried_once_and_the_first_failure_is_told) {
  std::vector<std::pair<int, int>> tried;
  std::vector<std::string> warnings;
  const PairFaults faults{{{0, 1}, PairFault::kNoAccess}, {{1, 0}, PairFault::kDropsStores}};
  PairVerdicts verdicts(
      [&](int from, int to) {
        tried.push_back({from, to});
        return std::make_unique<SimulatedPair>(fault_of(faults, from, to));
      },
      [&](const std::string& text) { warnings.push_back(text); });
  EXPECT(!verdicts.usable(0, 1, Policy::kOff) && tried.empty() && warnings.empty());
  for (int round = 0; round < 3; ++round) {
    EXPECT(!verdicts.usable(0, 1, Policy::kAuto));
    EXPECT(!verdicts.usable(1, 0, Policy::kAuto));
    EXPECT(verdicts.usable(0, 2, Policy::kAuto));
  }
  EXPECT(tried == (std::vector<std::pair<int, int>>{{0, 1}, {1, 0}, {0, 2}}));
  EXPECT(warnings ==
             std::vector<std::string>{
                 "pyparallel: GPU 0 cannot use the memory of GPU 1 (the driver offers no "
                 "peer access); transfers between them go through host memory. "
                 "PYPARALLEL_P2P=off silences this."},
         warnings.size());
  const std::string forced = message_of<Error>([&] { verdicts.usable(0, 1, Policy::kForce); });
  EXPECT(forced ==
             "PYPARALLEL_P2P=force, but GPU 0 cannot use the memory of GPU 1 (the driver "
             "offers no peer access).",
         forced);
}

// The reason for the trial, and that the simulation can fail at all.
TEST(a_driver_that_is_believed_gives_wrong_data) {
  SimulatedPeersBackend* backend = nullptr;
  World world = simulated(3, backend, {{{0, 1}, PairFault::kDropsStores}});
  backend->believes = true;
  std::vector<Bytes> memory(3, Bytes(64, 1));
  memory[0] = Bytes(64, 2);
  const void* source[] = {memory[0].data()};
  const Segment segment[] = {{0, 64}};
  world.communicator.broadcast(0, source, segment, addresses(memory), world.streams, "push");
  EXPECT(memory[2] == memory[0] && memory[1] != memory[0]);
}

TEST(transfers_are_right_whatever_a_pair_does) {
  for (const PairFault fault : kDataFaults) {
    for (const auto& [from, to] : {std::pair{0, 1}, std::pair{2, 0}}) {
      SimulatedPeersBackend* backend = nullptr;
      World world = simulated(3, backend, {{{from, to}, fault}});
      for (u32 root = 0; root < 3; ++root) {
        check_broadcast(world, root, 5003, "auto");
        check_broadcast(world, root, 5003, "chain");
        check_reduce_add(world, root, 1003, DType::kFloat32, "auto");
        check_scatter_and_gather(world, root, 40, 0);
      }
      check_all_reduce(world, 1003, DType::kFloat32, false, "auto");
      EXPECT(backend->warnings.size() == 1, backend->warnings.size());
      EXPECT(backend->warnings[0].starts_with(
                 message("pyparallel: GPU ", from, " cannot use the memory of GPU ", to, " (")),
             backend->warnings[0]);
      EXPECT(backend->in_host_memory > 0 && backend->in_device_memory > 0,
             "only what the pair touches is in host memory");
      EXPECT(std::set(backend->tried.begin(), backend->tried.end()).size() == backend->tried.size(),
             "a pair was tried twice");
    }
  }
}

TEST(policy_off_tries_nothing_and_force_raises_before_anything_runs) {
  SimulatedPeersBackend* backend = nullptr;
  World off = simulated(3, backend, {}, Policy::kOff);
  check_broadcast(off, 0, 5003, "auto");
  EXPECT(backend->tried.empty() && backend->warnings.empty() && backend->in_host_memory > 0);
  World forced = simulated(3, backend, {{{0, 1}, PairFault::kDropsStores}}, Policy::kForce);
  const std::string text = message_of<Error>([&] { check_broadcast(forced, 0, 5003, "auto"); });
  EXPECT(text.starts_with("PYPARALLEL_P2P=force, but GPU 0 cannot use the memory of GPU 1 (word"),
         text);
  EXPECT(backend->launches == 0, backend->launches);
}

TEST(only_pairs_that_an_operation_needs_are_tried) {
  SimulatedPeersBackend* backend = nullptr;
  World world = simulated(4, backend, {});
  EXPECT(backend->tried.empty(), "nothing is tried before it is used");
  check_broadcast(world, 0, 5003, "chain");
  const std::set<std::pair<int, int>> tried(backend->tried.begin(), backend->tried.end());
  EXPECT(tried == (std::set<std::pair<int, int>>{{0, 1}, {1, 0}, {1, 2}, {2, 1}, {2, 3}, {3, 2}}));
}

TEST(above_the_peer_limit_no_pair_but_neighbours_is_tried) {
  constexpr u32 kRanks = 12;
  SimulatedPeersBackend* backend = nullptr;
  World world = simulated(kRanks, backend, {});
  check_broadcast(world, 3, 5003, "auto");
  check_broadcast(world, 3, 5003, "chain");
  check_reduce_add(world, 3, 1003, DType::kFloat32, "chain");
  check_all_reduce(world, 1003, DType::kFloat32, false, "ring");
  EXPECT(!backend->tried.empty());
  for (const auto& [from, to] : backend->tried) {
    const u32 distance = static_cast<u32>(to - from + static_cast<int>(kRanks)) % kRanks;
    EXPECT(distance == 1 || distance == kRanks - 1, from, " -> ", to);
  }
}

TEST_MAIN()
