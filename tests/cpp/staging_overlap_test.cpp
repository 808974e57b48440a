// Transfers through stages in host memory are double-buffered: while a window is stored into
// stages, the windows before it are loaded out of them.
#include <set>

#include "schedule/event_plan.h"
#include "testing.h"

using namespace pyparallel;

namespace {

constexpr u64 kSlot = 4096, kWindows = 12;
constexpr Staging kStaged{false, kSlot};

// What a rank does in a step: stores from its own memory into a stage, or loads from a stage into
// its own memory.
struct Traffic {
  bool stores = false, loads = false;
};

Traffic traffic(const EventPlan& plan, u32 step) {
  Traffic seen;
  for (const Move& move : plan.moves) {
    if (move.step != step) continue;
    const Place& source = plan.places[move.first_place];
    const Place& destination = plan.places[move.first_place + move.nsources];
    seen.stores |= source.memory == Memory::kInput && destination.memory == Memory::kStage;
    seen.loads |= source.memory == Memory::kStage && destination.memory == Memory::kOutput;
  }
  return seen;
}

// Slots of stages that moves of one step write and that others of it read.
void check_slots(const char* name, const EventPlan& plan, u32 step) {
  std::set<std::pair<u32, u64>> written, read;
  for (const Move& move : plan.moves) {
    if (move.step != step) continue;
    for (u32 k = 0; k < move.nsources + move.ndestinations; ++k) {
      const Place& place = plan.places[move.first_place + k];
      if (place.memory != Memory::kStage) continue;
      (k < move.nsources ? read : written).insert({place.rank, place.offset / kSlot});
    }
  }
  for (const auto& slot : written)
    EXPECT(!read.contains(slot), name, ": step ", step, " reads and writes slot ", slot.second,
           " of rank ", slot.first);
}

// `lead`: steps before the first window comes out of the stages.
void check(const char* name, const EventPlan& plan, u32 lead) {
  EXPECT(plan.nsteps == kWindows + lead, name, ": ", plan.nsteps, " steps for ", kWindows,
         " windows");
  for (u32 step = 0; step < plan.nsteps; ++step) {
    const Traffic seen = traffic(plan, step);
    EXPECT(seen.stores == (step < kWindows), name, ", step ", step);
    EXPECT(seen.loads == (step >= lead), name, ", step ", step);
    check_slots(name, plan, step);
  }
}

}  // namespace

TEST(windows_go_in_while_earlier_ones_come_out) {
  const Segment whole{0, kWindows * kSlot};
  for (const u32 n : {2u, 4u, 8u}) {
    const u32 everybody = (u32{1} << n) - 1;
    check("push", plan_broadcast(EventAlgorithm::kPush, n, 0, {&whole, 1}, kStaged), 1);
    check("owner",
          plan_reduce_add(EventAlgorithm::kOwner, n, 0, {&whole, 1}, {&everybody, 1}, 4, kStaged),
          2);
    check("two_shot", plan_all_reduce(EventAlgorithm::kOwner, n, whole.bytes, 4, kStaged), 2);
    std::vector<Share> shares;
    for (u32 rank = 0; rank < n; ++rank) shares.push_back({rank * whole.bytes, whole.bytes});
    check("scatter", plan_scatter(n, 0, 1, n * whole.bytes, shares, 1, kStaged), 1);
    check("gather", plan_gather(n, 0, 1, n * whole.bytes, shares, 1, kStaged), 1);
  }
}

TEST_MAIN()
