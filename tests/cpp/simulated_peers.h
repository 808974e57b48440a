// Pairs of devices that lie, on a machine without any: a port for the trial, and a backend whose
// transfers have the same faults.
#pragma once
#include <algorithm>
#include <deque>
#include <map>
#include <vector>

#include "probe.h"
#include "testing.h"
#include "wrapped_backend.h"

namespace pyparallel::testing {

enum class PairFault {
  kNone,
  kNoAccess,       // the driver says no
  kDropsStores,    // stores to the peer are lost
  kDropsRewrites,  // only the first store to a word arrives
  kStaleLoads,     // loads from the peer give what they gave the first time
  kDropsCopies,    // the copy engine says yes and moves nothing
  kFlagBeforeData,
  kSlowStores,
  kSlowLoads,
};

// Which fault a directed pair has.
using PairFaults = std::map<std::pair<int, int>, PairFault>;
inline PairFault fault_of(const PairFaults& faults, int from, int to) {
  const auto found = faults.find({from, to});
  return found == faults.end() ? PairFault::kNone : found->second;
}

class SimulatedPair : public PairPort {
 public:
  explicit SimulatedPair(PairFault fault) : fault_(fault) {}

  u64 bytes() const override { return kWords * sizeof(u32); }
  std::string open() override {
    return fault_ == PairFault::kNoAccess ? "the driver offers no peer access" : "";
  }
  void give_up() override { gave_up = true; }

  Outcome fill(Place kernel, Place memory, u32 seed) override {
    const bool crosses = kernel == Place::kFrom && memory == Place::kTo;
    const bool first = crosses && stores_++ == 0;
    const bool lost = crosses && (fault_ == PairFault::kDropsStores ||
                                  (fault_ == PairFault::kDropsRewrites && !first));
    for (u32 i = 0; !lost && i < kWords; ++i) words(memory)[i] = pattern(i, seed);
    return took(crosses, fault_ == PairFault::kSlowStores, memory);
  }

  Outcome check(Place kernel, Place memory, u32 seed) override {
    const bool crosses = kernel == Place::kFrom && memory == Place::kTo;
    if (crosses && fault_ == PairFault::kStaleLoads && cached_.empty()) cached_ = words(memory);
    const auto& seen = crosses && !cached_.empty() ? cached_ : words(memory);
    Outcome outcome = took(crosses, fault_ == PairFault::kSlowLoads, memory);
    for (u32 i = 0; outcome.right && i < kWords; ++i) expect(outcome, i, seed, seen[i]);
    return outcome;
  }

  Outcome copy(Place source, Place destination) override {
    if (fault_ != PairFault::kDropsCopies) words(destination) = words(source);
    return took(true, false, destination);
  }

  // Stores arrive one after the other; the receiver looks at every moment.
  Outcome litmus(u32 seed) override {
    Outcome outcome = took(true, false, Place::kTo);
    for (u64 m = 0; m < kMessages; ++m) {
      std::vector<u32> message(kMessageWords, 0);
      bool flag = fault_ == PairFault::kFlagBeforeData && m == kMessages / 2;
      for (u32 i = 0; i <= kMessageWords; ++i) {
        for (u32 k = 0; flag && outcome.right && k < kMessageWords; ++k)
          expect(outcome, static_cast<u32>(m * kMessageWords) + k, seed, message[k]);
        if (i == kMessageWords) break;
        message[i] = pattern(static_cast<u32>(m * kMessageWords) + i, seed);
        if (i + 1 == kMessageWords) flag = true;
      }
    }
    return outcome;
  }

  bool gave_up = false;

 private:
  static constexpr u64 kWords = 2048, kMessages = 64, kMessageWords = 16;

  std::vector<u32>& words(Place place) { return memory_[static_cast<u32>(place)]; }

  // The way through host memory has a quarter of the speed; slow is a twentieth.
  Outcome took(bool crosses, bool slow, Place memory) const {
    Outcome outcome;
    outcome.ns = memory == Place::kHost ? 800 : crosses && slow ? 4'000 : 200;
    return outcome;
  }
  static void expect(Outcome& outcome, u32 word, u32 seed, u32 seen) {
    outcome.right = seen == pattern(word, seed);
    outcome.word = word;
    outcome.wanted = pattern(word, seed);
    outcome.seen = seen;
  }

