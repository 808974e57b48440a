// begin() and end() of a group of launches, also where an exception cuts the group short.
#pragma once
#include "backend/backend.h"

namespace pyparallel {

// Work that was launched before an exception still uses the callers' memory. So the callers'
// streams wait for it all the same, and memory that is freed in their order is not used again too
// early.
class LaunchGroup {
 public:
  LaunchGroup(Backend& backend, std::span<const StreamHandle> streams)
      : backend_(backend), streams_(streams) {
    backend.begin(streams);
  }
  ~LaunchGroup() { give_up(); }
  LaunchGroup(const LaunchGroup&) = delete;
  LaunchGroup& operator=(const LaunchGroup&) = delete;

  void end() {
    open_ = false;
    backend_.end(streams_);
  }

  // Ends the group if end() has not; a device that has failed for good is not waited for.
  void give_up() noexcept {
    if (!open_) return;
    try {
      end();
    } catch (...) {
    }
  }

 private:
  Backend& backend_;
  const std::span<const StreamHandle> streams_;
  bool open_ = true;
};

}  // namespace pyparallel
