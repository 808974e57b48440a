// One random flag-ordered collective on a Team, with its inputs and the result that it must have.
#pragma once
#include <cstring>
#include <random>

#include "team_context.h"
#include "testing.h"

namespace pyparallel::testing {

// Sums in the order that the schedule promises, rounded at each hop as the schedule does. Ring
// inputs are small integers, which add exactly in any order.
template <class T>
class RandomOperation {
 public:
  RandomOperation(Team& team, FlagAlgorithm algorithm, u64 max_bytes, std::mt19937_64& random)
      : team_(team), algorithm_(algorithm) {
    FlagShape& shape = team.args().shape;
    count_ = random() % 4 == 0 ? random() % 40 : random() % (max_bytes / sizeof(T));
    shape.algorithm = algorithm;
    shape.root = algorithm == FlagAlgorithm::kRingAllReduce ? 0 : random() % shape.nranks;
    shape.element_bytes = sizeof(T);
    shape.bytes = count_ * sizeof(T);
    const u64 units = team.args().slot_bytes / kUnit;
    shape.slice_bytes = (1 + random() % units) * kUnit;
    in_place_ = algorithm == FlagAlgorithm::kRingAllReduce && random() % 2;
    // Elements of a buffer start at any multiple of their size.
    shift_ = random() % 2 ? 0 : random() % 8;
    for (u32 rank = 0; rank < shape.nranks; ++rank) {
      inputs_.emplace_back(count_ + 16);
      outputs_.emplace_back(count_ + 16, poison());
      for (u64 i = 0; i < count_; ++i) inputs_[rank][shift_ + i] = random_element(random);
    }
    set_expected();
    for (u32 rank = 0; rank < shape.nranks; ++rank) {
      team.args().ranks[rank].input = bytes(inputs_[rank]);
      team.args().ranks[rank].output = bytes(in_place_ ? inputs_[rank] : outputs_[rank]);
    }
  }

  bool right() {
    const FlagShape& shape = team_.args().shape;
    for (u32 rank = 0; rank < shape.nranks; ++rank) {
      const std::vector<T>& result = in_place_ ? inputs_[rank] : outputs_[rank];
      const bool writes = algorithm_ == FlagAlgorithm::kRingAllReduce ||
                          (algorithm_ == FlagAlgorithm::kChainReduce) == (rank == shape.root);
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

  u8* bytes(std::vector<T>& elements) { return reinterpret_cast<u8*>(elements.data() + shift_); }

  T random_element(std::mt19937_64& random) const {
    const int small = static_cast<int>(random() % 17) - 8;
    const double scale = algorithm_ == FlagAlgorithm::kRingAllReduce ? 1 : 0.7;
    return narrow<T>(static_cast<Accumulator<T>>(static_cast<i64>(small) * scale));
  }

  void set_expected() {
    const FlagShape& shape = team_.args().shape;
    for (u64 i = 0; i < count_; ++i) {
      T value = inputs_[algorithm_ == FlagAlgorithm::kChainBroadcast ? shape.root : 0][shift_ + i];
      for (u32 rank = 1; algorithm_ != FlagAlgorithm::kChainBroadcast && rank < shape.nranks;
           ++rank) {
        value = narrow<T>(widen<T>(value) + widen<T>(inputs_[rank][shift_ + i]));
      }
      expected_.push_back(value);
    }
  }

  Team& team_;
  FlagAlgorithm algorithm_;
  u64 count_ = 0, shift_ = 0;
  bool in_place_ = false;
  std::vector<std::vector<T>> inputs_, outputs_;
  std::vector<T> expected_;
};

// Runs one operation of a random algorithm; false if a value was wrong or a wait expired.
template <class T, Fault F>
bool run_random_operation(Team& team, u64 max_bytes, std::mt19937_64& random, bool jitter) {
  const bool ring = team.args().shape.slots >= min_slots(FlagAlgorithm::kRingAllReduce);
  const auto algorithm = static_cast<FlagAlgorithm>(random() % (ring ? 3 : 2));
  const u32 everybody = (1u << team.args().shape.nranks) - 1;
  RandomOperation<T> operation(team, algorithm, max_bytes, random);
  const u64 seed = random();
  const bool ok = algorithm == FlagAlgorithm::kChainBroadcast
                      ? team.run<CopyOnly, F>(everybody, seed, jitter)
                      : team.run<T, F>(everybody, seed, jitter);
  return ok && operation.right();
}

}  // namespace pyparallel::testing
