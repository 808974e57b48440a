// The selection table: what is taken where, that defaults keep the rank order, overrides and their
// errors, the description.
#include "selection.h"

#include "testing.h"

using namespace pyparallel;

namespace {

constexpr u64 kMiB = 1 << 20;

std::string_view taken(const Selection& selection, Request request) {
  return selection.choose(request, "auto").name;
}

Request broadcast(u64 bytes) { return {Collective::kBroadcast, bytes, 1, true, true}; }

std::string refused(std::string_view overrides) {
  try {
    const Selection selection(Fabric::kHost, 2, overrides);
  } catch (const ArgumentError& error) {
    return error.what();
  }
  return "nothing";
}

}  // namespace

TEST(defaults_keep_the_rank_order_and_run_where_they_are_asked_for) {
  for (u32 fabric = 0; fabric <= static_cast<u32>(Fabric::kLimited); ++fabric) {
    for (u32 nranks = 1; nranks <= kMaxRanks; ++nranks) {
      const Selection selection(static_cast<Fabric>(fabric), nranks, "");
      for (u32 c = 0; c < kCollectives; ++c) {
        for (u64 bytes = 1; bytes < u64{1} << 40; bytes *= 2) {
          for (const u32 element_bytes : {2u, 4u, 8u}) {
            for (const u32 flags : {0u, 1u, 2u, 3u}) {
              const bool one_piece = (flags & 1) != 0, may_spin = (flags & 2) != 0;
              const auto collective = static_cast<Collective>(c);
              const Algorithm& chosen =
                  selection.choose({collective, bytes, element_bytes, one_piece, may_spin}, "auto");
              EXPECT(chosen.collective == collective, chosen.name);
              EXPECT(chosen.keeps_rank_order(element_bytes), chosen.name, ", ", element_bytes);
              EXPECT(!chosen.flag_ordered || (one_piece && may_spin), chosen.name);
              EXPECT(!chosen.flag_ordered || fabric != static_cast<u32>(Fabric::kHost),
                     chosen.name);
            }
          }
        }
      }
    }
  }
}

TEST(the_table_depends_on_fabric_ranks_and_size) {
  const Selection host(Fabric::kHost, 8, ""), eight(Fabric::kSwitch, 8, "");
  const Selection pair(Fabric::kSwitch, 2, ""), bus(Fabric::kBus, 4, "");
  const Selection limited(Fabric::kLimited, 12, "");
  EXPECT(taken(host, broadcast(1000 * kMiB)) == "push");
  EXPECT(taken(pair, broadcast(1000 * kMiB)) == "push");
  EXPECT(taken(eight, broadcast(1)) == "ll");
  EXPECT(taken(eight, {Collective::kBroadcast, 1, 1, false, true}) == "push");
  EXPECT(taken(eight, broadcast(kMiB - 1)) == "push");
  EXPECT(taken(eight, broadcast(kMiB)) == "two_hop");
  EXPECT(taken(bus, broadcast(1000)) == "ll");
  EXPECT(taken(bus, {Collective::kReduceAdd, 1000, 2, true, true}) == "ll");
  EXPECT(taken(pair, {Collective::kAllReduce, 32767, 2, true, true}) == "one_shot_ll");
  EXPECT(taken(pair, {Collective::kAllReduce, 32768, 2, true, true}) == "two_shot");
  EXPECT(taken(bus, broadcast(32768)) == "push");
  EXPECT(taken(bus, broadcast(8 * kMiB)) == "chain");
  EXPECT(taken(bus, broadcast(64 * kMiB)) == "copy_chain");
  EXPECT(taken(bus, {Collective::kBroadcast, 8 * kMiB, 1, false, true}) == "copy_chain");
  EXPECT(taken(bus, {Collective::kReduceAdd, 8 * kMiB, 4, true, true}) == "chain");
  EXPECT(taken(bus, {Collective::kReduceAdd, 8 * kMiB, 4, true, false}) == "copy_chain");
  EXPECT(taken(bus, {Collective::kReduceAdd, 8 * kMiB, 2, true, true}) == "owner");
  EXPECT(taken(limited, {Collective::kAllReduce, kMiB, 4, true, true}) == "copy_chain");
  EXPECT(taken(limited, {Collective::kAllReduce, kMiB, 2, true, true}) == "two_shot");
}

TEST(overrides) {
  const Selection selection(Fabric::kHost, 4, "broadcast:chain,all_reduce:ring");
  EXPECT(taken(selection, broadcast(4)) == "chain");
  EXPECT(taken(selection, {Collective::kReduceAdd, 4, 4, true, true}) == "owner");
  EXPECT(taken(selection, {Collective::kAllReduce, 4, 2, true, true}) == "ring");
  // Where it cannot do what is asked, the table decides.
  EXPECT(taken(selection, {Collective::kBroadcast, 4, 1, false, true}) == "push");
  EXPECT(taken(selection, {Collective::kBroadcast, 4, 1, true, false}) == "push");
  const Selection small(Fabric::kHost, 4, "broadcast:ll");
  EXPECT(taken(small, broadcast(65536)) == "ll" && taken(small, broadcast(65537)) == "push");
  // A name in the call counts more.
  EXPECT(selection.choose(broadcast(4), "two_hop").name == std::string_view("two_hop"));
  EXPECT(taken(Selection(Fabric::kHost, 4, "broadcast:auto"), broadcast(4)) == "push");
}

TEST(overrides_that_make_no_sense_are_refused) {
  EXPECT(refused("broadcast:chain,") == "nothing", refused("broadcast:chain,"));
  EXPECT(refused("chain") ==
             "PYPARALLEL_ALGO: 'chain' is not of the form collective:algorithm, as in "
             "broadcast:chain",
         refused("chain"));
  EXPECT(refused("reduce:chain") ==
             "PYPARALLEL_ALGO: there is no collective 'reduce' with several algorithms; choose "
             "broadcast, reduce_add or all_reduce, as in broadcast:chain,reduce_add:owner",
         refused("reduce:chain"));
  EXPECT(refused("reduce_add:chain,broadcast:ring")
             .starts_with("PYPARALLEL_ALGO: broadcast: unknown algorithm 'ring'; choose auto, "
                          "push, "),
         refused("reduce_add:chain,broadcast:ring"));
}

TEST(description) {
  const std::string host = Selection(Fabric::kHost, 4, "").describe(true);
  EXPECT(host == "broadcast: push\nreduce_add: owner\nall_reduce: two_shot\n", host);
  const std::string bus = Selection(Fabric::kBus, 4, "").describe(false);
  EXPECT(bus ==
             "broadcast: push, from 8 MiB copy_chain\n"
             "reduce_add: owner, from 8 MiB copy_chain; 16-bit types: owner\n"
             "all_reduce: two_shot, from 8 MiB copy_chain; 16-bit types: two_shot\n",
         bus);
  const std::string chosen = Selection(Fabric::kHost, 4, "broadcast:chain").describe(true);
  EXPECT(chosen.starts_with("broadcast: chain; several tensors: push\n"), chosen);
}

TEST_MAIN()
