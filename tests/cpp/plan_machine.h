// The memory of all ranks, on which event plans run: real bytes, moves of a step in a random order.
// It checks what every plan has to keep: no hazard within a step, staged moves that touch only
// inputs and outputs of their executor, no element that is split.
//
// What it adds is a * kFactor + b, which depends on the order and on where it starts, so that only
// plans that sum in rank order give the right values.
#pragma once
#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <tuple>

#include "schedule/event_plan.h"
#include "schedule/range.h"
#include "testing.h"

namespace pyparallel::testing {

constexpr u8 kPoison = 0xa5;
constexpr u64 kFactor = 0x9e3779b97f4a7c15;

struct Buffer {
  std::vector<u8> bytes;
  std::vector<u32> writes;  // times each byte was written
  std::vector<i64> written,
      read;  // the last move that did so (kMany: several readers), as step * kMoves + move
};

constexpr i64 kMoves = i64{1} << 32;
constexpr i64 kMany = kMoves - 1;

using Name = std::tuple<u32, Memory, u32>;

// The memory of all ranks.
class Machine {
 public:
  Machine(Staging staging, u32 element_bytes, u64 seed)
      : staging_(staging), element_bytes_(element_bytes), random_(seed) {}

  u8* allocate(u32 rank, Memory memory, u32 segment, u64 bytes, bool poison) {
    Buffer& buffer = buffers_[{rank, memory, segment}];
    buffer.bytes.resize(bytes);
    for (u8& byte : buffer.bytes) byte = poison ? kPoison : static_cast<u8>(random_());
    buffer.writes.assign(bytes, 0);
    buffer.written.assign(bytes, -1);
    buffer.read.assign(bytes, -1);
    return buffer.bytes.data();
  }
  void make_in_place() { in_place_ = true; }

  Buffer& at(u32 rank, Memory memory, u32 segment = 0) {
    if (in_place_ && memory == Memory::kOutput) memory = Memory::kInput;
    const auto found = buffers_.find({rank, memory, segment});
    EXPECT(found != buffers_.end(), "no buffer: rank ", rank, " memory ", static_cast<u32>(memory),
           " segment ", segment);
    return found->second;
  }

  void run(const EventPlan& plan) {
    std::vector<u32> order(plan.moves.size());
    for (u32 i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    std::stable_sort(order.begin(), order.end(),
                     [&](u32 a, u32 b) { return plan.moves[a].step < plan.moves[b].step; });
    const auto key = [](const Move& m) { return std::tuple(m.step, m.executor, m.engine); };
    for (size_t i = 1; i < plan.moves.size(); ++i)
      EXPECT(key(plan.moves[i - 1]) <= key(plan.moves[i]), i);
    for (u32 i : order) run(plan, i);
    const auto staged = [](const Place& place) { return place.memory == Memory::kStage; };
    EXPECT(plan.staged == std::ranges::any_of(plan.places, staged), plan.staged);
    EXPECT(plan.nsteps == (plan.moves.empty() ? 0 : plan.moves.back().step + 1), plan.nsteps);
  }

 private:
  void run(const EventPlan& plan, u32 index) {
    const Move& move = plan.moves[index];
    const i64 stamp = move.step * kMoves + index;
    const Place* sources = &plan.places[move.first_place];
    const Place* destinations = sources + move.nsources;
    EXPECT(move.sum == (move.nsources > 1) && move.nsources > 0 && move.ndestinations > 0,
           move.nsources);
    EXPECT(!move.sum || move.rows == 1, move.rows);
    EXPECT(!move.engine || (move.nsources == 1 && move.ndestinations == 1 && move.rows == 1),
           "no copy for an engine: ", move.nsources, " sources, ", move.ndestinations,
           " destinations, ", move.rows, " rows");
    for (u64 row = 0; row < move.rows; ++row) {
      std::vector<u8> value;
      for (u32 k = 0; k < move.nsources; ++k) {
        const u8* bytes =
            read(sources[k], move, sources[k].offset + row * move.source_pitch, stamp);
        if (k == 0) {
          value.assign(bytes, bytes + move.row_bytes);
        } else {
          add(value, bytes);
        }
      }
      for (u32 k = 0; k < move.ndestinations; ++k) {
        write(destinations[k], move, destinations[k].offset + row * move.destination_pitch, value,
              stamp);
      }
    }
  }

  Buffer& checked(const Place& place, const Move& move, u64 offset) {
    Buffer& buffer = at(place.rank, place.memory, place.segment);
    EXPECT(offset + move.row_bytes <= buffer.bytes.size(), "past the end: memory ",
           static_cast<u32>(place.memory), " offset ", offset, " bytes ", move.row_bytes, " of ",
           buffer.bytes.size());
    EXPECT(!staging_.direct || place.memory != Memory::kStage, "a direct plan uses a stage");
    EXPECT(place.memory != Memory::kStage || place.offset % element_bytes_ == 0,
           "a stage is cut inside an element, offset ", place.offset);
    EXPECT(staging_.direct || place.memory == Memory::kStage || place.rank == move.executor,
           "rank ", move.executor, " touches memory of rank ", place.rank);
    return buffer;
  }

  const u8* read(const Place& place, const Move& move, u64 offset, i64 stamp) {
    Buffer& buffer = checked(place, move, offset);
    for (u64 i = offset; i < offset + move.row_bytes; ++i) {
      EXPECT(buffer.written[i] / kMoves != move.step || buffer.written[i] == stamp ||
                 buffer.written[i] < 0,
             "step ", move.step, " reads what it writes, byte ", i);
      const bool others =
          buffer.read[i] >= 0 && buffer.read[i] / kMoves == move.step && buffer.read[i] != stamp;
      buffer.read[i] = others ? move.step * kMoves + kMany : stamp;
    }
    return &buffer.bytes[offset];
  }

  void write(const Place& place, const Move& move, u64 offset, const std::vector<u8>& value,
             i64 stamp) {
    Buffer& buffer = checked(place, move, offset);
    for (u64 i = offset; i < offset + move.row_bytes; ++i) {
      EXPECT(buffer.written[i] / kMoves != move.step || buffer.written[i] < 0, "step ", move.step,
             " writes twice, byte ", i);
      EXPECT(buffer.read[i] / kMoves != move.step || buffer.read[i] == stamp || buffer.read[i] < 0,
             "step ", move.step, " writes what it reads, byte ", i);
      buffer.written[i] = stamp;
      ++buffer.writes[i];
    }
    std::memcpy(&buffer.bytes[offset], value.data(), value.size());
  }

  void add(std::vector<u8>& value, const u8* bytes) const {
    EXPECT(value.size() % element_bytes_ == 0, "a sum splits an element: ", value.size(), " bytes");
    for (u64 i = 0; i < value.size(); i += element_bytes_) {
      u64 a = 0, b = 0;
      std::memcpy(&a, &value[i], element_bytes_);
      std::memcpy(&b, bytes + i, element_bytes_);
      a = a * kFactor + b;
      std::memcpy(&value[i], &a, element_bytes_);
    }
  }

  Staging staging_;
  u32 element_bytes_;
  std::mt19937_64 random_;
  bool in_place_ = false;
  std::map<Name, Buffer> buffers_;
};

}  // namespace pyparallel::testing
