// Runs event plans on real bytes, moves of a step in a random order, and checks what a plan
// promises: values, sums in rank order, every output byte written once and none beside, no hazard
// within a step, and that staged moves touch only inputs and outputs of their executor.
#include "schedule/event_plan.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <tuple>

#include "schedule/range.h"
#include "testing.h"

using namespace pyparallel;

namespace {

constexpr u8 kPoison = 0xa5;

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
    for (size_t i = 1; i < plan.moves.size(); ++i)
      EXPECT(plan.moves[i - 1].step <= plan.moves[i].step, i);
    for (u32 i : order) run(plan, i);
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
    for (u32 k = 1; move.sum && k < move.nsources; ++k) {
      EXPECT(sources[k - 1].rank < sources[k].rank, "not in rank order: ", sources[k].rank);
    }
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
      a += b;
      std::memcpy(&value[i], &a, element_bytes_);
    }
  }

  Staging staging_;
  u32 element_bytes_;
  std::mt19937_64 random_;
  bool in_place_ = false;
  std::map<Name, Buffer> buffers_;
};

// The sum of inputs[k] at one element, as integers of element_bytes bytes.
u64 element(const std::vector<u8>& bytes, u64 at, u32 element_bytes) {
  u64 value = 0;
  std::memcpy(&value, &bytes[at], element_bytes);
  return value;
}

u64 truncated(u64 value, u32 element_bytes) {
  return element_bytes == 8 ? value : value & ((u64{1} << (8 * element_bytes)) - 1);
}

std::vector<Segment> random_segments(std::mt19937_64& random, u32 element_bytes) {
  std::vector<Segment> segments;
  u64 at = 0;
  for (u32 k = 0; k < 1 + random() % 9; ++k) {
    if (random() % 2) at = round_up(at, random() % 4 ? 64 : 1024);
    const u64 bytes = (random() % 5 == 0 ? 0 : random() % (random() % 4 ? 80 : 900)) /
                      element_bytes * element_bytes;
    segments.push_back({at, bytes});
    at += bytes;
  }
  return segments;
}

// Direct plans, and stages with few and with many windows.
constexpr Staging kStagings[] = {{true, 0}, {false, 128}, {false, 256}, {false, 2048}};

template <class Visit>
void visit_cases(Visit visit) {
  std::mt19937_64 random(7);
  for (u32 nranks : {1u, 2u, 3u, 4u, 5u, 8u, 16u}) {
    for (u32 root = 0; root < nranks; ++root) {
      for (Staging staging : kStagings) {
        for (u32 repeat = 0; repeat < 6; ++repeat) visit(nranks, root, staging, random);
      }
    }
  }
}

void add_stages(Machine& machine, u32 nranks, Staging staging) {
  if (staging.direct) return;
  for (u32 rank = 0; rank < nranks; ++rank)
    machine.allocate(rank, Memory::kStage, 0, stage_bytes(staging), false);
}

// Output bytes inside of segments are written once, others never.
void expect_written(const Buffer& output, std::span<const Segment> segments) {
  std::vector<u32> expected(output.bytes.size(), 0);
  for (const Segment& segment : segments)
    std::fill_n(expected.begin() + segment.offset, segment.bytes, 1u);
  for (u64 i = 0; i < expected.size(); ++i)
    EXPECT(output.writes[i] == expected[i], "byte ", i, " written ", output.writes[i]);
}

}  // namespace

TEST(broadcast) {
  visit_cases([](u32 nranks, u32 root, Staging staging, std::mt19937_64& random) {
    const std::vector<Segment> segments = random_segments(random, 1);
    const u64 bytes = segments.back().offset + segments.back().bytes;
    Machine machine(staging, 1, random());
    add_stages(machine, nranks, staging);
    for (u32 k = 0; k < segments.size(); ++k)
      machine.allocate(root, Memory::kInput, k, segments[k].bytes, false);
    for (u32 rank = 0; rank < nranks; ++rank) {
      if (rank != root) machine.allocate(rank, Memory::kOutput, 0, bytes, true);
    }
    machine.run(plan_broadcast(nranks, root, segments, staging));
    for (u32 rank = 0; rank < nranks; ++rank) {
      if (rank == root) continue;
      const Buffer& output = machine.at(rank, Memory::kOutput);
      expect_written(output, segments);
      for (u32 k = 0; k < segments.size(); ++k) {
        const std::vector<u8>& input = machine.at(root, Memory::kInput, k).bytes;
        EXPECT(std::equal(input.begin(), input.end(), output.bytes.begin() + segments[k].offset),
               "rank ", rank, " segment ", k);
      }
    }
  });
}

TEST(reduce_add) {
  visit_cases([](u32 nranks, u32 root, Staging staging, std::mt19937_64& random) {
    const u32 element_bytes = 2u << random() % 3;
    const std::vector<Segment> segments = random_segments(random, element_bytes);
    const u64 bytes = segments.back().offset + segments.back().bytes;
    std::vector<u32> present(segments.size());
    const u32 everybody = (1u << nranks) - 1;
    const bool partial = random() % 2;
    for (u32& ranks : present) {
      ranks = partial && random() % 3 == 0 ? static_cast<u32>(random()) & everybody : everybody;
      if (ranks == 0) ranks = 1u << random() % nranks;
    }
    Machine machine(staging, element_bytes, random());
    add_stages(machine, nranks, staging);
    for (u32 k = 0; k < segments.size(); ++k) {
      for (u32 rank = 0; rank < nranks; ++rank) {
        if (present[k] >> rank & 1)
          machine.allocate(rank, Memory::kInput, k, segments[k].bytes, false);
      }
    }
    machine.allocate(root, Memory::kOutput, 0, bytes, true);
    machine.run(plan_reduce_add(nranks, root, segments, present, element_bytes, staging));
    const Buffer& output = machine.at(root, Memory::kOutput);
    expect_written(output, segments);
    for (u32 k = 0; k < segments.size(); ++k) {
      for (u64 at = 0; at < segments[k].bytes; at += element_bytes) {
        u64 sum = 0;
        for (u32 rank = 0; rank < nranks; ++rank) {
          if (present[k] >> rank & 1)
            sum += element(machine.at(rank, Memory::kInput, k).bytes, at, element_bytes);
        }
        EXPECT(element(output.bytes, segments[k].offset + at, element_bytes) ==
                   truncated(sum, element_bytes),
               "segment ", k, " byte ", at);
      }
    }
  });
}

