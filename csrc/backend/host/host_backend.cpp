// Memory and launches of the host backend.
#include "host_backend.h"

#include <cstdlib>
#include <cstring>

#include "../../check.h"
#include "communication_thread.h"
#include "compare_sender.h"
#include "flag_blocks.h"
#include "task_batch.h"

namespace pyparallel::host {
namespace {

constexpr u64 kAlignment =
    128;  // as a GPU's cache line, so that slots and words lie alike on both backends

}  // namespace

void* HostBackend::allocate(u32, u64 bytes, RankSet) { return allocate_host(bytes); }
void HostBackend::release(u32, void* memory) noexcept { std::free(memory); }

void* HostBackend::allocate_host(u64 bytes) {
  const u64 size = round_up(bytes, kAlignment);
  void* memory = std::aligned_alloc(kAlignment, size);
  PP_CHECK(memory, "the host backend could not allocate ", bytes, " bytes");
  return std::memset(memory, 0, size);
}

void HostBackend::release_host(void* memory) noexcept { std::free(memory); }

void HostBackend::write(u32, void* to, const void* from, u64 bytes) {
  std::memcpy(to, from, bytes);
}

void HostBackend::read(u32, void* to, const void* from, u64 bytes) { std::memcpy(to, from, bytes); }

u32 HostBackend::max_channels() const { return kMaxFlagChannels; }

// Whatever a call that failed had left is dropped.
void HostBackend::begin(std::span<const StreamHandle>) { pending_ = {}; }

void HostBackend::launch(u32, std::span<const Task> tasks) {
  // Those of one step follow each other in one array. What does not follow runs first: tasks of a
  // step may run in any order.
  if (tasks.data() != pending_.data() + pending_.size()) barrier();
  pending_ = {tasks.data() - pending_.size(), pending_.size() + tasks.size()};
}

void HostBackend::launch_flagged(const FlagArgs& args) {
  barrier();
  run_flag_blocks(args);
}

void HostBackend::barrier() {
  run_tasks(pending_);
  pending_ = {};
}

std::unique_ptr<SegmentSender> HostBackend::make_segment_sender(const SendTable& table) {
  return std::make_unique<CompareSender>(table);
}

CommunicationThread* HostBackend::communication_thread() {
  return &CommunicationThread::instance();
}

void HostBackend::end(std::span<const StreamHandle>) { barrier(); }

}  // namespace pyparallel::host

namespace pyparallel {

std::unique_ptr<Backend> make_host_backend(u32) { return std::make_unique<host::HostBackend>(); }

}  // namespace pyparallel
