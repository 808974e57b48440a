// Blocks of several threads with a real barrier, for the sanitizers, and what connects them.
#pragma once
#include <array>
#include <barrier>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <thread>
#include <vector>

#include "device/flag_block.h"
#include "device/host_flags.h"
#include "device/loops.h"

namespace pyparallel::testing {

// Threads that live as long as a test case, because starting them costs more than an operation.
class Threads {
 public:
  explicit Threads(u32 count) : start_(count + 1), end_(count + 1) {
    for (u32 i = 0; i < count; ++i) threads_.emplace_back([this, i] { work(i); });
  }
  ~Threads() {
    run_ = nullptr;
    start_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }
  void run(std::function<void(u32)> body) {
    run_ = std::move(body);
    start_.arrive_and_wait();
    end_.arrive_and_wait();
  }

 private:
  void work(u32 i) {
    for (;;) {
      start_.arrive_and_wait();
      if (!run_) return;
      run_(i);
      end_.arrive_and_wait();
    }
  }

  std::barrier<> start_, end_;
  std::function<void(u32)> run_;
  std::vector<std::thread> threads_;
};

// What the threads of one block share.
struct Block {
  explicit Block(u32 nthreads) : barrier(nthreads), terms(nthreads) {}
  std::barrier<> barrier;
  std::atomic<bool> all_ok{true};
  std::vector<u64> terms;  // [thread]
};

// One thread of a block. Before each operation on a flag it may sleep or yield, so that blocks meet
// in many orders.
class TeamContext : public HostFlags {
 public:
  TeamContext(Block& block, u32 id, u32 nthreads, u64 seed, bool jitter)
      : block_(&block), id_(id), nthreads_(nthreads), random_(seed * 2 + 1), jitter_(jitter) {}

  u32 tid() const { return id_; }
  u32 nthreads() const { return nthreads_; }
  void sync() const { block_->barrier.arrive_and_wait(); }
  // all_ok only ever falls: a block in which one thread was not ok leaves.
  bool sync_and(bool ok) const {
    if (!ok) block_->all_ok.store(false, std::memory_order_relaxed);
    sync();
    return block_->all_ok.load(std::memory_order_relaxed);
  }

  // Plain memory, so that a sanitizer sees it where a barrier is missing.
  u64 sync_sum(u64 value) const {
    sync();
    block_->terms[id_] = value;
    sync();
    return std::accumulate(block_->terms.begin(), block_->terms.end(), u64{0});
  }
  void add(u64* word, u64 value) const {
    std::atomic_ref<u64>(*word).fetch_add(value, std::memory_order_relaxed);
  }

  template <class W>
  W load(const W* from) const {
    return *from;
  }
  template <class W>
  void store(W* to, W value) const {
    *to = value;
  }

  u64 relaxed(const u64* word) const {
    delay();
    return HostFlags::relaxed(word);
  }
  void post(u64* word, u64 value) const {
    delay();
    HostFlags::post(word, value);
  }
  // Only planted faults post without a release.
  void post_relaxed(u64* word, u64 value) const {
    delay();
    std::atomic_ref<u64>(*word).store(value, std::memory_order_relaxed);
  }
  static constexpr u32 kLinesInFlight = 2;
  Line relaxed_line(const Line* line) const {
    delay();
    return HostFlags::relaxed_line(line);
  }
  void store_line(Line* line, Line value) const {
    delay();
    HostFlags::store_line(line, value);
  }
  void pause(u64, u64) const { sched_yield(); }

  template <class Destinations>
  void copy(const Destinations& destinations, const u8* source, u64 bytes) const {
    copy_loop<2>(*this, destinations, source, bytes);
  }
  template <class T, class Destinations, class Sources>
  void sum(const Destinations& destinations, const Sources& sources, u64 count) const {
    sum_loop<T, 2>(*this, destinations, sources, count);
  }

 private:
  void delay() const {
    if (!jitter_) return;
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    const u32 draw = static_cast<u32>(random_ >> 33) % 32;
    if (draw == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_ >> 40 & 31));
    } else if (draw < 8) {
      sched_yield();
    }
  }

  Block* block_;
  u32 id_, nthreads_;
  mutable u64 random_;
  bool jitter_;
};
static_assert(FlagOrderedContext<TeamContext>);

// The connections between all pairs of ranks on all channels, of one protocol.
class Wiring {
 public:
  Wiring(u32 nranks, u32 nchannels, u32 slots, u64 slot_bytes, u64 first_step)
      : nranks_(nranks),
        nchannels_(nchannels),
        slots_(slots),
        slot_bytes_(slot_bytes),
        lines_(nranks * nranks * nchannels * 2),
        memory_(nranks * nranks * nchannels * slots * slot_bytes / sizeof(Pack)),
        sends_(nranks * nranks * nchannels),
        recvs_(sends_.size()),
        fan_outs_(nranks * nchannels * kMaxRanks) {
    // No flag of LL that a test waits for.
    std::memset(memory_.data(), 0xa5, memory_.size() * sizeof(Pack));
    // Only a planted fault copies to where nothing was written down.
    for (u64& address : fan_outs_) address = reinterpret_cast<u64>(memory_.data());
    set_steps(first_step);
  }

