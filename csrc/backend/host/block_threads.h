// Threads that run blocks at the same time: one a block, asleep between launches, as many as the
// largest launch needed.
#pragma once
#include <atomic>
#include <deque>
#include <mutex>

#include "../../base.h"

namespace pyparallel::host {

class BlockThreads {
 public:
  using Body = void (*)(void* context, u32 block);

  // The threads of this process, see per_process().
  static BlockThreads& instance();

  // Calls body(context, b) once for each b in [0, nblocks), every call on a thread of its own, and
  // returns when all have returned. Calls may therefore wait for each other. Throws Error, and
  // calls nothing, if the system refuses a thread. Visibility as in Pool::run().
  void run(u32 nblocks, Body body, void* context);

 private:
  // A thread sleeps on its own word, so that a launch wakes exactly the threads it needs.
  struct alignas(64) Thread {
    std::atomic<u32> launches{0};
  };
  void thread_main(Thread& thread, u32 block);

  std::mutex run_mutex_;        // one launch at a time
  std::deque<Thread> threads_;  // a deque, because sleeping threads hold references
  Body body_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<u32> running_{0};  // the caller sleeps on this word
};

}  // namespace pyparallel::host
