// What event plans promise, for every algorithm: values, sums in rank order, every output byte
// written once and none beside.
#include "plan_machine.h"
#include "schedule/plan_algorithms.h"

using namespace pyparallel;
using namespace pyparallel::testing;

namespace {

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
  for (u32 nranks = 1; nranks <= kMaxRanks; ++nranks) {
    for (u32 root = 0; root < nranks; ++root) {
      for (Staging staging : kStagings) {
        for (u32 repeat = 0; repeat < (nranks < 6 ? 6u : 2u); ++repeat)
          visit(nranks, root, staging, random);
      }
    }
  }
}

template <class Visit>
void visit_cases(std::initializer_list<EventAlgorithm> algorithms, Visit visit) {
  for (EventAlgorithm algorithm : algorithms) {
    visit_cases([&](u32 nranks, u32 root, Staging staging, std::mt19937_64& random) {
      if (algorithm == EventAlgorithm::kCopyChain && staging.direct) return;
      visit(algorithm, nranks, root, staging, random);
    });
  }
}

// A chain of copies touches stages of neighbours on the ring only.
void expect_neighbours(EventAlgorithm algorithm, u32 nranks, const EventPlan& plan) {
  if (algorithm != EventAlgorithm::kCopyChain) return;
  const auto users = stage_users(plan);
  for (u32 rank = 0; rank < nranks; ++rank) {
    const u32 neighbours = 1u << (rank + 1) % nranks | 1u << (rank + nranks - 1) % nranks;
    EXPECT((users[rank] & ~neighbours) == 0, "rank ", rank, " of ", nranks, " is used by ",
           users[rank]);
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
  visit_cases(
      {EventAlgorithm::kPush, EventAlgorithm::kTwoHop, EventAlgorithm::kCopyChain},
      [](EventAlgorithm algorithm, u32 nranks, u32 root, Staging staging, std::mt19937_64& random) {
        const std::vector<Segment> segments = random_segments(random, 1);
        const u64 bytes = segments.back().offset + segments.back().bytes;
        Machine machine(staging, 1, random());
        add_stages(machine, nranks, staging);
        for (u32 k = 0; k < segments.size(); ++k)
          machine.allocate(root, Memory::kInput, k, segments[k].bytes, false);
        for (u32 rank = 0; rank < nranks; ++rank) {
          if (rank != root) machine.allocate(rank, Memory::kOutput, 0, bytes, true);
        }
        const EventPlan plan = plan_broadcast(algorithm, nranks, root, segments, staging);
        expect_neighbours(algorithm, nranks, plan);
        machine.run(plan);
        for (u32 rank = 0; rank < nranks; ++rank) {
          if (rank == root) continue;
          const Buffer& output = machine.at(rank, Memory::kOutput);
          expect_written(output, segments);
          for (u32 k = 0; k < segments.size(); ++k) {
            const std::vector<u8>& input = machine.at(root, Memory::kInput, k).bytes;
            EXPECT(
                std::equal(input.begin(), input.end(), output.bytes.begin() + segments[k].offset),
                "rank ", rank, " segment ", k);
          }
        }
      });
}

TEST(reduce_add) {
  visit_cases(
      {EventAlgorithm::kOwner, EventAlgorithm::kCopyChain},
      [](EventAlgorithm algorithm, u32 nranks, u32 root, Staging staging, std::mt19937_64& random) {
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
        const EventPlan plan =
            plan_reduce_add(algorithm, nranks, root, segments, present, element_bytes, staging);
        expect_neighbours(algorithm, nranks, plan);
        machine.run(plan);
        const Buffer& output = machine.at(root, Memory::kOutput);
        expect_written(output, segments);
        for (u32 k = 0; k < segments.size(); ++k) {
          for (u64 at = 0; at < segments[k].bytes; at += element_bytes) {
            u64 sum = 0;
            for (u32 rank = 0; rank < nranks; ++rank) {
              if (present[k] >> rank & 1)
                sum = sum * kFactor +
                      element(machine.at(rank, Memory::kInput, k).bytes, at, element_bytes);
            }
            EXPECT(element(output.bytes, segments[k].offset + at, element_bytes) ==
                       truncated(sum, element_bytes),
                   "segment ", k, " byte ", at);
          }
        }
      });
}

TEST(all_reduce) {
  visit_cases(
      {EventAlgorithm::kOwner, EventAlgorithm::kCopyChain},
      [](EventAlgorithm algorithm, u32 nranks, u32 root, Staging staging, std::mt19937_64& random) {
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
        const EventPlan plan = plan_all_reduce(algorithm, nranks, bytes, element_bytes, staging);
        expect_neighbours(algorithm, nranks, plan);
        machine.run(plan);
        for (u32 rank = 0; rank < nranks; ++rank) {
          const Buffer& output = machine.at(rank, Memory::kOutput);
          const Segment whole{0, bytes};
          expect_written(output, {&whole, 1});
          for (u64 at = 0; at < bytes; at += element_bytes) {
            u64 sum = 0;
            for (const std::vector<u8>& input : inputs)
              sum = sum * kFactor + element(input, at, element_bytes);
            EXPECT(element(output.bytes, at, element_bytes) == truncated(sum, element_bytes),
                   "rank ", rank, " byte ", at);
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

// A direct plan is cut into chunks too, by a rule that gives one for small payloads.
TEST(two_hop_in_several_chunks) {
  visit_cases([](u32 nranks, u32 root, Staging staging, std::mt19937_64& random) {
    const std::vector<Segment> segments = random_segments(random, 1);
    Machine machine(staging, 1, random());
    add_stages(machine, nranks, staging);
    for (u32 k = 0; k < segments.size(); ++k)
      machine.allocate(root, Memory::kInput, k, segments[k].bytes, false);
    for (u32 rank = 0; rank < nranks; ++rank)
      machine.allocate(rank, Memory::kOutput, 0, segments.back().offset + segments.back().bytes,
                       true);
    const u64 chunk_bytes = kUnit * (1 + random() % 6);
    const EventPlan plan = two_hop_plan(nranks, root, segments, staging, chunk_bytes);
    machine.run(plan);
    for (u32 rank = 0; rank < nranks; ++rank) {
      if (rank == root) continue;
      const Buffer& output = machine.at(rank, Memory::kOutput);
      expect_written(output, segments);
      for (u32 k = 0; k < segments.size(); ++k) {
        const std::vector<u8>& input = machine.at(root, Memory::kInput, k).bytes;
        EXPECT(std::equal(input.begin(), input.end(), output.bytes.begin() + segments[k].offset),
               "rank ", rank, " segment ", k, " chunk ", chunk_bytes);
      }
    }
  });
}

TEST(bad_staging_is_refused) {
  bool refused = false;
  try {
    plan_all_reduce(EventAlgorithm::kOwner, 2, 8, 4, {false, 100});
  } catch (const Error& error) {
    refused = std::string(error.what()).find("100") != std::string::npos;
  }
  EXPECT(refused);
}

TEST_MAIN()
