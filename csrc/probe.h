// The trial of a directed pair of devices: is what the driver promises about peer access true?
//
// There are machines on which stores to a peer are lost, loads give old data, flags overtake the
// data before them, or everything is right but slower than the way through host memory.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base.h"

namespace pyparallel {

// What a trial needs from a machine. Kernels of `from` want to use memory of `to`; each side has
// bytes() of memory for the trial, and so has the host, pinned, where both sides reach it.
//
// Every function waits until the work is done, for a bounded time. After an outcome that is not
// `finished` only give_up() may be called, and the destructor leaves alone what the stuck work may
// still touch.
class PairPort {
 public:
  enum class Place : u8 { kFrom, kTo, kHost };

  struct Outcome {
    bool finished = true;
    u64 ns = 0;                // how long the work took
    bool right = true;         // of a check: every word was what the pattern says
    u64 word = 0;              // else one of the wrong ones: where it is,
    u32 wanted = 0, seen = 0;  // what it should be and what it was
  };

  virtual ~PairPort() = default;
  virtual u64 bytes() const = 0;
  // Empty, or why there can be no access at all. Nothing else is called then.
  virtual std::string open() = 0;
  // Undoes what open() changed for others. Called after a trial that failed.
  virtual void give_up() = 0;

  // A kernel on the device of `kernel` stores pattern(i, seed) to each word i of `memory`.
  virtual Outcome fill(Place kernel, Place memory, u32 seed) = 0;
  // A kernel on the device of `kernel` loads each word of `memory` and compares.
  virtual Outcome check(Place kernel, Place memory, u32 seed) = 0;
  // The copy engine moves all words from the memory of one side to that of the other.
  virtual Outcome copy(Place source, Place destination) = 0;
  // A kernel of `from` stores many short messages into memory of `to`, each time data first and
  // then, with a release, the flag; a kernel of `to` runs at the same time, waits for each flag
  // with an acquire, and then checks the data. Word i of all data is pattern(i, seed); the memory
  // held other words before.
  virtual Outcome litmus(u32 seed) = 0;

  static PP_HD constexpr u32 pattern(u32 i, u32 seed) {
    const u32 x = (i + seed) * 0x9e3779b1u;
    return x ^ (x >> 15);
  }
};

// Runs the trial. Empty: the pair may be used; else the reason why not, as part of a sentence
// ("word 7 of what was stored should be 1, but is 0").
std::string try_pair(PairPort& port);

// Which pairs of this process may be used: each is tried once, at its first use.
class PairVerdicts {
 public:
  // PYPARALLEL_P2P: try and believe the result; use no pair; raise Error where a pair fails.
  enum class Policy : u8 { kAuto, kOff, kForce };
  using MakePort = std::function<std::unique_ptr<PairPort>(int from, int to)>;
  using Warn = std::function<void(const std::string& text)>;

  // Throws ArgumentError for a text that is no policy.
  static Policy parse_policy(const char* text);

  // The first pair that fails is told by `warn`, with the reason.
  PairVerdicts(MakePort make_port, Warn warn);
  bool usable(int from, int to, Policy policy);

 private:
  const MakePort make_port_;
  const Warn warn_;
  std::mutex mutex_;
  std::map<std::pair<int, int>, std::string> faults_;  // empty: usable
  bool warned_ = false;
};

}  // namespace pyparallel
