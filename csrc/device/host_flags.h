// FlagContext for threads of one process. Contexts of virtual devices derive from it.
#pragma once
#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "context.h"

namespace pyparallel {

// Tells the core that this thread spins.
inline void relax_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class HostFlags {
 public:
  static constexpr u64 kPollsPerClock = 16;

  u64 relaxed(const u64* word) const { return reference(word).load(std::memory_order_relaxed); }
  u64 acquire(const u64* word) const { return reference(word).load(std::memory_order_acquire); }
  void post(u64* word, u64 value) const {
    std::atomic_ref<u64>(*word).store(value, std::memory_order_release);
  }

  static constexpr u32 kLinesInFlight = 1;
  Line relaxed_line(const Line* line) const {
    return {{relaxed(&line->words[0]), relaxed(&line->words[1])}};
  }
  void store_line(Line* line, Line value) const {
    for (u32 i = 0; i < 2; ++i) {
      std::atomic_ref<u64>(line->words[i]).store(value.words[i], std::memory_order_relaxed);
    }
  }

  u64 now_ns() const {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  }

  // A peer on another core answers within some pauses. With more blocks than cores the peer needs
  // this core, so then yield; and a peer that is late for longer is waited for asleep. Never a
  // futex: its wait has no time limit, and a peer that never comes would hang it.
  void pause(u64 polls, u64 waited_ns) const {
    if (polls <= 100) {
      relax_cpu();
    } else if (waited_ns < 1'000'000) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  // Relaxed, because the word carries no data: blocks that see it leave, and the host reads the
  // record by `complete`.
  bool aborted(const u32* word) const {
    return std::atomic_ref<u32>(*const_cast<u32*>(word)).load(std::memory_order_relaxed) != 0;
  }
  void abort(u32* word) const { std::atomic_ref<u32>(*word).store(1, std::memory_order_relaxed); }

  bool claim(FailureRecord* record) const {
    u32 expected = 0;
    return std::atomic_ref<u32>(record->claimed)
        .compare_exchange_strong(expected, 1, std::memory_order_relaxed);
  }
  void publish(FailureRecord* record) const {
    std::atomic_ref<u32>(record->complete).store(1, std::memory_order_release);
  }

 private:
  static std::atomic_ref<u64> reference(const u64* word) {
    return std::atomic_ref<u64>(*const_cast<u64*>(word));
  }
};

}  // namespace pyparallel
