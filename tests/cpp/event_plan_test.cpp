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

// As the machine adds.
void add_to(std::vector<u64>& sums, const std::vector<u8>& bytes, u32 element_bytes) {
  for (u64 i = 0; i < sums.size(); ++i)
    sums[i] = sums[i] * kFactor + element(bytes, i * element_bytes, element_bytes);
}

void expect_sums(const std::vector<u8>& output, u64 offset, const std::vector<u64>& sums,
                 u32 element_bytes) {
  const u64 bits = element_bytes == 8 ? ~u64{0} : (u64{1} << (8 * element_bytes)) - 1;
  for (u64 i = 0; i < sums.size(); ++i) {
    EXPECT(element(output, offset + i * element_bytes, element_bytes) == (sums[i] & bits),
           "element ", i, " at byte ", offset);
  }
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

// Root's segments arrive at every other rank.
void check_broadcast(const EventPlan& plan, u32 nranks, u32 root, std::span<const Segment> segments,
                     Staging staging, u64 seed) {
  Machine machine(staging, 1, seed);
  add_stages(machine, nranks, staging);
  for (u32 k = 0; k < segments.size(); ++k)
    machine.allocate(root, Memory::kInput, k, segments[k].bytes, false);
  const u64 bytes = segments.back().offset + segments.back().bytes;
  for (u32 rank = 0; rank < nranks; ++rank) {
    if (rank != root) machine.allocate(rank, Memory::kOutput, 0, bytes, true);
  }
  machine.run(plan);
  for (u32 rank = 0; rank < nranks; ++rank) {
    if (rank == root) continue;
    const Buffer& output = machine.at(rank, Memory::kOutput);
    expect_written(output, segments);
    for (u32 k = 0; k < segments.size(); ++k) {
      const std::vector<u8>& input = machine.at(root, Memory::kInput, k).bytes;
      EXPECT(std::equal(input.begin(), input.end(), output.bytes.begin() + segments[k].offset),
             "rank ", rank, " of ", nranks, " segment ", k);
    }
  }
}

void check_reduce_add(const EventPlan& plan, u32 nranks, u32 root,
                      std::span<const Segment> segments, std::span<const u32> present,
                      u32 element_bytes, Staging staging, u64 seed) {
  Machine machine(staging, element_bytes, seed);
  add_stages(machine, nranks, staging);
  std::vector<std::vector<u64>> sums;  // of segment k, one an element
  for (u32 k = 0; k < segments.size(); ++k) {
    sums.emplace_back(segments[k].bytes / element_bytes, 0);
    for (u32 rank = 0; rank < nranks; ++rank) {
      if ((present[k] >> rank & 1) == 0) continue;
      machine.allocate(rank, Memory::kInput, k, segments[k].bytes, false);
      add_to(sums[k], machine.at(rank, Memory::kInput, k).bytes, element_bytes);
    }
  }
  machine.allocate(root, Memory::kOutput, 0, segments.back().offset + segments.back().bytes, true);
  machine.run(plan);
  const Buffer& output = machine.at(root, Memory::kOutput);
  expect_written(output, segments);
  for (u32 k = 0; k < segments.size(); ++k)
    expect_sums(output.bytes, segments[k].offset, sums[k], element_bytes);
}

void check_all_reduce(const EventPlan& plan, u32 nranks, u64 bytes, u32 element_bytes,
                      Staging staging, bool in_place, u64 seed) {
  Machine machine(staging, element_bytes, seed);
  add_stages(machine, nranks, staging);
  if (in_place) machine.make_in_place();
  std::vector<u64> sums(bytes / element_bytes, 0);
  for (u32 rank = 0; rank < nranks; ++rank) {
    machine.allocate(rank, Memory::kInput, 0, bytes, false);
    add_to(sums, machine.at(rank, Memory::kInput).bytes, element_bytes);
    if (!in_place) machine.allocate(rank, Memory::kOutput, 0, bytes, true);
  }
  machine.run(plan);
  for (u32 rank = 0; rank < nranks; ++rank) {
    const Buffer& output = machine.at(rank, Memory::kOutput);
    const Segment whole{0, bytes};
    expect_written(output, {&whole, 1});
    expect_sums(output.bytes, 0, sums, element_bytes);
  }
}

constexpr auto kBroadcasts = {EventAlgorithm::kPush, EventAlgorithm::kTwoHop,
                              EventAlgorithm::kCopyChain};
constexpr auto kSums = {EventAlgorithm::kOwner, EventAlgorithm::kCopyChain};

}  // namespace

