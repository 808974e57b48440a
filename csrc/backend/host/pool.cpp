// The pool of sleeping threads.
#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <string>
#include <thread>

#include "worker_thread.h"

namespace pyparallel::host {
namespace {

constexpr u32 kBackgroundShare = 4;  // one thread of up to seven cores, two of eight

thread_local bool in_background = false;

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

void Pool::work_in_background() { in_background = true; }

Pool::Hurry::Hurry() : pool_(instance()) {
  pool_.hurries_.fetch_add(1, std::memory_order_relaxed);
  pool_.wakeups_.fetch_add(1, std::memory_order_release);
  pool_.wakeups_.notify_all();
}

Pool::Hurry::~Hurry() { pool_.hurries_.fetch_sub(1, std::memory_order_relaxed); }

// Workers worth waking for a job. A Hurry that begins between this look and the job's start wakes
// nobody for it: the job is slower then, and nothing else.
u64 Pool::helpers(u64 ntiles) const {
  const bool background = in_background && hurries_.load(std::memory_order_relaxed) == 0;
  const u64 threads = background ? std::max(concurrency_ / kBackgroundShare, 1u) : concurrency_;
  return std::min(ntiles, threads) - 1;
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
  const u64 wanted = helpers(ntiles);
  if (wanted >= nworkers_) {
    wakeups_.notify_all();
  } else {
    for (u64 i = 0; i < wanted; ++i) wakeups_.notify_one();
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
