// Runs event-ordered plans: gives places their addresses and hands each step to the backend.
#pragma once
#include <vector>

#include "backend/backend.h"
#include "schedule/event_plan.h"

namespace pyparallel {

// The caller's memory that a plan's places refer to.
struct PlanBuffers {
  std::span<const void* const> inputs;  // [rank * rank_stride + segment]
  u64 rank_stride;                      // 0 where only one rank has inputs
  std::span<void* const> outputs;       // [rank]
};

class PlanRunner {
 public:
  PlanRunner(Backend& backend, u32 nranks, u64 stage_slot_bytes);
  ~PlanRunner();  // only after all work that uses the stages has finished
  PlanRunner(const PlanRunner&) = delete;
  PlanRunner& operator=(const PlanRunner&) = delete;

  Staging staging() const { return {backend_.direct(), stage_slot_bytes_}; }

  // Launches everything and leaves nothing that refers to `plan` or `buffers`.
  void run(const EventPlan& plan, const PlanBuffers& buffers, DType dtype,
           std::span<const StreamHandle> streams);

 private:
  using Stages = std::vector<void*>;  // one region a rank; empty until a plan needs them

  const Stages& stages_of(const EventPlan& plan);
  void resolve(const EventPlan& plan, const PlanBuffers& buffers, DType dtype);

  Backend& backend_;
  const u32 nranks_;
  const u64 stage_slot_bytes_;
  // Apart, because where not every pair of devices can be mapped, stages that only neighbours on
  // the ring touch lie on devices, and those that all touch lie in host memory.
  Stages neighbour_stages_, shared_stages_;
  // Of the plan that is running; members so that their memory is allocated once.
  std::vector<void*> pointers_;
  std::vector<Task> tasks_;
};

}  // namespace pyparallel
