#include "plan_builder.h"

#include "../check.h"

namespace pyparallel {
namespace {

// From here on a copy engine is worth its 3 to 6 us of start, in which a link moves up to 2 MB: it
// leaves the multiprocessors to the model. A guess: not yet measured on a GPU.
constexpr u64 kEngineBytes = 1 << 20;

// Rows that follow each other without a gap on both sides are one row.
Move rows_move(u32 step, u32 executor, u64 source_pitch, u64 destination_pitch, u64 rows,
               u64 row_bytes) {
  Move move{};
  move.step = step;
  move.executor = executor;
  const bool contiguous = source_pitch == row_bytes && destination_pitch == row_bytes;
  move.rows = contiguous && rows > 0 ? 1 : rows;
  move.row_bytes = contiguous ? rows * row_bytes : row_bytes;
  move.source_pitch = contiguous ? move.row_bytes : source_pitch;
  move.destination_pitch = contiguous ? move.row_bytes : destination_pitch;
  return move;
}

}  // namespace

void PlanBuilder::add(Move move, std::span<const Place> sources,
                      std::span<const Place> destinations) {
  if (move.rows == 0 || move.row_bytes == 0 || destinations.empty()) return;
  move.first_place = static_cast<u32>(plan_.places.size());
  move.nsources = static_cast<u32>(sources.size());
  move.ndestinations = static_cast<u32>(destinations.size());
  plan_.places.insert(plan_.places.end(), sources.begin(), sources.end());
  plan_.places.insert(plan_.places.end(), destinations.begin(), destinations.end());
  plan_.moves.push_back(move);
  plan_.nsteps = std::max(plan_.nsteps, move.step + 1);
}

void PlanBuilder::reserve(u64 nmoves, u64 nplaces) {
  plan_.moves.reserve(nmoves);
  plan_.places.reserve(nplaces);
}

void PlanBuilder::copy(u32 step, u32 executor, Place source, std::span<const Place> destinations,
                       u64 bytes) {
  sum(step, executor, {&source, 1}, destinations, bytes);
}

void PlanBuilder::copy_rows(u32 step, u32 executor, Place source, u64 source_pitch,
                            Place destination, u64 destination_pitch, u64 rows, u64 row_bytes) {
  add(rows_move(step, executor, source_pitch, destination_pitch, rows, row_bytes), {&source, 1},
      {&destination, 1});
}

void PlanBuilder::cross_rows(u32 step, u32 executor, Place source, u64 source_pitch,
                             Place destination, u64 destination_pitch, u64 rows, u64 row_bytes) {
  Move move = rows_move(step, executor, source_pitch, destination_pitch, rows, row_bytes);
  move.engine = move.rows == 1 && move.row_bytes >= kEngineBytes;
  add(move, {&source, 1}, {&destination, 1});
}

void PlanBuilder::engine_copy(u32 step, Place source, Place destination, u64 bytes) {
  Move move = rows_move(step, source.rank, bytes, bytes, 1, bytes);
  move.engine = true;
  add(move, {&source, 1}, {&destination, 1});
}

void PlanBuilder::sum(u32 step, u32 executor, std::span<const Place> sources,
                      std::span<const Place> destinations, u64 bytes) {
  Move move{};
  move.step = step;
  move.executor = executor;
  move.sum = sources.size() > 1;
  move.rows = 1;
  move.row_bytes = move.source_pitch = move.destination_pitch = bytes;
  add(move, sources, destinations);
}

EventPlan PlanBuilder::finish() {
  const auto in_order = [](const Move& a, const Move& b) { return a.step < b.step; };
  if (!std::is_sorted(plan_.moves.begin(), plan_.moves.end(), in_order))
    std::stable_sort(plan_.moves.begin(), plan_.moves.end(), in_order);
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
