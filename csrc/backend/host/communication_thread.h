// The thread of the process that runs queued operations of the host backend, one after the other in
// the order of calls, while their callers go on.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "../../base.h"

namespace pyparallel::host {

// Sleeps when idle. Started when it is first needed. A forked child has its own, with nothing
// queued. An owner is whoever may ask for its operations as a whole: a communicator.
class CommunicationThread {
 public:
  // The thread of this process, see per_process().
  static CommunicationThread& instance();
  CommunicationThread();

  // Starts the thread if it is not running yet. False where the system refuses it.
  bool start();
  // Queues an operation and returns its ticket, which is never 0. After start().
  u64 submit(const void* owner, std::function<void()> operation);
  // True where nothing is queued or running.
  bool idle() const;

  // Waits until the operation is done, and throws Error if it failed, every time. Throws Error too
  // if no operation at all was finished for timeout_ms: this one is then still queued or running.
  // ArgumentError for a ticket that this process has not issued.
  void wait(u64 ticket, u64 timeout_ms);
  // Waits for all operations of an owner, or of everybody. No clock bounds this, because each
  // operation ends: sums only compute, and what waits for flags gives up by itself.
  void finish(const void* owner);
  void finish_all();

  // Throws Error if an operation of the owner has failed and nobody was told yet. Does nothing in
  // this thread itself, because an operation is not wrong where the one before it was.
  void raise_failure(const void* owner);
  // Drops what is kept about failures of an owner that has nothing queued.
  void forget(const void* owner);

 private:
  struct Operation {
    const void* owner;
    std::function<void()> run;
  };
  struct Failure {
    const void* owner;
    std::string text;
    bool told;
  };

  void thread_main();

  mutable std::mutex mutex_;  // guards everything below; never held while an operation runs
  std::condition_variable submitted_, finished_one_;
  bool started_ = false;
  std::thread::id id_;
  std::deque<Operation> queue_;            // the first one may be running
  const u64 first_;                        // the tickets of this process are above it
  u64 issued_, finished_;                  // operations finish in the order of their tickets
  std::map<const void*, u64> unfinished_;  // of each owner that has any
  std::map<u64, Failure> failures_;        // by ticket
};

}  // namespace pyparallel::host
