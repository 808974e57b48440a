// Checks of what callers pass, shared by the collectives. Each throws ArgumentError with the values
// in the message.
#pragma once
#include <span>
#include <string_view>

#include "dtype.h"
#include "schedule/event_plan.h"

namespace pyparallel {

void check_root(std::string_view operation, u32 root, u32 nranks);
// `what` names the list, in the plural: "sources".
void check_one_per_rank(std::string_view operation, std::string_view what, u64 count, u32 nranks);
// Segments ascend, do not overlap and end below 2^63.
void check_segments(std::string_view operation, std::span<const Segment> segments);
// Offsets and sizes are whole elements.
void check_elements(std::string_view operation, std::span<const Segment> segments, DType dtype);
// Shares lie inside a row, and the matrix ends below 2^63 bytes.
void check_shares(std::string_view operation, u64 rows, u64 pitch, std::span<const Share> shares);
// Shares of the ranks that are not in `skip` do not overlap.
void check_disjoint(std::string_view operation, std::span<const Share> shares, u32 skip);

}  // namespace pyparallel