  // As if every connection had carried that many slices.
  void set_steps(u64 step) {
    for (Counter& line : lines_) line.word = step;
    for (u32 from = 0; from < nranks_; ++from) {
      for (u32 to = 0; to < nranks_; ++to) {
        for (u32 channel = 0; channel < nchannels_; ++channel) {
          const u32 forth = index(from, to, channel), back = index(to, from, channel);
          u64 *credits = &lines_[forth * 2].word, *tail = &lines_[forth * 2 + 1].word;
          u8* slots = reinterpret_cast<u8*>(memory_.data()) + forth * slots_ * slot_bytes_;
          sends_[forth] = {step, step, credits, tail, slots};
          recvs_[back] = {step, step, tail, credits, slots};
        }
      }
    }
  }

  void attach(FlagArgs& args) {
    args.shape.slots = slots_;
    args.slot_bytes = slot_bytes_;
    for (u32 rank = 0; rank < nranks_; ++rank) {
      args.ranks[rank].sends = &sends_[index(rank, 0, 0)];
      args.ranks[rank].recvs = &recvs_[index(rank, 0, 0)];
      args.ranks[rank].fan_out = &fan_outs_[rank * nchannels_ * kMaxRanks];
    }
  }

 private:
  struct alignas(128) Counter {
    u64 word;
  };
  u32 index(u32 rank, u32 peer, u32 channel) const {
    return (rank * nranks_ + peer) * nchannels_ + channel;
  }

  u32 nranks_, nchannels_, slots_;
  u64 slot_bytes_;
  std::vector<Counter> lines_;
  std::vector<Pack> memory_;
  std::vector<SendEnd> sends_;
  std::vector<RecvEnd> recvs_;
  std::vector<u64> fan_outs_;
};

// The largest payload of an operation on a Team: what its LL buffers hold.
constexpr u64 kTeamBytes = 6144;

// A communicator of blocks: runs operations one after the other on one wiring.
class Team {
 public:
  Team(u32 nranks, u32 nchannels, u32 slots, u64 slot_bytes, u32 nthreads, u64 first_step)
      : nthreads_(nthreads),
        simple_(nranks, nchannels, slots, slot_bytes, first_step),
        ll_(nranks, nchannels, kLlBuffers,
            ll_lines(part_range({0, kTeamBytes}, nchannels, 0).bytes) * kLlLineBytes, first_step),
        threads_(nranks * nchannels * nthreads) {
    args_.shape.nranks = nranks;
    args_.shape.nchannels = nchannels;
    args_.timeout_ns = 60'000'000'000;
    args_.abort_word = &abort_word;
    args_.failure = &failure;
    simple_.attach(args_);
    for (u32 i = 0; i < nranks * nchannels; ++i)
      blocks_.push_back(std::make_unique<Block>(nthreads));
  }

  // What all operations have in common, without shape.algorithm and what depends on it.
  FlagArgs& args() { return args_; }
  // Arguments of an operation, with the connections of its protocol.
  FlagArgs prepare(const FlagShape& shape) {
    FlagArgs args = args_;
    args.shape = shape;
    (is_ll(shape.algorithm) ? ll_ : simple_).attach(args);
    return args;
  }
  void set_steps(u64 step) {
    simple_.set_steps(step);
    ll_.set_steps(step);
  }

  // Runs the operations on all ranks whose bit is set. A block begins with the next operation when
  // it has left the one before, whatever the others do. T is the element type of sums. True if no
  // block left early; otherwise the team is of no more use.
  template <class T, Fault F = Fault::kNone>
  bool run(std::span<const FlagArgs> operations, u32 ranks, u64 seed, bool jitter) {
    std::atomic<bool> ok{true};
    threads_.run([&](u32 thread) {
      const u32 nchannels = args_.shape.nchannels, index = thread / nthreads_;
      const u32 rank = index / nchannels;
      if (!(ranks >> rank & 1)) return;
      Block& block = *blocks_[index];
      const TeamContext context(block, thread % nthreads_, nthreads_, seed + thread, jitter);
      for (const FlagArgs& args : operations) {
        if (run_flag_block_of<T, F>(context, args, rank, index % nchannels)) continue;
        ok = false;
        // Threads leave together, unless a fault is planted: the others must not wait for this one.
        block.barrier.arrive_and_drop();
        return;
      }
    });
    return ok;
  }

  u32 abort_word = 0;
  FailureRecord failure{};

 private:
  u32 nthreads_;
  Wiring simple_, ll_;
  FlagArgs args_{};
  std::vector<std::unique_ptr<Block>> blocks_;
  Threads threads_;
};

}  // namespace pyparallel::testing
