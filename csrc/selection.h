// The selection table: which algorithm an operation runs by default, and what overrides it.
#pragma once
#include <array>
#include <string>
#include <string_view>

#include "algorithm.h"
#include "topology.h"

namespace pyparallel {

// What an algorithm is asked to do.
struct Request {
  Collective collective;
  u64 bytes;
  u32 element_bytes;
  bool one_piece;  // one segment, of which every rank has its part
  bool may_spin;   // blocks of all ranks run at the same time: flag-ordered algorithms cannot hang
};

class Selection {
 public:
  // `overrides`: what PYPARALLEL_ALGO holds, "broadcast:chain,reduce_add:owner" or nothing. Throws
  // ArgumentError where it makes no sense.
  Selection(Fabric fabric, u32 nranks, std::string_view overrides);

  // The algorithm called `requested`. "auto" gives the override, where there is one that can do
  // what is asked, else the default. A default keeps the rank order of sums and never depends on a
  // timing. Throws ArgumentError for a name that the collective does not have.
  const Algorithm& choose(const Request& request, std::string_view requested) const;

  // What "auto" gives, one line a collective: the algorithms and the sizes from which they are
  // taken.
  std::string describe(bool may_spin) const;

 private:
  const Algorithm& choose_default(const Request& request) const;
  std::string describe(Request request) const;

  Fabric fabric_;
  u32 nranks_;
  std::array<const Algorithm*, kCollectives> overrides_{};
};

}  // namespace pyparallel
