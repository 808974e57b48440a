// Sums that are queued: the communicator's side of the communication thread.
#include "arguments.h"
#include "backend/host/communication_thread.h"
#include "check.h"
#include "communicator.h"

namespace pyparallel {
namespace {

// A sum below this takes about as long as waking the thread that would run it.
constexpr u64 kInlineSumBytes = 64 << 10;

}  // namespace

Communicator::~Communicator() {
  try {
    close();
  } catch (const Error&) {
    // A queued sum failed, and nobody is left to be told.
  }
  if (auto* const thread = backend_->communication_thread()) thread->forget(this);
}

u64 Communicator::reduce_add_async(u32 root, std::vector<const void*> sources,
                                   std::vector<Segment> segments, void* destination, DType dtype,
                                   std::vector<StreamHandle> streams, std::string algorithm) {
  check_open();
  const Sum sum = check_sum(root, sources, segments, destination, dtype, streams, algorithm);
  auto* const thread = backend_->communication_thread();
  // A small one waits its turn too where others are running: this thread would have to wait for the
  // launch lock.
  const bool queued = thread && (sum.bytes > kInlineSumBytes || !thread->idle()) && thread->start();
  if (!queued) {
    reduce_add(root, sources, segments, destination, dtype, streams, algorithm);
    return 0;
  }
  thread->raise_failure(this);
  return thread->submit(
      this, [=, this, sources = std::move(sources), segments = std::move(segments),
             streams = std::move(streams), algorithm = std::move(algorithm)] {
        reduce_add(root, sources, segments, destination, dtype, streams, algorithm);
      });
}

void Communicator::wait(u64 ticket) {
  if (ticket == 0) return;
  auto* const thread = backend_->communication_thread();
  PP_CHECK_ARG(thread, "wait: ticket ", ticket, " is none of ", backend_->name(),
               " devices, whose sums have ticket 0");
  // A flag-ordered sum gives up by itself after the timeout; twice that leaves it the time to say
  // so.
  thread->wait(ticket, 2 * options_.timeout_ms);
}

}  // namespace pyparallel
