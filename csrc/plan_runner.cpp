// From places to pointers, and from steps to launches.
#include "plan_runner.h"

#include <algorithm>
#include <array>

#include "launch_group.h"

namespace pyparallel {
namespace {

Task task_of(const Move& move, void* const* places, DType dtype) {
  return {
      places,         places + move.nsources, move.nsources,          move.ndestinations, move.rows,
      move.row_bytes, move.source_pitch,      move.destination_pitch, move.sum,           dtype};
}

}  // namespace

PlanRunner::PlanRunner(Backend& backend, u32 nranks, u64 stage_slot_bytes)
    : backend_(backend), nranks_(nranks), stage_slot_bytes_(stage_slot_bytes) {}

PlanRunner::~PlanRunner() {
  for (const Stages* stages : {&neighbour_stages_, &shared_stages_}) {
    for (u32 rank = 0; rank < stages->size(); ++rank) backend_.release(rank, (*stages)[rank]);
  }
}

const PlanRunner::Stages& PlanRunner::stages_of(const EventPlan& plan) {
  if (!plan.staged) return shared_stages_;  // nobody looks
  const std::array<u32, kMaxRanks> users = stage_users(plan);
  const auto neighbours = [this](u32 rank) {
    return RankSet{1} << (rank + 1) % nranks_ | RankSet{1} << (rank + nranks_ - 1) % nranks_;
  };
  RankSet used = 0, strangers = 0;
  for (u32 rank = 0; rank < nranks_; ++rank) {
    used |= users[rank];
    strangers |= users[rank] & ~neighbours(rank);
  }
  Stages& stages = strangers ? shared_stages_ : neighbour_stages_;
  while (used && stages.size() < nranks_) {
    const auto rank = static_cast<u32>(stages.size());
    stages.push_back(backend_.allocate(rank, stage_bytes(staging()),
                                       strangers ? all_ranks(nranks_) : neighbours(rank)));
  }
  return stages;
}

// With thousands of moves this takes as long as moving 100 KB, during which no other core works.
void PlanRunner::resolve(const EventPlan& plan, const PlanBuffers& buffers, DType dtype) {
  const Stages& stages = stages_of(plan);
  std::array<u8*, kMaxRanks> outputs{}, stage_starts{};
  for (u32 rank = 0; rank < nranks_; ++rank) {
    outputs[rank] = static_cast<u8*>(buffers.outputs[rank]);
    if (plan.staged) stage_starts[rank] = static_cast<u8*>(stages[rank]);
  }
  const auto address = [&](const Place& place) -> void* {
    if (place.memory == Memory::kOutput) return outputs[place.rank] + place.offset;
    if (place.memory == Memory::kStage) return stage_starts[place.rank] + place.offset;
    // Plans never write to an input: it appears among sources only.
    const void* input = buffers.inputs[place.rank * buffers.rank_stride + place.segment];
    return static_cast<u8*>(const_cast<void*>(input)) + place.offset;
  };
  pointers_.resize(plan.places.size());
  std::transform(plan.places.begin(), plan.places.end(), pointers_.begin(), address);
  tasks_.resize(plan.moves.size());
  std::transform(plan.moves.begin(), plan.moves.end(), tasks_.begin(), [&](const Move& move) {
    return task_of(move, pointers_.data() + move.first_place, dtype);
  });
}

void PlanRunner::run(const EventPlan& plan, const PlanBuffers& buffers, DType dtype,
                     std::span<const StreamHandle> streams) {
  if (plan.moves.empty()) return;
  resolve(plan, buffers, dtype);
  LaunchGroup group(backend_, streams);
  for (size_t i = 0; i < tasks_.size();) {
    const Move& first = plan.moves[i];
    if (i != 0 && first.step != plan.moves[i - 1].step) backend_.barrier();
    if (first.engine) {
      backend_.copy(first.executor, tasks_[i++]);
      continue;
    }
    // Equal executors next to each other make one launch of each rank's share of a step, copies of
    // its engine aside.
    size_t end = i + 1;
    while (end < tasks_.size() && !plan.moves[end].engine && plan.moves[end].step == first.step &&
           plan.moves[end].executor == first.executor) {
      ++end;
    }
    backend_.launch(first.executor, std::span<const Task>(tasks_).subspan(i, end - i));
    i = end;
  }
  group.end();
}

}  // namespace pyparallel
