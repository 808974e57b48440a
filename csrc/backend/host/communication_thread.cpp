// The queue of operations, and who waits for it.
#include "communication_thread.h"

#include <unistd.h>

#include <chrono>
#include <exception>

#include "../../check.h"
#include "pool.h"
#include "worker_thread.h"

namespace pyparallel::host {

CommunicationThread& CommunicationThread::instance() { return per_process<CommunicationThread>(); }

// Process ids make the tickets of a parent unknown in its forked child, which has not got their
// operations.
CommunicationThread::CommunicationThread()
    : first_(static_cast<u64>(getpid()) << 32), issued_(first_), finished_(first_) {}

bool CommunicationThread::start() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) started_ = start_worker_thread("pp-comm", [this] { thread_main(); });
  return started_;
}

u64 CommunicationThread::submit(const void* owner, std::function<void()> operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back({owner, std::move(operation)});
  ++unfinished_[owner];
  submitted_.notify_one();
  return ++issued_;
}

bool CommunicationThread::idle() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty();
}

void CommunicationThread::wait(u64 ticket, u64 timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  PP_CHECK_ARG(ticket > first_ && ticket <= issued_, "wait: this process has issued no ticket ",
               ticket);
  if (ticket > finished_) {
    const Pool::Hurry hurry;
    while (ticket > finished_) {
      const u64 before = finished_;
      const bool progress = finished_one_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                                                   [&] { return finished_ != before; });
      PP_CHECK(progress, "wait: no queued sum was finished for ", timeout_ms, " ms; ",
               ticket - finished_ - 1, " are queued before this one");
    }
  }
  const auto failure = failures_.find(ticket);
  if (failure == failures_.end()) return;
  failure->second.told = true;
  throw Error(failure->second.text);
}

void CommunicationThread::finish(const void* owner) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (unfinished_.count(owner) == 0) return;
  const Pool::Hurry hurry;
  finished_one_.wait(lock, [&] { return unfinished_.count(owner) == 0; });
}

void CommunicationThread::finish_all() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (queue_.empty()) return;
  const Pool::Hurry hurry;
  finished_one_.wait(lock, [&] { return queue_.empty(); });
}

void CommunicationThread::raise_failure(const void* owner) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failures_.empty() || std::this_thread::get_id() == id_) return;
  for (auto& [ticket, failure] : failures_) {
    if (failure.owner != owner || failure.told) continue;
    failure.told = true;
    throw Error(failure.text);
  }
}

void CommunicationThread::forget(const void* owner) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(failures_, [owner](const auto& entry) { return entry.second.owner == owner; });
}

void CommunicationThread::thread_main() {
  Pool::work_in_background();
  std::unique_lock<std::mutex> lock(mutex_);
  id_ = std::this_thread::get_id();
  for (;;) {
    submitted_.wait(lock, [this] { return !queue_.empty(); });
    Operation& operation = queue_.front();  // stays where it is while others are queued behind it
    lock.unlock();
    std::string failure;
    try {
      operation.run();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    lock.lock();
    const void* const owner = operation.owner;
    ++finished_;
    if (!failure.empty()) failures_[finished_] = {owner, std::move(failure), false};
    if (--unfinished_[owner] == 0) unfinished_.erase(owner);
    queue_.pop_front();
    finished_one_.notify_all();
  }
}

}  // namespace pyparallel::host
