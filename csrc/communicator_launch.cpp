// The launch path of the communicator: running work, raising what failed, closing.
#include <algorithm>

#include "backend/host/communication_thread.h"
#include "check.h"
#include "communicator.h"
#include "launch_group.h"
#include "launch_lock.h"

namespace pyparallel {

void Communicator::check_open() const { PP_CHECK(!closed(), "the communicator is closed"); }

const Algorithm& Communicator::choose(Collective collective, u64 bytes, u32 element_bytes,
                                      bool one_piece, std::span<const StreamHandle> streams,
                                      std::string_view requested) const {
  const bool may_spin = backend_->max_channels() > 0 && !backend_->capturing(streams);
  const Algorithm& chosen =
      selection_.choose({collective, bytes, element_bytes, one_piece, may_spin}, requested);
  PP_CHECK_ARG(bytes <= chosen.max_bytes, collective_name(collective), ": ", chosen.name,
               " carries at most ", chosen.max_bytes, " bytes, not ", bytes);
  return chosen;
}

std::string Communicator::describe_selection() const {
  return message(nranks_, " ranks on ", backend_->name(), " (", fabric_name(backend_->fabric()),
                 ")\n", selection_.describe(backend_->max_channels() > 0));
}

void Communicator::run_plan(const EventPlan& plan, const PlanBuffers& buffers, DType dtype,
                            std::span<const StreamHandle> streams) {
  raise_failure();
  plan_runner_->run(plan, buffers, dtype, streams);
}

void Communicator::run_flagged(Collective collective, const Algorithm& algorithm, u32 root,
                               u64 bytes, DType dtype, const FlagBuffers& buffers,
                               std::span<const StreamHandle> streams) {
  raise_failure();
  if (bytes == 0) return;
  PP_CHECK(
      backend_->max_channels() > 0, collective_name(collective), ": ", algorithm.name,
      " needs kernels that run at the same time, which CUDA_LAUNCH_BLOCKING=1 and GPUs without "
      "cooperative launches prevent; use algorithm \"auto\"");
  PP_CHECK(!backend_->capturing(streams), collective_name(collective), ": ", algorithm.name,
           " cannot be captured in a CUDA graph, because kernels that wait for each other must not "
           "be replayed apart; use algorithm \"auto\"");
  if (!connections_) {
    const u32 nchannels = std::min(options_.nchannels, backend_->max_channels());
    connections_ = std::make_unique<ConnectionSet>(*backend_, nranks_, nchannels, options_.slots,
                                                   options_.slot_bytes, options_.timeout_ms);
  }
  const FlagShape shape{
      .algorithm = algorithm.flag_algorithm,
      .nranks = nranks_,
      .root = root,
      .nchannels = connections_->nchannels(),
      .slots = options_.slots,
      .element_bytes = collective == Collective::kBroadcast ? 1 : element_bytes(dtype),
      .bytes = bytes,
      .slice_bytes = options_.slot_bytes};
  FlagArgs args = connections_->prepare(shape, dtype,
                                        message(algorithm.name, " ", collective_name(collective)));
  for (u32 rank = 0; rank < nranks_; ++rank) {
    args.ranks[rank].input = buffers.inputs[rank];
    args.ranks[rank].output = buffers.outputs[rank];
  }
  LaunchGroup group(*backend_, streams);
  try {
    backend_->launch_flagged(args);
    group.end();
  } catch (...) {
    // Blocks that were launched wait for blocks that will never come: they shall leave now and not
    // after the timeout. The ends of a connection may have counted differently.
    connections_->abort();
    group.give_up();
    retire_connections();
    throw;
  }
  if (backend_->finished(backend_->ticket())) raise_failure();
}

// Also what an operation without work does, so that a failure is never passed over.
void Communicator::raise_failure() {
  if (auto* const thread = backend_->communication_thread()) thread->raise_failure(this);
  free_retired();
  if (!connections_ || !connections_->poisoned()) return;
  const std::string text = connections_->failure();
  retire_connections();
  free_retired();
  throw Error(text);
}

void Communicator::retire_connections() {
  const u64 ticket = backend_->ticket();  // first, because it may raise
  retired_.push_back({std::move(connections_), ticket});
}

void Communicator::free_retired() {
  std::erase_if(retired_,
                [this](const Retired& retired) { return backend_->finished(retired.ticket); });
}

void Communicator::synchronize() {
  if (auto* const thread = backend_->communication_thread()) thread->finish(this);
  const auto lock = lock_launches();
  check_open();
  // A flag-ordered kernel gives up by itself after the timeout; twice that leaves it the time to
  // say so.
  const bool finished = backend_->wait(backend_->ticket(), 2 * options_.timeout_ms * 1'000'000);
  raise_failure();
  PP_CHECK(finished, "synchronize: work was still running after ", 2 * options_.timeout_ms, " ms");
}

void Communicator::close() {
  // Also where it is closed already: the destructor must leave nothing behind that refers to this.
  auto* const thread = backend_->communication_thread();
  if (thread) thread->finish(this);
  const auto lock = lock_launches();
  if (closed_.exchange(true)) return;
  free_all();
  if (thread) thread->raise_failure(this);
}

void Communicator::free_all() {
  bool finished = false;
  try {
    finished = backend_->wait(backend_->ticket(), 2 * options_.timeout_ms * 1'000'000);
  } catch (const Error&) {
    // A device that has failed for good: nothing can be freed on it.
  }
  if (finished) {
    plan_runner_.reset();
    connections_.reset();
    retired_.clear();
    return;
  }
  // Memory that a kernel may still write must not go back to the system: it is kept for ever.
  static auto& kept = *new std::vector<std::shared_ptr<void>>;  // launches are locked
  kept.emplace_back(std::move(plan_runner_));
  kept.emplace_back(std::move(connections_));
  for (Retired& retired : retired_) kept.emplace_back(std::move(retired.connections));
  retired_.clear();
}

}  // namespace pyparallel
