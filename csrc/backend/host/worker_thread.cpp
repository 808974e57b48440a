// Thread start-up of the host backend.
#include "worker_thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <thread>
#include <utility>

#include "float_mode.h"

namespace pyparallel::host {

bool start_worker_thread(const std::string& name, std::function<void()> body) {
  // The new thread inherits the mask; blocking here leaves no moment in which it could take a
  // signal.
  sigset_t all, saved;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &saved);
  bool started = true;
  try {
    std::thread([name, body = std::move(body)] {
#if defined(__linux__)
      pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());  // 15 is the kernel's limit
#endif
      const DefaultFloatMode mode;
      body();
    }).detach();
  } catch (const std::system_error&) {
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &saved, nullptr);
  return started;
}

void at_fork_in_child(void (*in_child)()) { pthread_atfork(nullptr, nullptr, in_child); }

}  // namespace pyparallel::host
