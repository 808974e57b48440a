// Classes of fabrics and the place of shared memory.
#include "topology.h"

#include <algorithm>

namespace pyparallel {

const char* fabric_name(Fabric fabric) {
  constexpr const char* kNames[] = {"host", "one_device", "switch", "bus", "limited"};
  return kNames[static_cast<u32>(fabric)];
}

Topology::Topology(std::span<const u32> rank_device,
                   const std::function<bool(DevicePair)>& has_links)
    : rank_device_(rank_device.begin(), rank_device.end()) {
  for (const u32 device : rank_device) ndevices_ = std::max(ndevices_, device + 1);
  if (ndevices_ == 1) return;
  bool linked = true;
  for (u32 from = 0; from < ndevices_ && linked; ++from) {
    for (u32 to = 0; to < ndevices_ && linked; ++to) linked = from == to || has_links({from, to});
  }
  // Links between all of more than nine devices come from a switch, which has no peer limit.
  fabric_ = linked ? Fabric::kSwitch : ndevices_ - 1 > kPeerLimit ? Fabric::kLimited : Fabric::kBus;
}

// Neighbours are those of ranks, because chains and rings go from rank to rank.
bool Topology::may_be_mapped(DevicePair pair) const {
  if (fabric_ != Fabric::kLimited) return true;
  const size_t nranks = rank_device_.size();
  for (size_t rank = 0; rank < nranks; ++rank) {
    const u32 device = rank_device_[rank], next = rank_device_[(rank + 1) % nranks];
    if (pair == DevicePair{device, next} || pair == DevicePair{next, device}) return true;
  }
  return false;
}

std::vector<DevicePair> Topology::pairs(u32 owner, RankSet touched_by) const {
  std::vector<DevicePair> needed;
  for (u32 rank = 0; rank < rank_device_.size(); ++rank) {
    const DevicePair pair{rank_device_[rank], rank_device_[owner]};
    const bool touches = (touched_by >> rank & 1) != 0;
    if (!touches || pair.from == pair.to) continue;
    if (std::find(needed.begin(), needed.end(), pair) == needed.end()) needed.push_back(pair);
  }
  return needed;
}

bool Topology::on_device(u32 owner, RankSet touched_by,
                         const std::function<bool(DevicePair)>& proven) const {
  const std::vector<DevicePair> needed = pairs(owner, touched_by);
  // First, because a pair that may not be mapped must not be tried either.
  for (const DevicePair pair : needed) {
    if (!may_be_mapped(pair)) return false;
  }
  return std::all_of(needed.begin(), needed.end(), proven);
}

}  // namespace pyparallel
