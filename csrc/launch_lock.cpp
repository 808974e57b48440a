// The process-wide launch lock and what fork() does with it.
#include "launch_lock.h"

#include <pthread.h>

#include "backend/host/pool.h"

namespace pyparallel {
namespace {

// Never destroyed: threads may still use it while the process exits.
std::mutex& launch_mutex() {
  static std::mutex* const mutex = [] {
    auto* made = new std::mutex;
    pthread_atfork([] { launch_mutex().lock(); }, [] { launch_mutex().unlock(); },
                   [] { launch_mutex().unlock(); });
    return made;
  }();
  return *mutex;
}

}  // namespace

std::unique_lock<std::mutex> lock_launches() {
  std::unique_lock<std::mutex> lock(launch_mutex(), std::try_to_lock);
  if (!lock) {
    const host::Pool::Hurry hurry;
    lock.lock();
  }
  return lock;
}

}  // namespace pyparallel
