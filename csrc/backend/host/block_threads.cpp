// One sleeping thread a block.
#include "block_threads.h"

#include <string>

#include "../../check.h"
#include "worker_thread.h"

namespace pyparallel::host {

BlockThreads& BlockThreads::instance() { return per_process<BlockThreads>(); }

void BlockThreads::run(u32 nblocks, Body body, void* context) {
  const std::lock_guard<std::mutex> lock(run_mutex_);
  while (threads_.size() < nblocks) {
    const auto block = static_cast<u32>(threads_.size());
    Thread& thread = threads_.emplace_back();
    if (!start_worker_thread("pp-host-block:" + std::to_string(block),
                             [this, &thread, block] { thread_main(thread, block); })) {
      threads_.pop_back();
      throw Error(message("the host backend could not start thread ", block + 1, " of ", nblocks));
    }
  }
  body_ = body;
  context_ = context;
  running_.store(nblocks, std::memory_order_relaxed);
  for (u32 block = 0; block < nblocks; ++block) {
    // Release: pairs with the acquire in thread_main(), which makes the job visible to the thread.
    threads_[block].launches.fetch_add(1, std::memory_order_release);
    threads_[block].launches.notify_one();
  }
  // Acquire: what the blocks wrote is visible to the caller.
  for (u32 left; (left = running_.load(std::memory_order_acquire)) != 0;) {
    running_.wait(left, std::memory_order_relaxed);
  }
}

void BlockThreads::thread_main(Thread& thread, u32 block) {
  for (u32 seen = 0;; ++seen) {
    while (thread.launches.load(std::memory_order_acquire) == seen) {
      thread.launches.wait(seen, std::memory_order_relaxed);
    }
    body_(context_, block);
    // Release: pairs with the acquire of the caller.
    if (running_.fetch_sub(1, std::memory_order_release) == 1) running_.notify_one();
  }
}

}  // namespace pyparallel::host
