#include "plan_builder.h"

#include <tuple>

#include "../check.h"

namespace pyparallel {
namespace {

// From here on a copy engine is worth its 3 to 6 us of start, in which a link moves up to 2 MB: it
// leaves the multiprocessors to the model. A guess: not yet measured on a GPU.
constexpr u64 kEngineBytes = 1 << 20;

// Rows that follow each other without a gap on both sides are one row.
void set_rows(Move& move, u64 source_pitch, u64 destination_pitch, u64 rows, u64 row_bytes) {
  const bool contiguous = source_pitch == row_bytes && destination_pitch == row_bytes;
  move.rows = contiguous ? 1 : rows;
  move.row_bytes = contiguous ? rows * row_bytes : row_bytes;
  move.source_pitch = contiguous ? move.row_bytes : source_pitch;
  move.destination_pitch = contiguous ? move.row_bytes : destination_pitch;
}

}  // namespace

// The caller fills in the rest where the move lies: a copy of what was just stored in pieces waits
// for the stores, which takes longer than all else here.
Move& PlanBuilder::add(u32 step, u32 executor, std::span<const Place> sources,
                       std::span<const Place> destinations) {
  Move& move = plan_.moves.emplace_back();
  move.step = step;
  move.executor = executor;
  move.sum = sources.size() > 1;
  move.first_place = static_cast<u32>(plan_.places.size());
  move.nsources = static_cast<u32>(sources.size());
  move.ndestinations = static_cast<u32>(destinations.size());
  for (const Place& source : sources) plan_.places.push_back(source);
  for (const Place& destination : destinations) plan_.places.push_back(destination);
  plan_.nsteps = std::max(plan_.nsteps, step + 1);
  return move;
}

void PlanBuilder::reserve(u64 nmoves, u64 nplaces) {
  plan_.moves.reserve(nmoves);
  plan_.places.reserve(nplaces);
}

void PlanBuilder::copy(u32 step, u32 executor, const Place& source,
                       std::span<const Place> destinations, u64 bytes) {
  sum(step, executor, {&source, 1}, destinations, bytes);
}

void PlanBuilder::copy_rows(u32 step, u32 executor, const Place& source, u64 source_pitch,
                            const Place& destination, u64 destination_pitch, u64 rows,
                            u64 row_bytes) {
  if (rows == 0 || row_bytes == 0) return;
  set_rows(add(step, executor, {&source, 1}, {&destination, 1}), source_pitch, destination_pitch,
           rows, row_bytes);
}

void PlanBuilder::cross_rows(u32 step, u32 executor, const Place& source, u64 source_pitch,
                             const Place& destination, u64 destination_pitch, u64 rows,
                             u64 row_bytes) {
  if (rows == 0 || row_bytes == 0) return;
  Move& move = add(step, executor, {&source, 1}, {&destination, 1});
  set_rows(move, source_pitch, destination_pitch, rows, row_bytes);
  move.engine = move.rows == 1 && move.row_bytes >= kEngineBytes;
}

void PlanBuilder::engine_copy(u32 step, const Place& source, const Place& destination, u64 bytes) {
  if (bytes == 0) return;
  Move& move = add(step, source.rank, {&source, 1}, {&destination, 1});
  set_rows(move, bytes, bytes, 1, bytes);
  move.engine = true;
}

void PlanBuilder::sum(u32 step, u32 executor, std::span<const Place> sources,
                      std::span<const Place> destinations, u64 bytes) {
  if (bytes == 0 || destinations.empty()) return;
  set_rows(add(step, executor, sources, destinations), bytes, bytes, 1, bytes);
}

EventPlan PlanBuilder::finish() {
  const auto in_order = [](const Move& a, const Move& b) {
    return std::tie(a.step, a.executor, a.engine) < std::tie(b.step, b.executor, b.engine);
  };
  if (!std::is_sorted(plan_.moves.begin(), plan_.moves.end(), in_order))
    std::stable_sort(plan_.moves.begin(), plan_.moves.end(), in_order);
  const auto staged = [](const Place& place) { return place.memory == Memory::kStage; };
  plan_.staged = std::any_of(plan_.places.begin(), plan_.places.end(), staged);
  return std::move(plan_);
}

std::vector<u32> other_ranks(u32 nranks, u32 rank) {
  std::vector<u32> others;
  for (u32 other = 0; other < nranks; ++other) {
    if (other != rank) others.push_back(other);
  }
  return others;
}

std::vector<Run> find_runs(std::span<const Segment> segments, std::span<const u32> present,
                           Range window, u64 gap) {
  std::vector<Run> runs;
  visit_segments(segments, window, [&](u32 k, Range range) {
    const u32 ranks = present.empty() ? 0 : present[k];
    const bool joins = !runs.empty() && runs.back().present == ranks &&
                       range.begin - runs.back().range.end() <= gap;
    if (joins) {
      runs.back().range.bytes = range.end() - runs.back().range.begin;
    } else {
      runs.push_back({range, ranks});
    }
  });
  return runs;
}

void check_staging(Staging staging, u32 element_bytes) {
  PP_CHECK(element_bytes > 0 && kUnit % element_bytes == 0, "plan: elements of ", element_bytes,
           " bytes do not divide ", kUnit);
  PP_CHECK(staging.direct || (staging.slot_bytes > 0 && staging.slot_bytes % kUnit == 0),
           "plan: stage slots of ", staging.slot_bytes, " bytes are not a multiple of ", kUnit);
}

}  // namespace pyparallel
