// The process-wide pool that runs event-ordered work: one thread per core (the caller counts as
// one), all asleep when there is nothing to do.
#pragma once
#include <atomic>
#include <mutex>

#include "../../base.h"

namespace pyparallel::host {

class Pool {
 public:
  using Body = void (*)(void* context, u64 tile);

  // The pool of this process, see per_process().
  static Pool& instance();
  Pool();

  // Threads that can work on a job, the caller included: the cores this process may use.
  u32 concurrency() const { return concurrency_; }

  // While one exists, somebody waits for work that may be running in the background: it gets every
  // thread, and so does background work that starts later.
  class Hurry {
   public:
    Hurry();
    ~Hurry();
    Hurry(const Hurry&) = delete;
    Hurry& operator=(const Hurry&) = delete;

   private:
    Pool& pool_;
  };

  // Makes run() leave cores to others when this thread calls it: it starts with a quarter of the
  // threads, the caller included. Somebody computes meanwhile, often with one thread per core that
  // meet at barriers, so that one core less already slows all of them down.
  static void work_in_background();

  // Calls body(context, t) once for each t in [0, ntiles), on several threads, and returns after
  // the last call. What the caller wrote before is visible to the calls, and what they wrote is
  // visible to the caller afterwards. The body must not throw and must not call run().
  void run(u64 ntiles, Body body, void* context);

 private:
  void start_workers();
  void worker();
  void drain();
  u64 helpers(u64 ntiles) const;

  const u32 concurrency_;
  std::mutex run_mutex_;  // one job at a time
  u32 nworkers_ = 0;

  std::atomic<u32> hurries_{0};

  // The job. body_ and context_ are read only after a tile was claimed: until that tile is finished
  // the job is not over and nobody overwrites them, however late a worker wakes up.
  Body body_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<u64> unclaimed_{0};
  alignas(64) std::atomic<u64> unfinished_{0};
  alignas(64) std::atomic<u32> wakeups_{0};  // workers sleep on this word
  alignas(64) std::atomic<u32> done_{0};     // the caller sleeps on this word: jobs finished
};

}  // namespace pyparallel::host
