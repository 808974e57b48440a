// The process-wide launch lock and what fork() does with it.
#include "launch_lock.h"

#include <pthread.h>

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
  return std::unique_lock<std::mutex>(launch_mutex());
}

}  // namespace pyparallel
