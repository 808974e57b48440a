// Ranks that are absent or late, as any backend can show them: PYPARALLEL_TEST_DEVICES names the
// GPUs of the ranks ("cuda:0,cuda:0,cuda:0"); without it the ranks are on the host backend.
#include <chrono>
#include <cstdlib>
#include <regex>
#include <utility>

#include "communicator.h"
#include "testing.h"
#include "wrapped_backend.h"

using namespace pyparallel;
using namespace pyparallel::testing;

namespace {

constexpr u64 kTimeoutMs = 400;
constexpr u64 kCount = 5003;  // int32; more slices than slots, so that every rank is waited for
constexpr i32 kPoison = -1;
constexpr CommunicatorOptions kOptions{
    .timeout_ms = kTimeoutMs, .nchannels = 2, .slots = 4, .slot_bytes = 256};

// Empty: the host backend.
std::vector<int> gpus() {
  std::vector<int> devices;
  const char* named = std::getenv("PYPARALLEL_TEST_DEVICES");
  const std::string names = named ? named : "";
  static const std::regex name("cuda:([0-9]+)");
  for (std::sregex_iterator i(names.begin(), names.end(), name), end; i != end; ++i)
    devices.push_back(std::stoi((*i)[1]));
  return devices;
}

u32 rank_count() { return gpus().empty() ? 4 : static_cast<u32>(gpus().size()); }

std::unique_ptr<Backend> make_backend() {
  return gpus().empty() ? make_host_backend(rank_count()) : make_cuda_backend(gpus());
}

// In one launch, a rank sends into nowhere and hears of nobody, or believes that everybody has
// answered: for the others it does not exist. If `late`, it comes after they have given up.
class SilentRankBackend : public WrappedBackend {
 public:
  using WrappedBackend::WrappedBackend;

  void launch_flagged(const FlagArgs& args) override {
    if (!std::exchange(is_next, false)) return WrappedBackend::launch_flagged(args);
    const u32 nchannels = args.shape.nchannels, ends = args.shape.nranks * nchannels;
    const u64 tables = round_up(ends * (sizeof(SendEnd) + sizeof(RecvEnd)), kUnit);
    const u64 slot_bytes = args.shape.slots * args.slot_bytes;
    memory_ = static_cast<u8*>(allocate(rank, tables + 2 * kUnit + 2 * nchannels * slot_bytes, 0));
    auto* answers = reinterpret_cast<u64*>(memory_ + tables);
    auto* nowhere = reinterpret_cast<u64*>(memory_ + tables + kUnit);
    const u64 answered = u64{1} << 40;
    write(rank, answers, &answered, sizeof(answered));
    std::vector<SendEnd> sends;
    std::vector<RecvEnd> recvs;
    for (u32 i = 0; i < ends; ++i) {
      // Blocks of different channels run at the same time.
      u8* slots = memory_ + tables + 2 * kUnit + 2 * (i % nchannels) * slot_bytes;
      sends.push_back({0, 0, answers, nowhere, slots});
      recvs.push_back({0, 0, answers, nowhere, slots + slot_bytes});
    }
    FlagArgs without = args;
    without.ranks[rank].sends = reinterpret_cast<SendEnd*>(memory_);
    without.ranks[rank].recvs = reinterpret_cast<RecvEnd*>(memory_ + ends * sizeof(SendEnd));
    write(rank, without.ranks[rank].sends, sends.data(), ends * sizeof(SendEnd));
    write(rank, without.ranks[rank].recvs, recvs.data(), ends * sizeof(RecvEnd));
    WrappedBackend::launch_flagged(without);
    if (late) WrappedBackend::launch_flagged(args);
  }

  // Call when the launch has ended.
  void forget() { release(rank, std::exchange(memory_, nullptr)); }

  u32 rank = 0;
  bool late = false, is_next = false;

 private:
  u8* memory_ = nullptr;
};

// Buffers in host memory that the kernels of all ranks reach.
class World {
 public:
  World() : World(std::make_unique<SilentRankBackend>(make_backend())) {}
  ~World() {
    for (i32* buffer : buffers_) backend.release_host(buffer);
    communicator.close();
  }

