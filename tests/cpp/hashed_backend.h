// The host backend with the segment sender of GPUs: their bodies, run by the host.
#pragma once
#include <set>

#include "check.h"
#include "hash_sender.h"
#include "wrapped_backend.h"

namespace pyparallel::testing {

struct HashingContext : host::HostContext {
  u64 sync_sum(u64 value) const { return value; }
  void add(u64* word, u64 value) const {
    std::atomic_ref<u64>(*word).fetch_add(value, std::memory_order_relaxed);
  }
};
static_assert(HashContext<HashingContext>);

class HostHashSender final : public HashSender {
 public:
  HostHashSender(Backend& backend, const SendTable& table, int& launches_left)
      : HashSender(backend, table), launches_left_(launches_left) {}

 private:
  static constexpr u32 kBlocks = 3;

  void count_launch() {
    if (launches_left_-- == 0) throw Error("the launch failed");
  }
  void launch_send(u32, const SendArgs& args) override {
    count_launch();
    for (u32 b = 0; b < kBlocks; ++b) send_changed<2>(HashingContext{}, args, b, kBlocks);
  }
  void launch_find(u32, const SendArgs& args) override {
    for (u32 b = 0; b < kBlocks; ++b) find_changes<2>(HashingContext{}, args, b, kBlocks);
  }
  void launch_receive(u32, const ReceiveArgs& args) override {
    count_launch();
    for (u32 b = 0; b < kBlocks; ++b) receive_changed(HashingContext{}, args, b, kBlocks);
  }

  int& launches_left_;
};

class HashedBackend : public StagedBackend {
 public:
  using StagedBackend::StagedBackend;
  ~HashedBackend() override {
    for (void* memory : held_) StagedBackend::release(0, memory);  // lost on purpose
  }
  void* allocate(u32 rank, u64 bytes, RankSet touched_by) override {
    return *held_.insert(StagedBackend::allocate(rank, bytes, touched_by)).first;
  }
  void release(u32 rank, void* memory) noexcept override {
    held_.erase(memory);
    StagedBackend::release(rank, memory);
  }
  std::unique_ptr<SegmentSender> make_segment_sender(const SendTable& table) override {
    return std::make_unique<HostHashSender>(*this, table, launches_left);
  }
  bool wait(u64 ticket, u64 timeout_ns) override {
    ++waits;
    return !busy && StagedBackend::wait(ticket, timeout_ns);
  }
  int waits = 0;
  bool busy = false;       // launched work never finishes
  int launches_left = -1;  // the launch after so many fails; -1: none does

 private:
  std::set<void*> held_;
};

}  // namespace pyparallel::testing
