// Event-ordered scatter and gather: columns of a matrix on the root against contiguous pieces on
// the ranks.
#include "plan_builder.h"

namespace pyparallel {
namespace {

// Columns [column, column + bytes) of `rows` rows of a share, small enough for a slot.
struct Piece {
  u64 row, rows, column, bytes;
};

// As many whole rows as a slot holds; a row that is longer than a slot is cut.
std::vector<Piece> cut_share(u64 rows, u64 share_bytes, u64 slot_bytes) {
  std::vector<Piece> pieces;
  if (share_bytes <= slot_bytes) {
    const u64 group = slot_bytes / share_bytes;
    for (u64 row = 0; row < rows; row += group)
      pieces.push_back({row, min_u64(group, rows - row), 0, share_bytes});
    return pieces;
  }
  const Range whole{0, share_bytes};
  for (u64 row = 0; row < rows; ++row) {
    for (u64 i = 0; i < piece_count(whole, slot_bytes); ++i) {
      const Range columns = piece_range(whole, slot_bytes, i);
      pieces.push_back({row, 1, columns.begin, columns.bytes});
    }
  }
  return pieces;
}

struct StridedPlan {
  u32 root;
  u64 pitch;
  bool scatter;  // the matrix is the root's input; otherwise its output
  StageSlots slots;
  PlanBuilder builder;

  Place matrix(const Share& share, const Piece& piece) const {
    return {root, scatter ? Memory::kInput : Memory::kOutput, 0,
            piece.row * pitch + share.offset + piece.column};
  }
  Place contiguous(u32 rank, const Share& share, const Piece& piece) const {
    return {rank, scatter ? Memory::kOutput : Memory::kInput, 0,
            piece.row * share.bytes + piece.column};
  }

  void direct(u32 rank, const Share& share, const Piece& piece) {
    if (scatter) {
      builder.copy_rows(0, root, matrix(share, piece), pitch, contiguous(rank, share, piece),
                        share.bytes, piece.rows, piece.bytes);
    } else {
      builder.copy_rows(0, root, contiguous(rank, share, piece), share.bytes, matrix(share, piece),
                        pitch, piece.rows, piece.bytes);
    }
  }

  // Scatter: the root pushes into the rank's stage, the rank unpacks. Gather: the rank packs into
  // its own stage, the root pulls.
  void staged(u32 rank, const Share& share, const Piece& piece, u32 w) {
    const Place stage = slots.packed(rank, w, 0), flat = contiguous(rank, share, piece);
    const u64 bytes = piece.rows * piece.bytes;
    if (scatter) {
      builder.cross_rows(w, root, matrix(share, piece), pitch, stage, piece.bytes, piece.rows,
                         piece.bytes);
      builder.copy(w + 1, rank, stage, {&flat, 1}, bytes);
    } else {
      builder.copy(w, rank, flat, {&stage, 1}, bytes);
      builder.cross_rows(w + 1, root, stage, piece.bytes, matrix(share, piece), pitch, piece.rows,
                         piece.bytes);
    }
  }
};

EventPlan plan_strided(StridedPlan plan, u32 nranks, u64 rows, std::span<const Share> shares,
                       u32 skip, Staging staging) {
  check_staging(staging, 1);
  for (u32 rank = 0; rank < nranks; ++rank) {
    const Share& share = shares[rank];
    if ((skip >> rank & 1) || share.bytes == 0) continue;
    if (staging.direct || rank == plan.root) {
      plan.direct(rank, share, {0, rows, 0, share.bytes});
      continue;
    }
    u32 w = 0;
    for (const Piece& piece : cut_share(rows, share.bytes, staging.slot_bytes))
      plan.staged(rank, share, piece, w++);
  }
  return plan.builder.finish();
}

}  // namespace

EventPlan plan_scatter(u32 nranks, u32 root, u64 rows, u64 pitch, std::span<const Share> shares,
                       u32 skip, Staging staging) {
  return plan_strided({root, pitch, true, {staging.slot_bytes}, {}}, nranks, rows, shares, skip,
                      staging);
}

EventPlan plan_gather(u32 nranks, u32 root, u64 rows, u64 pitch, std::span<const Share> shares,
                      u32 skip, Staging staging) {
  return plan_strided({root, pitch, false, {staging.slot_bytes}, {}}, nranks, rows, shares, skip,
                      staging);
}

}  // namespace pyparallel
