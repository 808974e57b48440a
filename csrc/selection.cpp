// The table, and how it is read.
#include "selection.h"

#include <algorithm>
#include <vector>

#include "check.h"

namespace pyparallel {
namespace {

constexpr u64 kKiB = 1 << 10, kMiB = 1 << 20;

struct Row {
  Collective collective;
  Fabric fabric;
  u32 min_ranks;
  u64 from_bytes;
  const char* event_ordered;
  const char* flag_ordered;  // preferred where it can run; null: none
};

// Of the rows that fit, the last one counts; where none does, the collective's first algorithm.
// Virtual devices and one GPU have no rows: threads or blocks that wait for others of the same
// device only lose there. Seeds from models and from what others published; not yet measured on a
// GPU.
//
// Small messages go to everybody at once by the LL protocol, which has the fewest and cheapest
// steps and twice the bytes.
// Switch: the root's port carries n - 1 copies in a push and one in two hops, which take two steps
// more, so sizes are about 6 MiB / (n - 2).
// Bus: a rank has one link both ways, so everything goes from neighbour to neighbour, in slices
// where kernels may wait for each other; large payloads by copy engines, which leave the GPUs to
// the model.
// Limited: only neighbours on the ring are mapped. What is not a chain goes through host memory,
// with fewer steps.
constexpr Row kTable[] = {
    {Collective::kBroadcast, Fabric::kSwitch, 2, 0, "push", "ll"},
    {Collective::kBroadcast, Fabric::kSwitch, 2, 32 * kKiB, "push", nullptr},
    {Collective::kBroadcast, Fabric::kSwitch, 3, 6 * kMiB, "two_hop", nullptr},
    {Collective::kBroadcast, Fabric::kSwitch, 5, 2 * kMiB, "two_hop", nullptr},
    {Collective::kBroadcast, Fabric::kSwitch, 8, 1 * kMiB, "two_hop", nullptr},
    {Collective::kBroadcast, Fabric::kBus, 2, 0, "push", "ll"},
    {Collective::kBroadcast, Fabric::kBus, 2, 32 * kKiB, "push", nullptr},
    {Collective::kBroadcast, Fabric::kBus, 3, 64 * kKiB, "push", "chain"},
    {Collective::kBroadcast, Fabric::kBus, 3, 8 * kMiB, "copy_chain", "chain"},
    {Collective::kBroadcast, Fabric::kBus, 3, 64 * kMiB, "copy_chain", nullptr},
    {Collective::kBroadcast, Fabric::kLimited, 3, 256 * kKiB, "copy_chain", "chain"},

    {Collective::kReduceAdd, Fabric::kSwitch, 2, 0, "owner", "ll"},
    {Collective::kReduceAdd, Fabric::kSwitch, 2, 32 * kKiB, "owner", nullptr},
    {Collective::kReduceAdd, Fabric::kBus, 2, 0, "owner", "ll"},
    {Collective::kReduceAdd, Fabric::kBus, 2, 32 * kKiB, "owner", nullptr},
    {Collective::kReduceAdd, Fabric::kBus, 3, 64 * kKiB, "owner", "chain"},
    {Collective::kReduceAdd, Fabric::kBus, 3, 8 * kMiB, "copy_chain", "chain"},
    {Collective::kReduceAdd, Fabric::kLimited, 3, 256 * kKiB, "copy_chain", nullptr},

    {Collective::kAllReduce, Fabric::kSwitch, 2, 0, "two_shot", "one_shot_ll"},
    {Collective::kAllReduce, Fabric::kSwitch, 2, 32 * kKiB, "two_shot", nullptr},
    {Collective::kAllReduce, Fabric::kBus, 2, 0, "two_shot", "one_shot_ll"},
    {Collective::kAllReduce, Fabric::kBus, 2, 32 * kKiB, "two_shot", nullptr},
    {Collective::kAllReduce, Fabric::kBus, 3, 8 * kMiB, "copy_chain", nullptr},
    {Collective::kAllReduce, Fabric::kLimited, 3, 256 * kKiB, "copy_chain", nullptr},
};

bool can_run(const Algorithm& algorithm, const Request& request) {
  return request.bytes <= algorithm.max_bytes &&
         (!algorithm.flag_ordered || (request.one_piece && request.may_spin));
}

Collective parse_collective(std::string_view name) {
  for (u32 c = 0; c < kCollectives; ++c) {
    if (name == collective_name(static_cast<Collective>(c))) return static_cast<Collective>(c);
  }
  throw ArgumentError(message("PYPARALLEL_ALGO: there is no collective '", name,
                              "' with several algorithms; choose broadcast, reduce_add or "
                              "all_reduce, as in broadcast:chain,reduce_add:owner"));
}

// "4 KiB", "8 MiB".
std::string size_text(u64 bytes) {
  if (bytes % kMiB == 0) return message(bytes / kMiB, " MiB");
  return bytes % kKiB == 0 ? message(bytes / kKiB, " KiB") : message(bytes, " B");
}

}  // namespace

Selection::Selection(Fabric fabric, u32 nranks, std::string_view overrides)
    : fabric_(fabric), nranks_(nranks) {
  while (!overrides.empty()) {
    const std::string_view item = overrides.substr(0, overrides.find(','));
    overrides.remove_prefix(std::min(item.size() + 1, overrides.size()));
    const size_t colon = item.find(':');
    PP_CHECK_ARG(colon != std::string_view::npos, "PYPARALLEL_ALGO: '", item,
                 "' is not of the form collective:algorithm, as in broadcast:chain");
    const Collective collective = parse_collective(item.substr(0, colon));
    const std::string_view name = item.substr(colon + 1);
    try {
      overrides_[static_cast<u32>(collective)] =
          name == "auto" ? nullptr : &find_algorithm(collective, name);
    } catch (const ArgumentError& error) {
      throw ArgumentError(message("PYPARALLEL_ALGO: ", error.what()));
    }
  }
}

const Algorithm& Selection::choose(const Request& request, std::string_view requested) const {
  if (requested != "auto") return find_algorithm(request.collective, requested);
  const Algorithm* override = overrides_[static_cast<u32>(request.collective)];
  return override && can_run(*override, request) ? *override : choose_default(request);
}

const Algorithm& Selection::choose_default(const Request& request) const {
  const Row* found = nullptr;
  for (const Row& row : kTable) {
    if (row.collective == request.collective && row.fabric == fabric_ && row.min_ranks <= nranks_ &&
        row.from_bytes <= request.bytes)
      found = &row;
  }
  if (found) {
    for (const char* name : {found->flag_ordered, found->event_ordered}) {
      if (!name) continue;
      const Algorithm& algorithm = find_algorithm(request.collective, name);
      if (can_run(algorithm, request) && algorithm.keeps_rank_order(request.element_bytes))
        return algorithm;
    }
  }
  return algorithms_of(request.collective).front();
}

std::string Selection::describe(Request request) const {
  std::vector<u64> sizes{0};
  for (const Row& row : kTable) sizes.push_back(row.from_bytes);
  std::sort(sizes.begin(), sizes.end());
  std::string text;
  const Algorithm* last = nullptr;
  for (const u64 size : sizes) {
    request.bytes = size;
    const Algorithm& chosen = choose(request, "auto");
    if (&chosen == last) continue;
    text += last ? message(", from ", size_text(size), " ", chosen.name) : chosen.name;
    last = &chosen;
  }
  return text;
}

std::string Selection::describe(bool may_spin) const {
  std::string text;
  for (u32 c = 0; c < kCollectives; ++c) {
    const auto collective = static_cast<Collective>(c);
    const std::string usual = describe(Request{collective, 0, 4, true, may_spin});
    text += message(collective_name(collective), ": ", usual);
    const std::string several = describe(Request{collective, 0, 4, false, may_spin});
    if (collective != Collective::kAllReduce && several != usual)
      text += message("; several tensors: ", several);
    const std::string narrow = describe(Request{collective, 0, 2, true, may_spin});
    if (collective != Collective::kBroadcast && narrow != usual)
      text += message("; 16-bit types: ", narrow);
    text += '\n';
  }
  return text;
}

}  // namespace pyparallel
