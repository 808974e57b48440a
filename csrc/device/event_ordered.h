// The bodies of event-ordered work: a block runs one part of a copy or of a sum. No flags, no
// barriers.
//
// Parts are cut by bytes, so that all blocks have the same work whatever the rows are.
#pragma once
#include "../schedule/range.h"
#include "context.h"
#include "numeric.h"

namespace pyparallel {

// Rows of a strided copy: row i is row_bytes at source + i * source_pitch and destination + i *
// destination_pitch.
struct Rows {
  u64 count, bytes, source_pitch, destination_pitch;
};

// Words of W that all rows consist of. Each thread walks its words row by row with two additions a
// word, because rows may be shorter than the block is wide.
template <class W, Context C, class Destinations>
PP_D void copy_short_rows(const C& c, const Destinations& destinations, const u8* source,
                          const Rows& rows, Range part) {
  const u64 per_row = rows.bytes / sizeof(W), end = part.end() / sizeof(W);
  const u64 first = part.begin / sizeof(W) + c.tid();
  const u64 row_step = c.nthreads() / per_row, column_step = c.nthreads() % per_row;
  u64 row = first / per_row, column = first % per_row;
  for (u64 i = first; i < end; i += c.nthreads()) {
    const W word = c.load(reinterpret_cast<const W*>(source + row * rows.source_pitch) + column);
    for (u32 k = 0; k < destinations.size(); ++k) {
      c.store(reinterpret_cast<W*>(destinations[k] + row * rows.destination_pitch) + column, word);
    }
    row += row_step;
    column += column_step;
    if (column >= per_row) {
      column -= per_row;
      ++row;
    }
  }
}

// Bits that must be 0 for words of a size to fit every row.
template <class Destinations>
PP_D u64 row_misalignment(const Destinations& destinations, const u8* source, const Rows& rows) {
  u64 bits =
      reinterpret_cast<u64>(source) | rows.source_pitch | rows.destination_pitch | rows.bytes;
  for (u32 k = 0; k < destinations.size(); ++k) bits |= reinterpret_cast<u64>(destinations[k]);
  return bits;
}

// Part `part` of `nparts` of a copy of rows to every destination.
template <Context C, class Destinations>
PP_D void run_copy(const C& c, const Destinations& destinations, const u8* source, const Rows& rows,
                   u32 part, u32 nparts) {
  const Range range = part_range({0, rows.count * rows.bytes}, nparts, part);
  if (range.bytes == 0) return;
  if (rows.count > 1 && rows.bytes < sizeof(Pack) * c.nthreads()) {
    const u64 bits = row_misalignment(destinations, source, rows);
    if ((bits & (sizeof(Pack) - 1)) == 0) {
      copy_short_rows<Pack>(c, destinations, source, rows, range);
    } else if ((bits & (sizeof(u32) - 1)) == 0) {
      copy_short_rows<u32>(c, destinations, source, rows, range);
    } else if ((bits & (sizeof(u16) - 1)) == 0) {
      copy_short_rows<u16>(c, destinations, source, rows, range);
    } else {
      copy_short_rows<u8>(c, destinations, source, rows, range);
    }
    return;
  }
  // Long rows: the context's loop, row by row.
  u64 row = range.begin / rows.bytes, column = range.begin % rows.bytes;
  for (u64 left = range.bytes; left > 0; ++row, column = 0) {
    const u64 bytes = min_u64(rows.bytes - column, left);
    const u64 to = row * rows.destination_pitch + column;
    c.copy(moved(destinations, to), source + row * rows.source_pitch + column, bytes);
    left -= bytes;
  }
}

// Part `part` of `nparts` of a sum of `bytes` bytes of T.
template <class T, Context C, class Destinations, class Sources>
PP_D void run_sum(const C& c, const Destinations& destinations, const Sources& sources, u64 bytes,
                  u32 part, u32 nparts) {
  const Range range = part_range({0, bytes}, nparts, part);
  if (range.bytes == 0) return;
  c.template sum<T>(moved(destinations, range.begin), moved(sources, range.begin),
                    range.bytes / sizeof(T));
}

}  // namespace pyparallel
