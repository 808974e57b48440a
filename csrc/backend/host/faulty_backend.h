// The host backend with a rank that misbehaves, so that tests see how failures end.
#pragma once
#include <atomic>
#include <list>
#include <string_view>
#include <thread>

#include "host_backend.h"

namespace pyparallel::host {

struct FaultPlan {
  enum class Kind : u8 {
    kAbsent,  // never runs its blocks
    kLate,    // runs them late_ms after the others have given up; until then the launch counts as
              // running, as on a device whose stream is behind
    kWrong,   // believes that the operation has half of its bytes
  };
  Kind kind = Kind::kAbsent;
  u32 rank = 0;
  u32 launches = 0;  // how many of the next flag-ordered launches are hit
  u32 late_ms = 0;

  // "absent", "late", "wrong"; throws ArgumentError for another name.
  static Kind parse_kind(std::string_view name);
};

class FaultyBackend final : public HostBackend {
 public:
  explicit FaultyBackend(FaultPlan plan) : plan(plan) {}
  ~FaultyBackend() override;  // waits for late ranks

  void launch_flagged(const FlagArgs& args) override;
  u64 ticket() override { return ticket_; }
  bool finished(u64 ticket) override;
  bool wait(u64 ticket, u64 timeout_ns) override;

  FaultPlan plan;  // may be changed between calls

 private:
  struct LateRank {
    u64 ticket;
    std::atomic<bool> left{false};
    std::thread thread;
  };
  void run_late(const FlagArgs& args);

  u64 ticket_ = 0;  // flag-ordered launches; everything else is done when its call returns
  std::list<LateRank> late_;
};

}  // namespace pyparallel::host
