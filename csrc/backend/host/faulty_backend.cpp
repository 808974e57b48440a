// Launches in which one rank's blocks are left out, come later, or run something else.
#include "faulty_backend.h"

#include <chrono>

#include "../../check.h"
#include "block_threads.h"
#include "flag_blocks.h"

namespace pyparallel::host {
namespace {

using Clock = std::chrono::steady_clock;

FlagArgs with_half_of_the_bytes(FlagArgs args) {
  args.shape.bytes = args.shape.bytes / 2 / args.shape.element_bytes * args.shape.element_bytes;
  return args;
}

}  // namespace

FaultPlan::Kind FaultPlan::parse_kind(std::string_view name) {
  if (name == "absent") return Kind::kAbsent;
  if (name == "late") return Kind::kLate;
  PP_CHECK_ARG(name == "wrong", "a fault is absent, late or wrong, not '", name, "'");
  return Kind::kWrong;
}

FaultyBackend::~FaultyBackend() {
  for (LateRank& late : late_) late.thread.join();
}

void FaultyBackend::launch_flagged(const FlagArgs& args) {
  ++ticket_;
  if (plan.launches == 0 || plan.rank >= args.shape.nranks)
    return HostBackend::launch_flagged(args);
  --plan.launches;
  barrier();
  struct Launch {
    const FaultPlan& plan;
    const FlagArgs& args;
    const FlagArgs wrong;
  } launch{plan, args, with_half_of_the_bytes(args)};
  BlockThreads::instance().run(
      args.shape.nranks * args.shape.nchannels,
      [](void* context, u32 block) {
        const auto& [plan, args, wrong] = *static_cast<Launch*>(context);
        const bool hit = block / args.shape.nchannels == plan.rank;
        if (!hit) {
          run_flag_block(args, block);
        } else if (plan.kind == FaultPlan::Kind::kWrong) {
          run_flag_block(wrong, block);
        }
      },
      &launch);
  if (plan.kind == FaultPlan::Kind::kLate) run_late(args);
}

void FaultyBackend::run_late(const FlagArgs& args) {
  LateRank& late = late_.emplace_back();
  late.ticket = ticket_;
  late.thread = std::thread([&late, args, plan = plan] {
    std::this_thread::sleep_for(std::chrono::milliseconds(plan.late_ms));
    for (u32 channel = 0; channel < args.shape.nchannels; ++channel)
      run_flag_block(args, plan.rank * args.shape.nchannels + channel);
    // Release: pairs with the acquire in finished(), after which the connections may be freed.
    late.left.store(true, std::memory_order_release);
  });
}

bool FaultyBackend::finished(u64 ticket) {
  while (!late_.empty() && late_.front().left.load(std::memory_order_acquire)) {
    late_.front().thread.join();
    late_.pop_front();
  }
  // In order of launches, as on a stream.
  return late_.empty() || ticket < late_.front().ticket;
}

bool FaultyBackend::wait(u64 ticket, u64 timeout_ns) {
  const auto deadline = Clock::now() + std::chrono::nanoseconds(timeout_ns);
  while (!finished(ticket)) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

}  // namespace pyparallel::host
