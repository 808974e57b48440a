// Threads of the host backend: how one is started, and singletons that a forked child makes anew.
#pragma once
#include <atomic>
#include <functional>
#include <string>

namespace pyparallel::host {

// Starts a detached thread with default floating-point mode and all signals blocked, so that Ctrl-C
// still reaches the interpreter's own threads. The body must use only memory that is never freed:
// at exit the thread is simply cut off. Returns false where the system refuses another thread.
bool start_worker_thread(const std::string& name, std::function<void()> body);

// Calls `in_child` in every child process right after fork(), before anything else of ours runs
// there.
void at_fork_in_child(void (*in_child)());

// The one T of this process. Never destroyed, so that its threads may outlive every global at exit.
// A forked child has none of its parent's threads and finds locks as they were, so it gets a new T.
// T's constructor starts no thread.
template <class T>
T& per_process() {
  static std::atomic<T*> current{nullptr};
  if (T* found = current.load(std::memory_order_acquire)) return *found;
  static const bool registered =
      (at_fork_in_child([] { current.store(nullptr, std::memory_order_relaxed); }), true);
  (void)registered;
  auto* mine = new T;
  T* other = nullptr;
  if (current.compare_exchange_strong(other, mine, std::memory_order_acq_rel)) return *mine;
  delete mine;
  return *other;
}

}  // namespace pyparallel::host
