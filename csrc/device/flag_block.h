// Which body, for which element type, a block of a flag-ordered launch runs: on virtual devices.
// GPUs decide this when they launch, because there each body and type is a kernel.
#pragma once
#include "element_type.h"
#include "flag_ordered.h"
#include "ll.h"

namespace pyparallel {

// T: the element type of a sum.
template <class T, Fault F = Fault::kNone, FlagOrderedContext C>
bool run_flag_block_of(const C& c, const FlagArgs& args, u32 rank, u32 channel) {
  const FlagAlgorithm algorithm = args.shape.algorithm;
  if (is_ll(algorithm)) {
    if (is_broadcast(algorithm)) return run_ll<i32, F>(c, args, rank, channel);
    return run_ll<T, F>(c, args, rank, channel);
  }
  if (is_broadcast(algorithm)) return run_flag_ordered<CopyOnly, F>(c, args, rank, channel);
  return run_flag_ordered<T, F>(c, args, rank, channel);
}

template <FlagOrderedContext C>
bool run_flag_block(const C& c, const FlagArgs& args, u32 rank, u32 channel) {
  return with_element_type(args.dtype,
                           [&]<class T>() { return run_flag_block_of<T>(c, args, rank, channel); });
}

}  // namespace pyparallel
