// The lock under which every operation of the process is launched.
#pragma once
#include <mutex>

namespace pyparallel {

// Held by one operation at a time. fork() waits for it, so that a child never starts with an
// operation half launched.
std::unique_lock<std::mutex> lock_launches();

}  // namespace pyparallel
