// The execution context of a virtual device: blocks of one thread, with the fast loops of the host.
#pragma once
#include "../../device/context.h"
#include "../../device/host_flags.h"
#include "../../device/numeric.h"
#include "loops.h"

namespace pyparallel::host {

template <class T>
constexpr DType kDTypeOf = DType::kInt64;
template <>
constexpr DType kDTypeOf<Half> = DType::kFloat16;
template <>
constexpr DType kDTypeOf<BFloat16> = DType::kBFloat16;
template <>
constexpr DType kDTypeOf<float> = DType::kFloat32;
template <>
constexpr DType kDTypeOf<double> = DType::kFloat64;
template <>
constexpr DType kDTypeOf<i32> = DType::kInt32;

struct HostContext : HostFlags {
  static constexpr u32 tid() { return 0; }
  static constexpr u32 nthreads() { return 1; }
  void sync() const {}
  bool sync_and(bool ok) const { return ok; }

  template <class W>
  W load(const W* from) const {
    return *from;
  }
  template <class W>
  void store(W* to, W value) const {
    *to = value;
  }

  // Cached stores, because the next rank reads a slot as soon as its flag is posted.
  template <class Destinations>
  void copy(const Destinations& destinations, const u8* source, u64 bytes) const {
    u8* to[kMaxRanks];
    for (u32 m = 0; m < destinations.size(); ++m) to[m] = destinations[m];
    host::copy(to, destinations.size(), source, bytes, Stores::kCached);
  }
  template <class T, class Destinations, class Sources>
  void sum(const Destinations& destinations, const Sources& sources, u64 count) const {
    u8* to[kMaxRanks];
    const u8* from[kMaxRanks];
    for (u32 m = 0; m < destinations.size(); ++m) to[m] = destinations[m];
    for (u32 k = 0; k < sources.size(); ++k) from[k] = sources[k];
    host::sum(kDTypeOf<T>, to, destinations.size(), from, sources.size(), count * sizeof(T),
              Stores::kCached);
  }
};

static_assert(FlagOrderedContext<HostContext>);

}  // namespace pyparallel::host