TEST(all_reduce) {
  visit_cases([](u32 nranks, u32 root, Staging staging, std::mt19937_64& random) {
    if (root != 0) return;
    const u32 element_bytes = 2u << random() % 3;
    const u64 bytes = random() % 3000 / element_bytes * element_bytes;
    Machine machine(staging, element_bytes, random());
    add_stages(machine, nranks, staging);
    const bool in_place = random() % 2;
    if (in_place) machine.make_in_place();
    std::vector<std::vector<u8>> inputs;
    for (u32 rank = 0; rank < nranks; ++rank) {
      machine.allocate(rank, Memory::kInput, 0, bytes, false);
      inputs.push_back(machine.at(rank, Memory::kInput).bytes);
      if (!in_place) machine.allocate(rank, Memory::kOutput, 0, bytes, true);
    }
    machine.run(plan_all_reduce(nranks, bytes, element_bytes, staging));
    for (u32 rank = 0; rank < nranks; ++rank) {
      const Buffer& output = machine.at(rank, Memory::kOutput);
      const Segment whole{0, bytes};
      expect_written(output, {&whole, 1});
      for (u64 at = 0; at < bytes; at += element_bytes) {
        u64 sum = 0;
        for (const std::vector<u8>& input : inputs) sum += element(input, at, element_bytes);
        EXPECT(element(output.bytes, at, element_bytes) == truncated(sum, element_bytes), "rank ",
               rank, " byte ", at);
      }
    }
  });
}

TEST(scatter_and_gather) {
  visit_cases([](u32 nranks, u32 root, Staging staging, std::mt19937_64& random) {
    // Wide rows are cut, narrow ones grouped; a gap is left between shares.
    const u64 rows = random() % 4 == 0 ? 1 : random() % 12, widest = random() % 2 ? 400 : 30;
    std::vector<Share> shares;
    u64 pitch = 0;
    for (u32 rank = 0; rank < nranks; ++rank) {
      pitch += random() % 3;
      shares.push_back({pitch, random() % 5 == 0 ? 0 : random() % widest});
      pitch += shares.back().bytes;
    }
    const u32 skip = random() % 2 ? 1u << root : 0;
    const bool scatter = random() % 2;
    const Memory matrix = scatter ? Memory::kInput : Memory::kOutput;
    const Memory piece = scatter ? Memory::kOutput : Memory::kInput;
    Machine machine(staging, 1, random());
    add_stages(machine, nranks, staging);
    machine.allocate(root, matrix, 0, rows * pitch, !scatter);
    for (u32 rank = 0; rank < nranks; ++rank) {
      if (!(skip >> rank & 1)) machine.allocate(rank, piece, 0, rows * shares[rank].bytes, scatter);
    }
    machine.run(scatter ? plan_scatter(nranks, root, rows, pitch, shares, skip, staging)
                        : plan_gather(nranks, root, rows, pitch, shares, skip, staging));
    std::vector<Segment> written;
    for (u32 rank = 0; rank < nranks; ++rank) {
      if (skip >> rank & 1) continue;
      const Buffer &whole = machine.at(root, matrix), &part = machine.at(rank, piece);
      const Segment all{0, rows * shares[rank].bytes};
      if (scatter) expect_written(part, {&all, 1});
      for (u64 row = 0; row < rows; ++row) {
        const u64 at = row * pitch + shares[rank].offset;
        written.push_back({at, shares[rank].bytes});
        EXPECT(std::equal(part.bytes.begin() + row * shares[rank].bytes,
                          part.bytes.begin() + (row + 1) * shares[rank].bytes,
                          whole.bytes.begin() + at),
               "rank ", rank, " row ", row);
      }
    }
    if (!scatter) expect_written(machine.at(root, matrix), written);
  });
}

// What a plan costs: padded neighbours are one sum for each owner, contiguous shares one row.
TEST(few_moves) {
  const std::vector<Segment> segments{{0, 256}, {512, 512}, {1024, 128}};
  const std::vector<u32> present{3, 3, 3};
  const EventPlan sum = plan_reduce_add(2, 0, segments, present, 4, {false, 4096});
  EXPECT(sum.nsteps == 3 && sum.moves.size() == 3 * 2 + 1 + 2, sum.moves.size());
  const Share shares[] = {{0, 1000}, {1000, 1000}};
  const EventPlan scatter = plan_scatter(2, 0, 1, 2000, shares, 1, {false, 4096});
  EXPECT(scatter.moves.size() == 2 && scatter.moves[0].rows == 1, scatter.moves.size());
  const u64 large = u64{5} << 32;
  const EventPlan many = plan_all_reduce(2, large, 8, {false, u64{1} << 30});
  EXPECT(many.nsteps == 20 + 2 && many.places.back().offset == large - (u64{1} << 30), many.nsteps);
}

TEST(bad_staging_is_refused) {
  bool refused = false;
  try {
    plan_all_reduce(2, 8, 4, {false, 100});
  } catch (const Error& error) {
    refused = std::string(error.what()).find("100") != std::string::npos;
  }
  EXPECT(refused);
}

TEST_MAIN()