  const PairFault fault_;
  std::vector<u32> memory_[3] = {std::vector<u32>(kWords), std::vector<u32>(kWords),
                                 std::vector<u32>(kWords)};
  std::vector<u32> cached_;
  int stores_ = 0;
};

// Staged transfers between simulated devices, one a rank unless `rank_device` says otherwise: tasks
// that use device memory of a rank on another device meet the pair's fault.
class SimulatedPeersBackend : public StagedBackend {
 public:
  SimulatedPeersBackend(std::vector<u32> rank_device, PairFaults faults,
                        PairVerdicts::Policy policy)
      : StagedBackend(static_cast<u32>(rank_device.size())),
        rank_device_(rank_device),
        faults_(std::move(faults)),
        policy_(policy),
        topology_(rank_device_, [](DevicePair) { return false; }),
        verdicts_(
            [this](int from, int to) {
              tried.push_back({from, to});
              return std::make_unique<SimulatedPair>(fault_of(faults_, from, to));
            },
            [this](const std::string& text) { warnings.push_back(text); }) {}

  Fabric fabric() const override { return topology_.fabric(); }

  void* allocate(u32 rank, u64 bytes, RankSet touched_by) override {
    const bool on_device = topology_.on_device(rank, touched_by, [this](DevicePair pair) {
      return believes ||
             verdicts_.usable(static_cast<int>(pair.from), static_cast<int>(pair.to), policy_);
    });
    void* memory = StagedBackend::allocate(rank, bytes, touched_by);
    if (on_device) {
      device_memory_[static_cast<u8*>(memory)] = {rank_device_[rank], bytes};
      ++in_device_memory;
    } else {
      ++in_host_memory;
    }
    return memory;
  }
  void release(u32 rank, void* memory) noexcept override {
    device_memory_.erase(static_cast<u8*>(memory));
    StagedBackend::release(rank, memory);
  }

  void launch(u32 rank, std::span<const Task> tasks) override {
    std::vector<Task>& changed = tasks_.emplace_back();
    for (Task task : tasks) {
      auto& sources = pointers_.emplace_back();
      auto& destinations = pointers_.emplace_back();
      for (u32 k = 0; k < task.nsources; ++k) {
        sources.push_back(const_cast<void*>(task.sources[k]));
        if (fault(rank, task.sources[k]) == PairFault::kStaleLoads)
          sources.back() = scratch(task.rows * task.source_pitch);
      }
      for (u32 k = 0; k < task.ndestinations; ++k) {
        destinations.push_back(task.destinations[k]);
        if (fault(rank, task.destinations[k]) == PairFault::kDropsStores)
          destinations.back() = scratch(task.rows * task.destination_pitch);
      }
      task.sources = sources.data();
      task.destinations = destinations.data();
      changed.push_back(task);
    }
    StagedBackend::launch(rank, changed);
  }
  void copy(u32 rank, const Task& task) override { launch(rank, {&task, 1}); }
  void end(std::span<const StreamHandle> callers) override {
    StagedBackend::end(callers);
    tasks_.clear();
    pointers_.clear();
    scratch_.clear();
  }

  bool believes = false;  // takes the driver's word, and tries no pair
  std::vector<std::pair<int, int>> tried;
  std::vector<std::string> warnings;
  int in_device_memory = 0, in_host_memory = 0;

 private:
  struct DeviceMemory {
    u32 device;
    u64 bytes;
  };

  PairFault fault(u32 rank, const void* address) const {
    auto found = device_memory_.upper_bound(static_cast<u8*>(const_cast<void*>(address)));
    if (found == device_memory_.begin()) return PairFault::kNone;
    --found;
    const auto& [start, memory] = *found;
    if (static_cast<const u8*>(address) >= start + memory.bytes) return PairFault::kNone;
    return fault_of(faults_, static_cast<int>(rank_device_[rank]), static_cast<int>(memory.device));
  }
  u8* scratch(u64 bytes) { return scratch_.emplace_back(bytes).data(); }

  const std::vector<u32> rank_device_;
  const PairFaults faults_;
  const PairVerdicts::Policy policy_;
  const Topology topology_;
  PairVerdicts verdicts_;
  std::map<u8*, DeviceMemory> device_memory_;
  // Of the group that is being launched.
  std::deque<std::vector<Task>> tasks_;
  std::deque<std::vector<void*>> pointers_;
  std::deque<std::vector<u8>> scratch_;
};

}  // namespace pyparallel::testing
