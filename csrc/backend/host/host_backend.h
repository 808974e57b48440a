// The host backend: virtual devices whose ranks are positions, whose memory is the process's own.
#pragma once
#include "../backend.h"

namespace pyparallel::host {

// Everything is done when a call returns: launch() only collects tasks, barrier() and end() run
// them.
class HostBackend : public Backend {
 public:
  const char* name() const override { return "host"; }
  bool direct() const override { return true; }
  u32 max_channels() const override;
  bool capturing(std::span<const StreamHandle>) override { return false; }
  Fabric fabric() const override { return Fabric::kHost; }

  void* allocate(u32 rank, u64 bytes, RankSet touched_by) override;
  void release(u32 rank, void* memory) noexcept override;
  void* allocate_host(u64 bytes) override;
  void release_host(void* memory) noexcept override;
  void write(u32 rank, void* to, const void* from, u64 bytes) override;
  void read(u32 rank, void* to, const void* from, u64 bytes) override;

  void begin(std::span<const StreamHandle> callers) override;
  void launch(u32 rank, std::span<const Task> tasks) override;
  void copy(u32 rank, const Task& task) override { launch(rank, {&task, 1}); }
  void launch_flagged(const FlagArgs& args) override;
  void barrier() override;
  void end(std::span<const StreamHandle> callers) override;

  u64 ticket() override { return 0; }
  bool finished(u64) override { return true; }
  bool wait(u64, u64) override { return true; }
  std::unique_ptr<SegmentSender> make_segment_sender(const SendTable& table) override;
  CommunicationThread* communication_thread() override;

 private:
  std::span<const Task> pending_;  // launched since the last barrier
};

}  // namespace pyparallel::host