TEST(broadcast) {
  visit_cases(kBroadcasts, [](EventAlgorithm algorithm, u32 nranks, u32 root, Staging staging,
                              std::mt19937_64& random) {
    const std::vector<Segment> segments = random_segments(random, 1);
    const EventPlan plan = plan_broadcast(algorithm, nranks, root, segments, staging);
    expect_neighbours(algorithm, nranks, plan);
    check_broadcast(plan, nranks, root, segments, staging, random());
  });
}

TEST(reduce_add) {
  visit_cases(kSums, [](EventAlgorithm algorithm, u32 nranks, u32 root, Staging staging,
                        std::mt19937_64& random) {
    const u32 element_bytes = 2u << random() % 3;
    const std::vector<Segment> segments = random_segments(random, element_bytes);
    std::vector<u32> present(segments.size());
    const u32 everybody = (1u << nranks) - 1;
    const bool partial = random() % 2;
    for (u32& ranks : present) {
      ranks = partial && random() % 3 == 0 ? static_cast<u32>(random()) & everybody : everybody;
      if (ranks == 0) ranks = 1u << random() % nranks;
    }
    const EventPlan plan =
        plan_reduce_add(algorithm, nranks, root, segments, present, element_bytes, staging);
    expect_neighbours(algorithm, nranks, plan);
    check_reduce_add(plan, nranks, root, segments, present, element_bytes, staging, random());
  });
}

TEST(all_reduce) {
  visit_cases(kSums, [](EventAlgorithm algorithm, u32 nranks, u32 root, Staging staging,
                        std::mt19937_64& random) {
    if (root != 0) return;
    const u32 element_bytes = 2u << random() % 3;
    const u64 bytes = random() % 3000 / element_bytes * element_bytes;
    const EventPlan plan = plan_all_reduce(algorithm, nranks, bytes, element_bytes, staging);
    expect_neighbours(algorithm, nranks, plan);
    check_all_reduce(plan, nranks, bytes, element_bytes, staging, random() % 2, random());
  });
}

// Around the sizes where something begins: a word, a slot, half a slot, several windows.
TEST(every_rank_count_root_and_size) {
  for (const Staging staging : {Staging{true, 128}, Staging{false, 128}, Staging{false, 256}}) {
    const u64 slot = staging.slot_bytes;
    for (const u64 bytes : {u64{0}, u64{1}, u64{15}, u64{16}, u64{17}, slot / 2 + 1, slot - 1, slot,
                            slot + 1, 3 * slot + 5}) {
      const Segment whole{0, bytes};
      for (u32 nranks = 1; nranks <= kMaxRanks; ++nranks) {
        const u32 everybody = (1u << nranks) - 1;
        for (u32 root = 0; root < nranks; ++root) {
          for (EventAlgorithm algorithm : kBroadcasts) {
            if (staging.direct && algorithm == EventAlgorithm::kCopyChain) continue;
            check_broadcast(plan_broadcast(algorithm, nranks, root, {&whole, 1}, staging), nranks,
                            root, {&whole, 1}, staging, bytes);
          }
          for (EventAlgorithm algorithm : kSums) {
            if (staging.direct && algorithm == EventAlgorithm::kCopyChain) continue;
            check_reduce_add(
                plan_reduce_add(algorithm, nranks, root, {&whole, 1}, {&everybody, 1}, 1, staging),
                nranks, root, {&whole, 1}, {&everybody, 1}, 1, staging, bytes);
            if (root != 0) continue;
            check_all_reduce(plan_all_reduce(algorithm, nranks, bytes, 1, staging), nranks, bytes,
                             1, staging, bytes % 2, bytes);
          }
        }
      }
    }
  }
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
    const u64 chunk_bytes = kUnit * (1 + random() % 6);
    check_broadcast(two_hop_plan(nranks, root, segments, staging, chunk_bytes), nranks, root,
                    segments, staging, random());
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
