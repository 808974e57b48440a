// The collectives: checks, then a plan or a flag-ordered launch.
#include "communicator.h"

#include <array>

#include "arguments.h"
#include "check.h"
#include "launch_lock.h"

namespace pyparallel {
namespace {

constexpr u64 kMaxTimeoutMs = 1'000'000'000;  // 11 days; leaves room to count in ns
constexpr u64 kSlotUnit = 128;                // slots are cut at cache lines of a GPU

bool is_power_of_two(u64 value) { return value != 0 && (value & (value - 1)) == 0; }

u64 total_bytes(std::span<const Segment> segments) {
  u64 bytes = 0;
  for (const Segment& segment : segments) bytes += segment.bytes;
  return bytes;
}

// Kernels load whole elements; the host's loops take any address.
void check_aligned(std::string_view operation, const Backend& backend, const void* address,
                   DType dtype) {
  PP_CHECK_ARG(
      backend.direct() || reinterpret_cast<std::uintptr_t>(address) % element_bytes(dtype) == 0,
      operation, ": address ", address, " is not a multiple of the ", element_bytes(dtype),
      " bytes of ", dtype_name(dtype));
}

// Scatter and gather. Returns the ranks that are left out: they have no piece, or nothing in it.
u32 check_pieces(std::string_view operation, std::string_view what, u32 nranks, u32 root, u64 rows,
                 u64 pitch, std::span<const Share> shares, std::span<const void* const> pieces,
                 std::span<const StreamHandle> streams) {
  check_root(operation, root, nranks);
  check_one_per_rank(operation, "shares", shares.size(), nranks);
  check_one_per_rank(operation, what, pieces.size(), nranks);
  check_one_per_rank(operation, "streams", streams.size(), nranks);
  check_shares(operation, rows, pitch, shares);
  u32 skip = 0;
  for (u32 rank = 0; rank < nranks; ++rank) {
    if (!pieces[rank] || rows == 0 || shares[rank].bytes == 0) skip |= 1u << rank;
  }
  return skip;
}

}  // namespace

void check_communicator(u32 nranks, const CommunicatorOptions& options) {
  PP_CHECK_ARG(nranks >= 1 && nranks <= kMaxRanks, "a communicator has 1 to ", kMaxRanks,
               " ranks, not ", nranks);
  PP_CHECK_ARG(options.timeout_ms >= 1 && options.timeout_ms <= kMaxTimeoutMs, "timeout_ms is ",
               options.timeout_ms, ", but must be from 1 to ", kMaxTimeoutMs);
  PP_CHECK_ARG(options.nchannels >= 1, "nchannels is 0, but an operation needs a channel");
  PP_CHECK_ARG(is_power_of_two(options.slots) && options.slots >= 2, "slots is ", options.slots,
               ", but must be a power of two from 2 on");
  PP_CHECK_ARG(options.slot_bytes != 0 && options.slot_bytes % kSlotUnit == 0, "slot_bytes is ",
               options.slot_bytes, ", but must be a multiple of ", kSlotUnit);
  PP_CHECK_ARG(options.stage_slot_bytes != 0 && options.stage_slot_bytes % kSlotUnit == 0,
               "stage_slot_bytes is ", options.stage_slot_bytes, ", but must be a multiple of ",
               kSlotUnit);
}

Communicator::Communicator(std::unique_ptr<Backend> backend, u32 nranks,
                           CommunicatorOptions options)
    : backend_(std::move(backend)),
      nranks_(nranks),
      options_(options),
      selection_(backend_->fabric(), nranks, options.algorithms) {
  check_communicator(nranks, options);
  plan_runner_ = std::make_unique<PlanRunner>(*backend_, nranks, options.stage_slot_bytes);
}

void Communicator::broadcast(u32 root, std::span<const void* const> sources,
                             std::span<const Segment> segments, std::span<void* const> destinations,
                             std::span<const StreamHandle> streams, std::string_view algorithm) {
  const auto lock = lock_launches();
  check_open();
  check_root("broadcast", root, nranks_);
  check_one_per_rank("broadcast", "destinations", destinations.size(), nranks_);
  check_one_per_rank("broadcast", "streams", streams.size(), nranks_);
  check_segments("broadcast", segments);
  PP_CHECK_ARG(sources.size() == segments.size(), "broadcast: got ", sources.size(),
               " sources for ", segments.size(), " segments");
  for (u64 k = 0; k < segments.size(); ++k) {
    PP_CHECK_ARG(sources[k] || segments[k].bytes == 0, "broadcast: source ", k,
                 " is null, but has ", segments[k].bytes, " bytes");
  }
  const u64 bytes = total_bytes(segments);
  for (u32 rank = 0; rank < nranks_; ++rank) {
    PP_CHECK_ARG(destinations[rank] || rank == root || bytes == 0, "broadcast: rank ", rank,
                 " has no destination for ", bytes, " bytes");
  }
  const bool one_piece = segments.size() <= 1;
  const Algorithm& chosen = choose(Collective::kBroadcast, bytes, 1, one_piece, streams, algorithm);
  if (!chosen.flag_ordered) {
    if (bytes == 0 || nranks_ == 1) return raise_failure();
    const EventPlan& plan = broadcast_plan_.get(
        {chosen.event_algorithm, root, 1, segments, {}}, [&](EventPlan storage) {
          return plan_broadcast(chosen.event_algorithm, nranks_, root, segments,
                                plan_runner_->staging(), std::move(storage));
        });
    return run_plan(plan, {sources, 0, destinations}, DType::kFloat32, streams);
  }
  PP_CHECK_ARG(one_piece, "broadcast: ", chosen.name, " takes one segment, not ", segments.size());
  FlagBuffers buffers;
  for (u32 rank = 0; rank < nranks_ && bytes != 0; ++rank) {
    if (rank == root) {
      buffers.inputs[rank] = static_cast<const u8*>(sources[0]);
    } else {
      buffers.outputs[rank] = static_cast<u8*>(destinations[rank]) + segments[0].offset;
    }
  }
  run_flagged(Collective::kBroadcast, chosen, root, bytes, DType::kFloat32, buffers, streams);
}

void Communicator::reduce_add(u32 root, std::span<const void* const> sources,
                              std::span<const Segment> segments, void* destination, DType dtype,
                              std::span<const StreamHandle> streams, std::string_view algorithm) {
  const auto lock = lock_launches();
  check_open();
  const Sum sum = check_sum(root, sources, segments, destination, dtype, streams, algorithm);
  const u64 nsegments = segments.size();
  if (!sum.algorithm->flag_ordered) {
    if (sum.bytes == 0) return raise_failure();
    std::array<void*, kMaxRanks> outputs{};
    outputs[root] = destination;
    const u32 element = element_bytes(dtype);
    const EventAlgorithm event_algorithm = sum.algorithm->event_algorithm;
    const EventPlan& plan = sum_plan_.get(
        {event_algorithm, root, element, segments, sum.present}, [&](EventPlan storage) {
          return plan_reduce_add(event_algorithm, nranks_, root, segments, sum.present, element,
                                 plan_runner_->staging(), std::move(storage));
        });
    return run_plan(plan, {sources, nsegments, outputs}, dtype, streams);
  }
  FlagBuffers buffers;
  for (u32 rank = 0; rank < nranks_ && sum.bytes != 0; ++rank)
    buffers.inputs[rank] = static_cast<const u8*>(sources[rank]);
  if (sum.bytes != 0) buffers.outputs[root] = static_cast<u8*>(destination) + segments[0].offset;
  run_flagged(Collective::kReduceAdd, *sum.algorithm, root, sum.bytes, dtype, buffers, streams);
}

Communicator::Sum Communicator::check_sum(u32 root, std::span<const void* const> sources,
                                          std::span<const Segment> segments,
                                          const void* destination, DType dtype,
                                          std::span<const StreamHandle> streams,
                                          std::string_view algorithm) const {
  check_root("reduce_add", root, nranks_);
  check_one_per_rank("reduce_add", "streams", streams.size(), nranks_);
  check_segments("reduce_add", segments);
  check_elements("reduce_add", segments, dtype);
  const u64 nsegments = segments.size();
  PP_CHECK_ARG(sources.size() == nranks_ * nsegments, "reduce_add: got ", sources.size(),
               " sources for ", nranks_, " ranks with ", nsegments, " segments");
  Sum sum{total_bytes(segments), std::vector<u32>(nsegments, 0), nullptr};
  bool complete = true;
  for (u64 k = 0; k < nsegments; ++k) {
    for (u32 rank = 0; rank < nranks_; ++rank) {
      const void* source = sources[rank * nsegments + k];
      check_aligned("reduce_add", *backend_, source, dtype);
      if (source || segments[k].bytes == 0) sum.present[k] |= 1u << rank;
    }
    PP_CHECK_ARG(sum.present[k] != 0, "reduce_add: no rank has segment ", k, " of ",
                 segments[k].bytes, " bytes");
    complete = complete && sum.present[k] == (1u << nranks_) - 1;
  }
  PP_CHECK_ARG(destination || sum.bytes == 0, "reduce_add: the destination is null, but gets ",
               sum.bytes, " bytes");
  check_aligned("reduce_add", *backend_, destination, dtype);
  const bool one_piece = nsegments <= 1 && complete;
  sum.algorithm = &choose(Collective::kReduceAdd, sum.bytes, element_bytes(dtype), one_piece,
                          streams, algorithm);
  if (sum.algorithm->flag_ordered) {
    PP_CHECK_ARG(nsegments <= 1, "reduce_add: ", sum.algorithm->name, " takes one segment, not ",
                 nsegments);
    PP_CHECK_ARG(complete, "reduce_add: ", sum.algorithm->name, " needs a source of every rank");
  }
  return sum;
}

void Communicator::all_reduce(std::span<const void* const> sources,
                              std::span<void* const> destinations, u64 count, DType dtype,
                              std::span<const StreamHandle> streams, std::string_view algorithm) {
  const auto lock = lock_launches();
  check_open();
  check_one_per_rank("all_reduce", "sources", sources.size(), nranks_);
  check_one_per_rank("all_reduce", "destinations", destinations.size(), nranks_);
  check_one_per_rank("all_reduce", "streams", streams.size(), nranks_);
  PP_CHECK_ARG(count < (u64{1} << 60), "all_reduce: ", count, " elements are too many");
  for (u32 rank = 0; rank < nranks_; ++rank) {
    PP_CHECK_ARG((sources[rank] && destinations[rank]) || count == 0, "all_reduce: rank ", rank,
                 " has no ", sources[rank] ? "destination" : "source", " for ", count, " elements");
    check_aligned("all_reduce", *backend_, sources[rank], dtype);
    check_aligned("all_reduce", *backend_, destinations[rank], dtype);
  }
  const u64 bytes = count * element_bytes(dtype);
  const Algorithm& chosen =
      choose(Collective::kAllReduce, bytes, element_bytes(dtype), true, streams, algorithm);
  if (!chosen.flag_ordered) {
    if (bytes == 0) return raise_failure();
    const EventPlan plan = plan_all_reduce(chosen.event_algorithm, nranks_, bytes,
                                           element_bytes(dtype), plan_runner_->staging());
    return run_plan(plan, {sources, 1, destinations}, dtype, streams);
  }
  FlagBuffers buffers;
  for (u32 rank = 0; rank < nranks_; ++rank) {
    buffers.inputs[rank] = static_cast<const u8*>(sources[rank]);
    buffers.outputs[rank] = static_cast<u8*>(destinations[rank]);
  }
  run_flagged(Collective::kAllReduce, chosen, 0, bytes, dtype, buffers, streams);
}

void Communicator::scatter(u32 root, const void* source, u64 rows, u64 pitch,
                           std::span<const Share> shares, std::span<void* const> destinations,
                           std::span<const StreamHandle> streams) {
  const auto lock = lock_launches();
  check_open();
  const u32 skip = check_pieces("scatter", "destinations", nranks_, root, rows, pitch, shares,
                                destinations, streams);
  if (skip == (1u << nranks_) - 1) return raise_failure();
  PP_CHECK_ARG(source, "scatter: the source of ", rows, " rows of ", pitch, " bytes is null");
  const EventPlan plan =
      plan_scatter(nranks_, root, rows, pitch, shares, skip, plan_runner_->staging());
  run_plan(plan, {{&source, 1}, 0, destinations}, DType::kFloat32, streams);
}

void Communicator::gather(u32 root, std::span<const void* const> sources, u64 rows, u64 pitch,
                          std::span<const Share> shares, void* destination,
                          std::span<const StreamHandle> streams) {
  const auto lock = lock_launches();
  check_open();
  const u32 skip =
      check_pieces("gather", "sources", nranks_, root, rows, pitch, shares, sources, streams);
  check_disjoint("gather", shares, skip);
  if (skip == (1u << nranks_) - 1) return raise_failure();
  PP_CHECK_ARG(destination, "gather: the destination of ", rows, " rows of ", pitch,
               " bytes is null");
  std::array<void*, kMaxRanks> outputs{};
  outputs[root] = destination;
  const EventPlan plan =
      plan_gather(nranks_, root, rows, pitch, shares, skip, plan_runner_->staging());
  run_plan(plan, {sources, 1, outputs}, DType::kFloat32, streams);
}

}  // namespace pyparallel
