// Which devices ranks live on, which pairs of devices may be mapped, and where memory that several
// ranks touch has to lie. Pure: what pairs can do is told by the caller.
#pragma once
#include <functional>
#include <span>
#include <vector>

#include "base.h"

namespace pyparallel {

// What connects the devices of a communicator, as the selection table sees it.
enum class Fabric : u8 {
  kHost,       // virtual devices
  kOneDevice,  // all ranks share one GPU
  kSwitch,     // every pair of GPUs has links of its own speed: NVLink between all, or NVSwitch
  kBus,        // some pair meets on PCIe
  kLimited,    // more GPUs than one of them can map as peers: only ring neighbours are mapped
};

// "host", "one_device", "switch", "bus", "limited".
const char* fabric_name(Fabric fabric);

// A directed pair of devices: kernels of `from` use memory of `to`.
struct DevicePair {
  u32 from, to;
  friend bool operator==(const DevicePair&, const DevicePair&) = default;
};

// Bit r: rank r.
using RankSet = u32;
constexpr RankSet all_ranks(u32 nranks) { return static_cast<RankSet>((u64{1} << nranks) - 1); }

class Topology {
 public:
  // Without a switch a GPU maps at most this many peers; a further one gives
  // cudaErrorTooManyPeers.
  static constexpr u32 kPeerLimit = 8;

  // rank_device[r] is the index of rank r's device, devices counted from 0 in the order in which
  // ranks name them first. has_links(pair): the two devices are joined by more than the bus.
  Topology(std::span<const u32> rank_device, const std::function<bool(DevicePair)>& has_links);

  u32 ndevices() const { return ndevices_; }
  Fabric fabric() const { return fabric_; }

  // The directed pairs that have to work if `touched_by` shall use device memory of rank `owner`.
  // Ranks on the owner's device need none.
  std::vector<DevicePair> pairs(u32 owner, RankSet touched_by) const;

  // Whether memory of rank `owner` can lie on its device: every pair may be mapped and is
  // `proven`. False: it has to lie in pinned host memory. Asks no more about pairs once one has
  // failed.
  bool on_device(u32 owner, RankSet touched_by,
                 const std::function<bool(DevicePair)>& proven) const;

 private:
  bool may_be_mapped(DevicePair pair) const;

  std::vector<u32> rank_device_;
  u32 ndevices_ = 0;
  Fabric fabric_ = Fabric::kOneDevice;
};

}  // namespace pyparallel
