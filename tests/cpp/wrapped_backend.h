// Backends for tests: the host backend with one property changed.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "backend/host/host_context.h"
#include "backend/segment_sender.h"
#include "device/element_type.h"
#include "device/flag_ordered.h"

namespace pyparallel::testing {

// Passes everything on.
class WrappedBackend : public Backend {
 public:
  explicit WrappedBackend(u32 nranks) : WrappedBackend(make_host_backend(nranks)) {}
  explicit WrappedBackend(std::unique_ptr<Backend> host) : host_(std::move(host)) {}
  const char* name() const override { return host_->name(); }
  bool direct() const override { return host_->direct(); }
  u32 max_channels() const override { return host_->max_channels(); }
  Fabric fabric() const override { return host_->fabric(); }
  bool capturing(std::span<const StreamHandle> callers) override {
    return host_->capturing(callers);
  }
  void* allocate(u32 rank, u64 bytes, RankSet touched_by) override {
    ++allocations;
    ++allocation_calls;
    this->touched_by.push_back(touched_by);
    return host_->allocate(rank, bytes, touched_by);
  }
  void release(u32 rank, void* memory) noexcept override {
    --allocations;
    host_->release(rank, memory);
  }
  void* allocate_host(u64 bytes) override {
    ++allocations;
    ++allocation_calls;
    return host_->allocate_host(bytes);
  }
  void release_host(void* memory) noexcept override {
    --allocations;
    host_->release_host(memory);
  }
  void write(u32 rank, void* to, const void* from, u64 bytes) override {
    host_->write(rank, to, from, bytes);
  }
  void read(u32 rank, void* to, const void* from, u64 bytes) override {
    host_->read(rank, to, from, bytes);
  }
  void begin(std::span<const StreamHandle> callers) override {
    ++launches;
    host_->begin(callers);
  }
  void launch(u32 rank, std::span<const Task> tasks) override { host_->launch(rank, tasks); }
  void copy(u32 rank, const Task& task) override {
    ++engine_copies;
    host_->copy(rank, task);
  }
  void launch_flagged(const FlagArgs& args) override { host_->launch_flagged(args); }
  void barrier() override { host_->barrier(); }
  void end(std::span<const StreamHandle> callers) override { host_->end(callers); }
  u64 ticket() override { return host_->ticket(); }
  bool finished(u64 ticket) override { return host_->finished(ticket); }
  bool wait(u64 ticket, u64 timeout_ns) override { return host_->wait(ticket, timeout_ns); }
  std::unique_ptr<SegmentSender> make_segment_sender(const SendTable& table) override {
    return host_->make_segment_sender(table);
  }
  host::CommunicationThread* communication_thread() override {
    return host_->communication_thread();
  }

  int allocations = 0;       // not yet released
  int allocation_calls = 0;  // ever made
  int launches = 0;
  int engine_copies = 0;
  std::vector<RankSet> touched_by;  // of each allocate()

 private:
  std::unique_ptr<Backend> host_;
};

// As on GPUs, a rank's tasks touch only its own user memory, so plans go through stages.
class StagedBackend : public WrappedBackend {
 public:
  using WrappedBackend::WrappedBackend;
  bool direct() const override { return false; }
};

// Runs groups on a thread of its own, in order, as a device does: calls return at once, and what
// goes wrong shows later.
class AsynchronousBackend : public WrappedBackend {
 public:
  using WrappedBackend::WrappedBackend;
  ~AsynchronousBackend() override {
    queue([this] { stop_ = true; });
    thread_.join();
  }

  void begin(std::span<const StreamHandle> callers) override {
    open_ = true;
    queue([this, callers] { WrappedBackend::begin(callers); });
  }
  void launch(u32 rank, std::span<const Task> tasks) override {
    // Tasks and their pointer arrays are the caller's until end() only.
    auto copy = std::make_shared<std::vector<Task>>(tasks.begin(), tasks.end());
    auto pointers = std::make_shared<std::deque<std::vector<void*>>>();
    for (Task& task : *copy) {
      for (u32 k = 0; k < task.nsources; ++k) {
        if (k == 0) pointers->emplace_back();
        pointers->back().push_back(const_cast<void*>(task.sources[k]));
      }
      task.sources = pointers->back().data();
      task.destinations =
          pointers->emplace_back(task.destinations, task.destinations + task.ndestinations).data();
    }
    queue([this, rank, copy, pointers] {
      kept_.push_back(pointers);
      kept_.push_back(copy);
      WrappedBackend::launch(rank, *copy);
    });
  }
  void copy(u32 rank, const Task& task) override { launch(rank, {&task, 1}); }
  void launch_flagged(const FlagArgs& args) override {
    queue([this, args] { WrappedBackend::launch_flagged(args); });
  }
  void barrier() override {
    queue([this] { WrappedBackend::barrier(); });
  }
  void end(std::span<const StreamHandle> callers) override {
    open_ = false;
    ++groups_;
    queue([this, callers] {
      WrappedBackend::end(callers);
      kept_.clear();
      done_.fetch_add(1);
    });
  }

  u64 ticket() override {
    if (open_) end({});
    return groups_;
  }
  bool finished(u64 ticket) override { return done_.load() >= ticket; }
  bool wait(u64 ticket, u64 timeout_ns) override {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
    while (!finished(ticket)) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
  }

  std::mutex gate;  // while somebody holds it, the thread rests

 private:
  void queue(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    works_.push_back(std::move(work));
    arrived_.notify_one();
  }
  void run() {
    while (!stop_) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        arrived_.wait(lock, [this] { return !works_.empty(); });
        work = std::move(works_.front());
        works_.pop_front();
      }
      const std::lock_guard resting(gate);
      work();
    }
  }

  bool open_ = false, stop_ = false;
  u64 groups_ = 0;
  std::atomic<u64> done_{0};
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::function<void()>> works_;
  std::vector<std::shared_ptr<void>> kept_;
  std::thread thread_{[this] { run(); }};
};

}  // namespace pyparallel::testing
