// Event-ordered plans: which rank moves which bytes in which step. Pure: no pointer, no thread, no
// CUDA type.
//
// A plan is a list of steps. Moves of one step may run in any order or at the same time; all moves
// of step s have finished before any move of step s + 1 starts (the backend orders steps with
// events). Nothing spins.
//
// Where a kernel may not touch another rank's user memory (GPUs), data cross through stages: memory
// of ours, one region a rank. A staged move touches inputs and outputs of its executor only. Where
// it may (virtual devices), `direct` plans go straight from input to output. Chains of copies are
// staged everywhere.
//
// Staged plans cut the payload into windows of one slot. Phase p of window w runs in step w + p, so
// that the phases of consecutive windows overlap. A stage has kStageSlots slots. What phase 0 puts
// into stages (packed or pushed) lies in slot w % kStageSlots; sums, which phase 1 makes of it, lie
// in slot (w + 3) % kStageSlots. In step s the slots in use are s (being packed), s - 1 = s + 3
// (being summed), s + 2 (sums being stored) and s + 1 (sums being unpacked): four different ones,
// and each was last read in an earlier step.
#pragma once
#include <array>
#include <span>
#include <vector>

#include "../base.h"

namespace pyparallel {

constexpr u32 kStageSlots = 4;

enum class Memory : u8 { kInput, kOutput, kStage };

// A byte position. `segment` counts the pieces of a rank's input (kInput only; outputs and stages
// are contiguous).
struct Place {
  u32 rank;
  Memory memory;
  u32 segment;
  u64 offset;
};

// Copies one source to every destination, or adds the sources in the order given and stores the sum
// to every destination. Rows are row_bytes long; a contiguous move has one row. Sums have one row.
struct Move {
  u32 step;
  u32 executor;  // the rank whose device runs it
  bool sum;
  bool engine;      // a copy of one row to one destination, for the copy engine instead of a kernel
  u32 first_place;  // places[first_place ...): nsources sources, then ndestinations destinations
  u32 nsources, ndestinations;
  u64 rows, row_bytes, source_pitch, destination_pitch;
};

struct EventPlan {
  std::vector<Place> places;
  std::vector<Move> moves;  // ordered by step, executor and engine
  u32 nsteps = 0;
  bool staged = false;  // whether any place lies in a stage
};

// One tensor inside a flat buffer: where it starts and how long it is, in bytes.
struct Segment {
  u64 offset, bytes;
  bool operator==(const Segment&) const = default;
};

// `direct`: a plan that can do without stages does.
struct Staging {
  bool direct;
  u64 slot_bytes;  // per rank and slot; a multiple of 128
};

// The bytes of a rank's stage, which a place with Memory::kStage is an offset into.
constexpr u64 stage_bytes(Staging staging) { return kStageSlots * staging.slot_bytes; }

enum class EventAlgorithm : u8 {
  kPush,       // broadcast: the root sends to every rank
  kTwoHop,     // broadcast: the root sends shards, which the other ranks exchange
  kOwner,      // reduce_add, all_reduce: the owner of a shard sums it and stores it to receivers
  kCopyChain,  // all three: from neighbour to neighbour on the ring, by copy engines
};

// Root's segments to every other rank's flat output at the segments' offsets. Segments ascend and
// do not overlap; bytes of the outputs between segments are not touched. `storage` is a plan that
// nobody needs: the new one takes its memory, because with thousands of segments it takes longer to
// get memory from the system than to plan.
EventPlan plan_broadcast(EventAlgorithm algorithm, u32 nranks, u32 root,
                         std::span<const Segment> segments, Staging staging,
                         EventPlan storage = {});

// Sums the ranks' segments in rank order into root's flat output. Bit r of present[k]: rank r has
// segment k; at least one rank has each. Owners of shards are the n - 1 other ranks (the only rank
// when nranks is 1).
EventPlan plan_reduce_add(EventAlgorithm algorithm, u32 nranks, u32 root,
                          std::span<const Segment> segments, std::span<const u32> present,
                          u32 element_bytes, Staging staging, EventPlan storage = {});

// Every rank's contiguous input summed in rank order into every rank's output; output may be input
// (in place).
EventPlan plan_all_reduce(EventAlgorithm algorithm, u32 nranks, u64 bytes, u32 element_bytes,
                          Staging staging);

// One rank's share of a matrix of `rows` rows: columns [offset, offset + bytes) of each row. bytes
// 0: no share.
struct Share {
  u64 offset, bytes;
};

// Scatter: root's input of rows x pitch bytes; rank r's output is contiguous, rows x
// shares[r].bytes. Gather: the reverse. Ranks whose bit in `skip` is set are left out (their piece
// is already where it belongs).
EventPlan plan_scatter(u32 nranks, u32 root, u64 rows, u64 pitch, std::span<const Share> shares,
                       u32 skip, Staging staging);
EventPlan plan_gather(u32 nranks, u32 root, u64 rows, u64 pitch, std::span<const Share> shares,
                      u32 skip, Staging staging);

// Bit q of [r]: rank q touches the stage of rank r, q other than r.
std::array<u32, kMaxRanks> stage_users(const EventPlan& plan);

}  // namespace pyparallel
