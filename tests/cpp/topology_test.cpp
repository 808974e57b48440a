// Classes of fabrics, and where memory that several ranks touch lies.
#include "topology.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "testing.h"

using namespace pyparallel;

namespace {

const auto kNoLinks = [](DevicePair) { return false; };
const auto kAllLinks = [](DevicePair) { return true; };

std::vector<u32> one_device_a_rank(u32 n) {
  std::vector<u32> devices(n);
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

bool same(const std::vector<DevicePair>& got, std::vector<DevicePair> want) {
  return std::is_permutation(got.begin(), got.end(), want.begin(), want.end());
}

}  // namespace

TEST(fabrics_have_classes) {
  const auto fabric = [](std::vector<u32> devices, auto links) {
    return std::string(fabric_name(Topology(devices, links).fabric()));
  };
  EXPECT(fabric({0, 0, 0}, kNoLinks) == "one_device");
  EXPECT(fabric({0, 1}, kAllLinks) == "switch");
  EXPECT(fabric({0, 1}, kNoLinks) == "bus");
  EXPECT(fabric({0, 1, 2}, [](DevicePair pair) { return pair.from + pair.to != 3; }) == "bus",
         "one pair without a link is enough");
  EXPECT(fabric(one_device_a_rank(9), kNoLinks) == "bus", "eight peers are allowed");
  EXPECT(fabric(one_device_a_rank(10), kNoLinks) == "limited");
  EXPECT(fabric(one_device_a_rank(16), kAllLinks) == "switch");
  EXPECT(std::string(fabric_name(Fabric::kHost)) == "host");
}

TEST(pairs_are_those_of_the_ranks_that_touch) {
  const Topology topology(std::vector<u32>{0, 1, 0, 2}, kNoLinks);
  EXPECT(same(topology.pairs(0, 0), {}));
  EXPECT(same(topology.pairs(0, all_ranks(4)), {{1, 0}, {2, 0}}), "rank 2 is on the same device");
  EXPECT(same(topology.pairs(1, 0b0101), {{0, 1}}), "two ranks of one device make one pair");
  EXPECT(same(topology.pairs(3, 0b1000), {}), "an owner reaches its own memory");
}

TEST(memory_is_on_the_device_if_every_pair_is_proven) {
  for (u32 n = 2; n <= 16; ++n) {
    const Topology topology(one_device_a_rank(n), kAllLinks);
    for (u32 owner = 0; owner < n; ++owner) {
      for (u32 bad = 0; bad < n; ++bad) {
        std::set<u32> asked;
        const auto proven = [&](DevicePair pair) {
          EXPECT(pair.to == owner && pair.from != owner, pair.from, " ", pair.to);
          asked.insert(pair.from);
          return pair.from != bad;
        };
        EXPECT(topology.on_device(owner, all_ranks(n), proven) == (bad == owner));
        // Ranks that do not touch are not asked about.
        EXPECT(topology.on_device(owner, all_ranks(n) & ~(1u << bad), proven));
        asked.clear();
        EXPECT(topology.on_device(owner, 1u << owner, proven) && asked.empty());
      }
    }
  }
}

TEST(above_the_peer_limit_only_ring_neighbours_are_mapped) {
  constexpr u32 kDevices = 12;
  const Topology topology(one_device_a_rank(kDevices), kNoLinks);
  for (u32 owner = 0; owner < kDevices; ++owner) {
    for (u32 rank = 0; rank < kDevices; ++rank) {
      int asked = 0;
      const auto proven = [&](DevicePair) { return ++asked > 0; };
      const u32 distance = (rank + kDevices - owner) % kDevices;
      const bool near = distance <= 1 || distance == kDevices - 1;
      EXPECT(topology.on_device(owner, 1u << rank, proven) == near, owner, " ", rank);
      EXPECT(asked == (near && rank != owner), "a pair that is not mapped is not tried");
    }
    int asked = 0;
    EXPECT(
        !topology.on_device(owner, all_ranks(kDevices), [&](DevicePair) { return ++asked > 0; }));
    EXPECT(asked == 0, asked);
  }
}

TEST_MAIN()
