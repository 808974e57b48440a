// The pool of sleeping threads.
#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <string>
#include <thread>

#include "worker_thread.h"

namespace pyparallel::host {
namespace {

u32 usable_cores() {
#if defined(__linux__)
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return std::max(CPU_COUNT(&cores), 1);
#endif
  return std::max(std::thread::hardware_concurrency(), 1u);
}

}  // namespace

Pool& Pool::instance() { return per_process<Pool>(); }

Pool::Pool() : concurrency_(usable_cores()) {}

void Pool::start_workers() {
  for (; nworkers_ + 1 < concurrency_; ++nworkers_) {
    if (!start_worker_thread("pp-host:" + std::to_string(nworkers_), [this] { worker(); })) return;
  }
}

void Pool::run(u64 ntiles, Body body, void* context) {
  if (ntiles == 0) return;
  const std::lock_guard<std::mutex> lock(run_mutex_);
  start_workers();
  body_ = body;
  context_ = context;
  const u32 done = done_.load(std::memory_order_relaxed);
  unfinished_.store(ntiles, std::memory_order_relaxed);
  // Release: pairs with the claim in drain(), which makes the job visible to whoever gets a tile.
  unclaimed_.store(ntiles, std::memory_order_release);
  // The bump makes a worker that is about to fall asleep look again.
  wakeups_.fetch_add(1, std::memory_order_release);
  if (ntiles > nworkers_) {
    wakeups_.notify_all();
  } else {
    for (u64 i = 1; i < ntiles; ++i) wakeups_.notify_one();
  }
  drain();
  // Acquire: pairs with the release in drain() of whoever finished the last tile.
  while (done_.load(std::memory_order_acquire) == done) done_.wait(done, std::memory_order_relaxed);
}

void Pool::drain() {
  u64 left = unclaimed_.load(std::memory_order_relaxed);
  while (left != 0) {
    if (!unclaimed_.compare_exchange_weak(left, left - 1, std::memory_order_acquire,
                                          std::memory_order_relaxed)) {
      continue;
    }
    body_(context_, left - 1);
    // Release: my tile's stores are visible to the last finisher; acquire: the last finisher sees
    // everybody's and passes them on with done_.
    if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      done_.fetch_add(1, std::memory_order_release);
      done_.notify_one();
    }
    left = unclaimed_.load(std::memory_order_relaxed);
  }
}

void Pool::worker() {
  for (;;) {
    const u32 seen = wakeups_.load(std::memory_order_acquire);
    drain();
    wakeups_.wait(seen, std::memory_order_relaxed);
  }
}

}  // namespace pyparallel::host
