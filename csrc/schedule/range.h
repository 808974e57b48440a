// How a payload is cut: channels, slices, shards, windows. All bounds lie on multiples of kUnit
// bytes.
#pragma once
#include "../base.h"

namespace pyparallel {

// A cache line of a GPU; a multiple of every element size, so that no bound splits an element.
constexpr u64 kUnit = 128;

struct Range {
  u64 begin, bytes;
  PP_HD constexpr u64 end() const { return begin + bytes; }
};

PP_HD constexpr u64 min_u64(u64 a, u64 b) { return a < b ? a : b; }
PP_HD constexpr u64 max_u64(u64 a, u64 b) { return a < b ? b : a; }
PP_HD constexpr u64 divide_up(u64 value, u64 unit) { return value / unit + (value % unit != 0); }

// The part of two ranges that both hold; bytes is 0 where there is none.
PP_HD constexpr Range intersect(Range a, Range b) {
  const u64 begin = max_u64(a.begin, b.begin), end = min_u64(a.end(), b.end());
  return {begin, end > begin ? end - begin : 0};
}

// Part i of n nearly equal contiguous parts of `whole`. Small payloads leave the last parts empty.
PP_HD constexpr Range part_range(Range whole, u32 n, u32 i) {
  const u64 unit = round_up(divide_up(whole.bytes, n), kUnit);
  const u64 begin = min_u64(unit * i, whole.bytes);
  return {whole.begin + begin, min_u64(unit, whole.bytes - begin)};
}

// Piece i of `whole`, cut every `piece_bytes`.
PP_HD constexpr u64 piece_count(Range whole, u64 piece_bytes) {
  return divide_up(whole.bytes, piece_bytes);
}
PP_HD constexpr Range piece_range(Range whole, u64 piece_bytes, u64 i) {
  return {whole.begin + i * piece_bytes, min_u64(piece_bytes, whole.bytes - i * piece_bytes)};
}

}  // namespace pyparallel
