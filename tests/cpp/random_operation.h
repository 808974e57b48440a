// Random flag-ordered collectives on a Team, with their inputs and the results that they must have.
#pragma once
#include <cstring>
#include <random>

#include "team_context.h"
#include "testing.h"

namespace pyparallel::testing {

// Sums in the order that the schedule promises, rounded as often as it does. Ring inputs are small
// integers, which add exactly in any order.
template <class T>
class RandomOperation {
 public:
  RandomOperation(Team& team, FlagAlgorithm algorithm, u32 root, std::mt19937_64& random)
      : algorithm_(algorithm) {
    const u64 largest = kTeamBytes / sizeof(T);
    count_ = random() % 4 == 0 ? random() % 40 : random() % (largest + 1);
    FlagShape shape = team.args().shape;
    shape.algorithm = algorithm;
    shape.root = all_reduce() ? 0 : root;
    shape.element_bytes = sizeof(T);
    shape.bytes = count_ * sizeof(T);
    shape.slice_bytes = (1 + random() % (team.args().slot_bytes / kUnit)) * kUnit;
    args_ = team.prepare(shape);
    in_place_ = all_reduce() && random() % 2;
    // Elements of a buffer start at any multiple of their size.
    shift_ = random() % 2 ? 0 : random() % 8;
    for (u32 rank = 0; rank < shape.nranks; ++rank) {
      inputs_.emplace_back(count_ + 16);
      outputs_.emplace_back(count_ + 16, poison());
      for (u64 i = 0; i < count_; ++i) inputs_[rank][shift_ + i] = random_element(random);
    }
    set_expected();
    for (u32 rank = 0; rank < shape.nranks; ++rank) {
      args_.ranks[rank].input = bytes(inputs_[rank]);
      args_.ranks[rank].output = bytes(in_place_ ? inputs_[rank] : outputs_[rank]);
    }
  }

  const FlagArgs& args() const { return args_; }

  bool right() const {
    const FlagShape& shape = args_.shape;
    for (u32 rank = 0; rank < shape.nranks; ++rank) {
      const std::vector<T>& result = in_place_ ? inputs_[rank] : outputs_[rank];
      const bool writes = all_reduce() || is_broadcast(algorithm_) == (rank != shape.root);
      if (writes && !same_bytes(&result[shift_], expected_.data(), count_ * sizeof(T)))
        return false;
      if (in_place_) continue;
      const T untouched = poison();
      for (u64 i = 0; i < result.size(); ++i) {
        const bool inside = writes && i >= shift_ && i < shift_ + count_;
        if (!inside && !same_bytes(&result[i], &untouched, sizeof(T))) return false;
      }
    }
    return true;
  }

 private:
  static T poison() {
    T value;
    std::memset(&value, 0xa5, sizeof(T));
    return value;
  }

  bool all_reduce() const {
    return algorithm_ == FlagAlgorithm::kRingAllReduce || algorithm_ == FlagAlgorithm::kLlAllReduce;
  }

  u8* bytes(std::vector<T>& elements) { return reinterpret_cast<u8*>(elements.data() + shift_); }

  T random_element(std::mt19937_64& random) const {
    const int small = static_cast<int>(random() % 17) - 8;
    const double scale = algorithm_ == FlagAlgorithm::kRingAllReduce ? 1 : 0.7;
    return narrow<T>(static_cast<Accumulator<T>>(static_cast<i64>(small) * scale));
  }

  void set_expected() {
    const FlagShape& shape = args_.shape;
    for (u64 i = shift_; i < shift_ + count_; ++i) {
      if (is_broadcast(algorithm_)) {
        expected_.push_back(inputs_[shape.root][i]);
        continue;
      }
      Accumulator<T> sum = widen<T>(inputs_[0][i]);
      for (u32 rank = 1; rank < shape.nranks; ++rank) {
        sum = sum + widen<T>(inputs_[rank][i]);
        if (!is_ll(algorithm_)) sum = widen<T>(narrow<T>(sum));  // at each hop
      }
      expected_.push_back(narrow<T>(sum));
    }
  }

  FlagAlgorithm algorithm_;
  FlagArgs args_;
  u64 count_ = 0, shift_ = 0;
  bool in_place_ = false;
  std::vector<std::vector<T>> inputs_, outputs_;
  std::vector<T> expected_;
};

constexpr u32 kAlgorithms = static_cast<u32>(FlagAlgorithm::kLlAllReduce) + 1;
constexpr u32 kSimpleAlgorithms = static_cast<u32>(FlagAlgorithm::kLlBroadcast);

// Runs some operations of random algorithms from `first_algorithm` on, blocks running ahead; false
// if a value was wrong or a wait expired.
template <class T, Fault F>
bool run_random_operations(Team& team, u32 first_algorithm, std::mt19937_64& random, bool jitter) {
  const FlagShape& shape = team.args().shape;
  std::vector<RandomOperation<T>> operations;
  std::vector<FlagArgs> args;
  const u64 count = 1 + random() % 8;
  // Half of the time all are alike: then the ranks at one end never wait for those at the other,
  // and run ahead as far as credits allow.
  const bool alike = random() % 2;
  FlagAlgorithm algorithm{};
  u32 root = 0;
  while (operations.size() < count) {
    if (operations.empty() || !alike) {
      algorithm =
          static_cast<FlagAlgorithm>(first_algorithm + random() % (kAlgorithms - first_algorithm));
      root = random() % shape.nranks;
    }
    if (min_slots(algorithm) > shape.slots) algorithm = FlagAlgorithm::kChainBroadcast;
    operations.emplace_back(team, algorithm, root, random);
  }
  for (const auto& operation : operations) args.push_back(operation.args());
  bool ok = team.run<T, F>(args, (1u << shape.nranks) - 1, random(), jitter);
  for (const auto& operation : operations) ok = ok && operation.right();
  return ok;
}

}  // namespace pyparallel::testing