  // Runs the collective from rank 0, poisons the outputs before, and counts wrong values after.
  u64 run(const Algorithm& algorithm) {
    const u32 n = rank_count();
    const bool broadcast = algorithm.collective == Collective::kBroadcast;
    std::vector<const void*> sources;
    std::vector<void*> destinations;
    for (u32 r = 0; r < n; ++r) {
      i32 *input = buffers_[2 * r], *output = buffers_[2 * r + 1];
      for (u64 i = 0; i < kCount; ++i) {
        input[i] = value(r, i);
        output[i] = kPoison;
      }
      sources.push_back(input);
      destinations.push_back(output);
    }
    const std::vector<StreamHandle> streams(n, 0);
    const Segment segment[] = {{0, kCount * sizeof(i32)}};
    if (broadcast) {
      communicator.broadcast(0, {sources.data(), 1}, segment, destinations, streams,
                             algorithm.name);
    } else if (algorithm.collective == Collective::kReduceAdd) {
      communicator.reduce_add(0, sources, segment, destinations[0], DType::kInt32, streams,
                              algorithm.name);
    } else {
      communicator.all_reduce(sources, destinations, kCount, DType::kInt32, streams,
                              algorithm.name);
    }
    communicator.synchronize();
    u64 wrong = 0;
    for (u32 r = broadcast ? 1 : 0; r < n; ++r) {
      if (algorithm.collective == Collective::kReduceAdd && r > 0) break;
      for (u64 i = 0; i < kCount; ++i) wrong += buffers_[2 * r + 1][i] != expected(broadcast, i);
    }
    return wrong;
  }

  SilentRankBackend& backend;
  Communicator communicator;

 private:
  explicit World(std::unique_ptr<SilentRankBackend> owned)
      : backend(*owned), communicator(std::move(owned), rank_count(), kOptions) {
    for (u32 i = 0; i < 2 * rank_count(); ++i)
      buffers_.push_back(static_cast<i32*>(backend.allocate_host(kCount * sizeof(i32))));
  }

  static i32 value(u32 rank, u64 i) { return static_cast<i32>((i + 3 * rank) % 7); }
  static i32 expected(bool broadcast, u64 i) {
    if (broadcast) return value(0, i);
    i32 total = 0;
    for (u32 r = 0; r < rank_count(); ++r) total += value(r, i);
    return total;
  }

  std::vector<i32*> buffers_;
};

// Fails, is reported in time and in words, and the next call works.
void check_failure(World& world, const Algorithm& algorithm, u32 rank, bool late) {
  using Clock = std::chrono::steady_clock;
  const std::string what = message(algorithm.name, " ", collective_name(algorithm.collective),
                                   late ? ", late rank " : ", absent rank ", rank);
  world.backend.rank = rank;
  world.backend.late = late;
  world.backend.is_next = true;
  const auto start = Clock::now();
  std::string text = "nothing was raised";
  try {
    world.run(algorithm);
  } catch (const Error& error) {
    text = error.what();
  }
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
  world.backend.forget();
  const std::regex wanted(message(algorithm.name, " ", collective_name(algorithm.collective),
                                  ": rank \\d+ waited ", kTimeoutMs,
                                  " ms for (data|a credit) from rank \\d+ on channel \\d+: wanted "
                                  "step \\d+, saw \\d+"));
  EXPECT(std::regex_match(text, wanted), what, ": ", text);
  EXPECT(ms < 4 * static_cast<i64>(kTimeoutMs), what, ": took ", ms, " ms");
  std::printf("%s: %s\n", what.c_str(), text.c_str());
  const u64 wrong = world.run(algorithm);
  EXPECT(wrong == 0, what, ": ", wrong, " wrong values in the next call");
}

}  // namespace

TEST(a_rank_that_is_absent_or_late_is_reported_and_the_next_call_works) {
  if (rank_count() < 2) return;
  World world;
  for (const Collective collective :
       {Collective::kBroadcast, Collective::kReduceAdd, Collective::kAllReduce}) {
    for (const Algorithm& algorithm : algorithms_of(collective)) {
      if (!algorithm.flag_ordered) continue;
      EXPECT(world.run(algorithm) == 0, algorithm.name, " ", collective_name(collective));
      const int allocations = world.backend.allocations;
      for (const u32 rank : {0u, 1u}) {
        check_failure(world, algorithm, rank, false);
        check_failure(world, algorithm, rank, true);
      }
      // What failed is freed at the next call after its work has ended.
      EXPECT(world.run(algorithm) == 0, algorithm.name, " ", collective_name(collective));
      EXPECT(world.backend.allocations <= allocations, world.backend.allocations, " allocations, ",
             allocations, " before the failures");
    }
  }
}

TEST_MAIN()
