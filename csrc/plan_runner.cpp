// From places to pointers, and from steps to launches.
#include "plan_runner.h"

#include <algorithm>

namespace pyparallel {

PlanRunner::PlanRunner(Backend& backend, u32 nranks, u64 stage_slot_bytes)
    : backend_(backend), nranks_(nranks), stage_slot_bytes_(stage_slot_bytes) {}

PlanRunner::~PlanRunner() {
  for (u32 rank = 0; rank < stages_.size(); ++rank) backend_.release(rank, stages_[rank]);
}

void* PlanRunner::address(const Place& place, const PlanBuffers& buffers) {
  u8* base = nullptr;
  switch (place.memory) {
    case Memory::kInput:
      // Plans never write to an input: it appears among sources only.
      base = static_cast<u8*>(
          const_cast<void*>(buffers.inputs[place.rank * buffers.rank_stride + place.segment]));
      break;
    case Memory::kOutput:
      base = static_cast<u8*>(buffers.outputs[place.rank]);
      break;
    case Memory::kStage:
      while (stages_.size() < nranks_) {
        const auto rank = static_cast<u32>(stages_.size());
        stages_.push_back(backend_.allocate(rank, stage_bytes(staging()), all_ranks(nranks_)));
      }
      base = static_cast<u8*>(stages_[place.rank]);
      break;
  }
  return base + place.offset;
}

void PlanRunner::run(EventPlan& plan, const PlanBuffers& buffers, DType dtype,
                     std::span<const StreamHandle> streams) {
  if (plan.moves.empty()) return;
  // Equal executors next to each other make one launch of each rank's share of a step.
  const auto in_order = [](const Move& a, const Move& b) {
    return a.step != b.step ? a.step < b.step : a.executor < b.executor;
  };
  if (!std::is_sorted(plan.moves.begin(), plan.moves.end(), in_order)) {
    std::stable_sort(plan.moves.begin(), plan.moves.end(), in_order);
  }
  pointers_.clear();
  for (const Place& place : plan.places) pointers_.push_back(address(place, buffers));
  tasks_.clear();
  for (const Move& move : plan.moves) {
    void* const* places = pointers_.data() + move.first_place;
    tasks_.push_back({places, places + move.nsources, move.nsources, move.ndestinations, move.rows,
                      move.row_bytes, move.source_pitch, move.destination_pitch, move.sum, dtype});
  }
  backend_.begin(streams);
  for (size_t i = 0; i < tasks_.size();) {
    const Move& first = plan.moves[i];
    if (i != 0 && first.step != plan.moves[i - 1].step) backend_.barrier();
    size_t end = i + 1;
    while (end < tasks_.size() && plan.moves[end].step == first.step &&
           plan.moves[end].executor == first.executor) {
      ++end;
    }
    backend_.launch(first.executor, std::span<const Task>(tasks_).subspan(i, end - i));
    i = end;
  }
  backend_.end(streams);
}

}  // namespace pyparallel
