// The steps of a trial, and what is made of them.
#include "probe.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "check.h"

namespace pyparallel {
namespace {

using Place = PairPort::Place;
using Outcome = PairPort::Outcome;

// Different everywhere, so that what an earlier step left is never taken for what a later one
// should have written.
class Seeds {
 public:
  u32 next() { return seed_ += 0x51edu; }

 private:
  u32 seed_ = 0;
};

class Trial {
 public:
  explicit Trial(PairPort& port) : port_(port) {}

  std::string run() {
    // Twice, because data of the first round may sit in a cache and hide a change.
    for (int round = 0; round < 2; ++round) {
      if (!(stores() && loads() && copies() && flags())) return fault_;
    }
    speed();
    return fault_;
  }

 private:
  // Each returns false once fault_ says why. Stored words are read by the owner of the memory and
  // by whoever stored them.
  bool stores() {
    const u32 seed = seeds_.next();
    return right("what it stored there", port_.fill(Place::kFrom, Place::kTo, seed)) &&
           right("what it stored there", port_.check(Place::kTo, Place::kTo, seed)) &&
           right("what it loaded back", port_.check(Place::kFrom, Place::kTo, seed));
  }

  bool loads() {
    const u32 seed = seeds_.next();
    return right("memory of its own", port_.fill(Place::kTo, Place::kTo, seed)) &&
           right("what it loaded", port_.check(Place::kFrom, Place::kTo, seed));
  }

  bool copies() {
    const u32 there = seeds_.next(), back = seeds_.next();
    return right("memory of its own", port_.fill(Place::kFrom, Place::kFrom, there)) &&
           right("what was copied to it", port_.copy(Place::kFrom, Place::kTo)) &&
           right("what was copied to it", port_.check(Place::kTo, Place::kTo, there)) &&
           right("memory of its own", port_.fill(Place::kTo, Place::kTo, back)) &&
           right("what was copied back", port_.copy(Place::kTo, Place::kFrom)) &&
           right("what was copied back", port_.check(Place::kFrom, Place::kFrom, back));
  }

  bool flags() { return right("data behind a flag", port_.litmus(seeds_.next())); }

  // Through host memory both halves of a transfer run at the same time, on different slots, so the
  // slower one counts.
  bool speed() {
    const std::optional<u64> to_host = fastest_fill(Place::kHost);
    const std::optional<u64> from_host =
        to_host ? fastest_check(Place::kTo, Place::kHost) : to_host;
    if (!from_host) return false;
    const u64 staged = std::max(*to_host, *from_host);
    const std::optional<u64> stores = fastest_fill(Place::kTo);
    const std::optional<u64> loads = stores ? fastest_check(Place::kFrom, Place::kTo) : stores;
    return loads && not_slower("stores", *stores, staged) && not_slower("loads", *loads, staged);
  }

  // The fastest of three, because the first may meet clocks at rest, and any one a busy machine.
  std::optional<u64> fastest_fill(Place memory) {
    u64 best = ~u64{0};
    for (int i = 0; i < 3; ++i) {
      const Outcome outcome = port_.fill(Place::kFrom, memory, speed_seed_);
      if (!right("what it stored there", outcome)) return {};
      best = std::min(best, outcome.ns);
    }
    return best;
  }
  std::optional<u64> fastest_check(Place kernel, Place memory) {
    u64 best = ~u64{0};
    for (int i = 0; i < 3; ++i) {
      const Outcome outcome = port_.check(kernel, memory, speed_seed_);
      if (!right("what it loaded", outcome)) return {};
      best = std::min(best, outcome.ns);
    }
    return best;
  }

  bool not_slower(const char* what, u64 direct_ns, u64 staged_ns) {
    // A tenth is noise; and a way that is as fast as the host's leaves the host's memory alone.
    if (direct_ns <= staged_ns + staged_ns / 10) return true;
    fault_ = message(what, " move ", megabytes_per_second(direct_ns),
                     " MB/s, the way through host memory ", megabytes_per_second(staged_ns));
    return false;
  }

  u64 megabytes_per_second(u64 ns) const { return port_.bytes() * 1000 / std::max(ns, u64{1}); }

  bool right(std::string_view what, const Outcome& outcome) {
    if (!outcome.finished) {
      fault_ = message("work on ", what, " did not finish");
    } else if (!outcome.right) {
      fault_ = message("word ", outcome.word, " of ", what, " should be ", outcome.wanted,
                       ", but is ", outcome.seen);
    }
    return fault_.empty();
  }

  PairPort& port_;
  Seeds seeds_;
  const u32 speed_seed_ = seeds_.next();
  std::string fault_;
};

}  // namespace

std::string try_pair(PairPort& port) {
  if (std::string refused = port.open(); !refused.empty()) return refused;
  std::string fault = Trial(port).run();
  if (!fault.empty()) port.give_up();
  return fault;
}

PairVerdicts::Policy PairVerdicts::parse_policy(const char* text) {
  const std::string_view value = text ? text : "";
  if (value == "off") return Policy::kOff;
  if (value == "force") return Policy::kForce;
  PP_CHECK_ARG(value == "auto" || value.empty(),
               "PYPARALLEL_P2P must be auto, off or force, but is ", value, ".");
  return Policy::kAuto;
}

PairVerdicts::PairVerdicts(MakePort make_port, Warn warn)
    : make_port_(std::move(make_port)), warn_(std::move(warn)) {}

bool PairVerdicts::usable(int from, int to, Policy policy) {
  if (policy == Policy::kOff) return false;
  const std::lock_guard lock(mutex_);
  auto known = faults_.find({from, to});
  if (known == faults_.end())
    known = faults_.emplace(std::pair(from, to), try_pair(*make_port_(from, to))).first;
  const std::string& fault = known->second;
  if (fault.empty()) return true;
  const std::string text =
      message("GPU ", from, " cannot use the memory of GPU ", to, " (", fault, ")");
  PP_CHECK(policy != Policy::kForce, "PYPARALLEL_P2P=force, but ", text, ".");
  if (!std::exchange(warned_, true)) {
    warn_(message("pyparallel: ", text,
                  "; transfers between them go through host memory. PYPARALLEL_P2P=off silences "
                  "this."));
  }
  return false;
}

}  // namespace pyparallel
