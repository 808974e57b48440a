// Argument checks of the collectives.
#include "arguments.h"

#include "check.h"

namespace pyparallel {
namespace {

constexpr u64 kLargest = u64{1} << 63;

}  // namespace

void check_root(std::string_view operation, u32 root, u32 nranks) {
  PP_CHECK_ARG(root < nranks, operation, ": root is ", root,
               ", but the communicator has ranks 0 to ", nranks - 1);
}

void check_one_per_rank(std::string_view operation, std::string_view what, u64 count, u32 nranks) {
  PP_CHECK_ARG(count == nranks, operation, ": got ", count, " ", what, " for ", nranks, " ranks");
}

void check_segments(std::string_view operation, std::span<const Segment> segments) {
  u64 end = 0;
  for (u64 k = 0; k < segments.size(); ++k) {
    const auto [offset, bytes] = segments[k];
    PP_CHECK_ARG(offset >= end, operation, ": segment ", k, " starts at byte ", offset,
                 ", but segment ", k - 1, " ends at byte ", end);
    PP_CHECK_ARG(offset <= kLargest && bytes <= kLargest - offset, operation, ": segment ", k,
                 " has ", bytes, " bytes at byte ", offset, ", which is past 2^63");
    end = offset + bytes;
  }
}

void check_elements(std::string_view operation, std::span<const Segment> segments, DType dtype) {
  const u32 size = element_bytes(dtype);
  for (u64 k = 0; k < segments.size(); ++k) {
    PP_CHECK_ARG(segments[k].bytes % size == 0 && segments[k].offset % size == 0, operation,
                 ": segment ", k, " has ", segments[k].bytes, " bytes at byte ", segments[k].offset,
                 ", but an element of ", dtype_name(dtype), " has ", size);
  }
}

void check_shares(std::string_view operation, u64 rows, u64 pitch, std::span<const Share> shares) {
  PP_CHECK_ARG(pitch == 0 || rows <= kLargest / pitch, operation, ": ", rows, " rows of ", pitch,
               " bytes are past 2^63");
  for (u64 rank = 0; rank < shares.size(); ++rank) {
    const auto [offset, bytes] = shares[rank];
    PP_CHECK_ARG(offset <= pitch && bytes <= pitch - offset, operation, ": rank ", rank,
                 " has bytes ", offset, " to ", offset + bytes, " of a row, but a row has ", pitch,
                 " bytes");
  }
}

void check_disjoint(std::string_view operation, std::span<const Share> shares, u32 skip) {
  for (u64 b = 0; b < shares.size(); ++b) {
    for (u64 a = 0; a < b; ++a) {
      if ((skip >> a & 1) != 0 || (skip >> b & 1) != 0) continue;
      const bool apart = shares[a].offset + shares[a].bytes <= shares[b].offset ||
                         shares[b].offset + shares[b].bytes <= shares[a].offset;
      PP_CHECK_ARG(apart || shares[a].bytes == 0 || shares[b].bytes == 0, operation,
                   ": the shares of ranks ", a, " and ", b, " overlap at byte ", shares[b].offset,
                   " of a row");
    }
  }
}

}  // namespace pyparallel
