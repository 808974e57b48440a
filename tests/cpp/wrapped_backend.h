// Backends for tests: the host backend with one property changed.
#pragma once
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "backend/host/host_context.h"
#include "backend/segment_sender.h"
#include "device/element_type.h"
#include "device/flag_ordered.h"

namespace pyparallel::testing {

// Passes everything on.
class WrappedBackend : public Backend {
 public:
  explicit WrappedBackend(u32 nranks) : host_(make_host_backend(nranks)) {}
  const char* name() const override { return host_->name(); }
  bool direct() const override { return host_->direct(); }
  u32 max_channels() const override { return host_->max_channels(); }
  void* allocate(u32 rank, u64 bytes) override {
    ++allocations;
    return host_->allocate(rank, bytes);
  }
  void release(u32 rank, void* memory) noexcept override {
    --allocations;
    host_->release(rank, memory);
  }
  void* allocate_host(u64 bytes) override {
    ++allocations;
    return host_->allocate_host(bytes);
  }
  void release_host(void* memory) noexcept override {
    --allocations;
    host_->release_host(memory);
  }
  void write(u32 rank, void* to, const void* from, u64 bytes) override {
    host_->write(rank, to, from, bytes);
  }
  void read(u32 rank, void* to, const void* from, u64 bytes) override {
    host_->read(rank, to, from, bytes);
  }
  void begin(std::span<const StreamHandle> callers) override {
    ++launches;
    host_->begin(callers);
  }
  void launch(u32 rank, std::span<const Task> tasks) override { host_->launch(rank, tasks); }
  void launch_flagged(const FlagArgs& args) override { host_->launch_flagged(args); }
  void barrier() override { host_->barrier(); }
  void end(std::span<const StreamHandle> callers) override { host_->end(callers); }
  u64 ticket() override { return host_->ticket(); }
  bool finished(u64 ticket) override { return host_->finished(ticket); }
  bool wait(u64 ticket, u64 timeout_ns) override { return host_->wait(ticket, timeout_ns); }
  std::unique_ptr<SegmentSender> make_segment_sender(const SendTable& table) override {
    return host_->make_segment_sender(table);
  }
  host::CommunicationThread* communication_thread() override {
    return host_->communication_thread();
  }

  int allocations = 0;  // not yet released
  int launches = 0;

 private:
  std::unique_ptr<Backend> host_;
};

// As on GPUs, a rank's tasks touch only its own user memory, so plans go through stages.
class StagedBackend : public WrappedBackend {
 public:
  using WrappedBackend::WrappedBackend;
  bool direct() const override { return false; }
};

// Leaves out the blocks of one rank of a flag-ordered launch. If `late`, the launch counts as
// running until run_late() has run them, as on a device whose stream is behind.
class AbsentRankBackend : public WrappedBackend {
 public:
  AbsentRankBackend(u32 nranks, u32 rank, bool late)
      : WrappedBackend(nranks), absent_(rank), late_(late) {}

  void launch_flagged(const FlagArgs& args) override {
    ++ticket_;
    if (!is_absent) return WrappedBackend::launch_flagged(args);
    std::vector<std::thread> blocks;
    for (u32 rank = 0; rank < args.shape.nranks; ++rank) {
      if (rank == absent_) continue;
      for (u32 channel = 0; channel < args.shape.nchannels; ++channel) {
        blocks.emplace_back([&args, rank, channel] { run_block(args, rank, channel); });
      }
    }
    for (auto& block : blocks) block.join();
    if (late_) late_launches_.push_back({args, ticket_});
  }

  void run_late() {
    for (const Late& launch : late_launches_) {
      for (u32 channel = 0; channel < launch.args.shape.nchannels; ++channel) {
        run_block(launch.args, absent_, channel);
      }
    }
    late_launches_.clear();
  }

  u64 ticket() override { return ticket_; }
  bool finished(u64 ticket) override {
    return late_launches_.empty() || ticket < late_launches_.front().ticket;
  }
  bool wait(u64 ticket, u64) override { return finished(ticket); }

  bool is_absent = true;

 private:
  struct Late {
    FlagArgs args;
    u64 ticket;
  };

  static void run_block(const FlagArgs& args, u32 rank, u32 channel) {
    const host::HostContext context;
    if (args.shape.algorithm == FlagAlgorithm::kChainBroadcast) {
      run_flag_ordered<CopyOnly>(context, args, rank, channel);
      return;
    }
    with_element_type(args.dtype,
                      [&]<class T>() { run_flag_ordered<T>(context, args, rank, channel); });
  }

  const u32 absent_;
  const bool late_;
  u64 ticket_ = 0;
  std::vector<Late> late_launches_;
};

}  // namespace pyparallel::testing
