// Failures of devices that run behind their callers, and groups that cannot be launched whole.
#include "backend/host/faulty_backend.h"
#include "backend/host/flag_blocks.h"
#include "communicator_checks.h"

using namespace pyparallel;
using namespace pyparallel::testing;
using host::FaultPlan;
using Kind = host::FaultPlan::Kind;

namespace {

CommunicatorOptions with_timeout(u64 ms) {
  CommunicatorOptions options = kSmall;
  options.timeout_ms = ms;
  return options;
}

}  // namespace

// On devices a call returns before its work has run.
TEST(an_asynchronous_failure_is_raised_by_synchronize_or_by_the_next_call) {
  for (const bool by_next_call : {false, true}) {
    auto inner = std::make_unique<host::FaultyBackend>(FaultPlan{Kind::kAbsent, 1, 1});
    auto device = std::make_unique<AsynchronousBackend>(std::move(inner));
    AsynchronousBackend& backend = *device;
    World world(3, std::move(device), with_timeout(300));
    std::vector<Bytes> sources(3, Bytes(3000, 1)), sums(3, Bytes(3000, kPoison));
    const Segment segment[] = {{0, 3000}};
    const void* source[] = {sources[0].data()};
    std::unique_lock resting(backend.gate);
    std::vector<Bytes> lost(3, Bytes(3000));
    world.communicator.broadcast(0, source, segment, addresses(lost), world.streams, "chain");
    // Launched behind it, before anybody can know: an event-ordered operation is not concerned, a
    // flag-ordered one ends with it.
    world.communicator.all_reduce(addresses(std::as_const(sources)), addresses(sums), 750,
                                  DType::kInt32, world.streams, "two_shot");
    world.communicator.broadcast(0, source, segment, addresses(lost), world.streams, "chain");
    resting.unlock();
    const u64 ticket = backend.ticket();
    if (by_next_call) EXPECT(backend.wait(ticket, 10'000'000'000));
    const auto next = [&] {
      if (!by_next_call) return world.communicator.synchronize();
      world.communicator.broadcast(0, source, segment, addresses(lost), world.streams, "push");
    };
    const std::string text = message_of<Error>(next);
    EXPECT(text.starts_with("chain broadcast: rank "), text);
    EXPECT(backend.ticket() == ticket, "a call that raises launches nothing");
    EXPECT(sums[2] == Bytes(3000, 3));
    std::vector<Bytes> got(3, Bytes(3000));
    world.communicator.broadcast(0, source, segment, addresses(got), world.streams, "chain");
    world.communicator.synchronize();
    EXPECT(got[1] == sources[0] && got[2] == sources[0]);
  }
}

TEST(connections_are_freed_only_when_asynchronous_work_has_left_them) {
  auto inner = std::make_unique<host::FaultyBackend>(FaultPlan{Kind::kAbsent, 1, 1});
  auto device = std::make_unique<AsynchronousBackend>(std::move(inner));
  AsynchronousBackend& backend = *device;
  World world(3, std::move(device), with_timeout(50));
  const Bytes input(600);
  std::vector<Bytes> memory(3, Bytes(600));
  const void* source[] = {input.data()};
  const Segment segment[] = {{0, 600}};
  const auto run = [&](const char* algorithm) {
    world.communicator.broadcast(0, source, segment, addresses(memory), world.streams, algorithm);
  };
  run("chain");
  EXPECT(backend.wait(backend.ticket(), 10'000'000'000));
  const int allocations = backend.allocations;
  std::unique_lock resting(backend.gate);
  EXPECT(message_of<Error>([&] { run("chain"); }).starts_with("chain broadcast"));
  EXPECT(backend.allocations == 0, "the work had left them, so they were freed at once");
  run("chain");
  run("push");
  EXPECT(backend.allocations == allocations);
  resting.unlock();
  world.communicator.close();
  EXPECT(backend.allocations == 0);
}

TEST(a_group_that_cannot_be_launched_whole_leaves_at_once) {
  // Starts the blocks of rank 0 only, and then raises, as a launch loop that fails at a device.
  class HalfLaunched : public WrappedBackend {
   public:
    using WrappedBackend::WrappedBackend;
    ~HalfLaunched() override {
      for (std::thread& block : blocks) block.join();
    }
    void launch_flagged(const FlagArgs& args) override {
      if (--whole >= 0) return WrappedBackend::launch_flagged(args);
      whole = 1000;
      for (u32 channel = 0; channel < args.shape.nchannels; ++channel) {
        ++running;
        blocks.emplace_back([this, args, channel] {
          host::run_flag_block(args, channel);
          --running;
        });
      }
      throw Error("device 1 refused the launch");
    }
    void end(std::span<const StreamHandle> callers) override {
      ++ends;
      WrappedBackend::end(callers);
    }
    u64 ticket() override { return 1; }
    bool finished(u64) override { return running == 0; }
    bool wait(u64, u64) override {
      while (running != 0) std::this_thread::yield();
      return true;
    }
    int whole = 1, ends = 0;
    std::atomic<int> running{0};
    std::vector<std::thread> blocks;
  };
  auto owned = std::make_unique<HalfLaunched>(3);
  HalfLaunched& backend = *owned;
  World world(3, std::move(owned), with_timeout(600'000));  // the test would end before that
  check_broadcast(world, 0, 5003, "chain");
  std::vector<Bytes> memory(3, Bytes(5003));  // as on devices, in use until the work has ended
  const void* source[] = {memory[0].data()};
  const Segment segment[] = {{0, 5003}};
  EXPECT_TEXT(message_of<Error>([&] {
                world.communicator.broadcast(0, source, segment, addresses(memory), world.streams,
                                             "chain");
              }),
              "device 1 refused the launch");
  EXPECT(backend.ends == backend.launches, "callers do not wait for what was launched");
  world.communicator.synchronize();  // bounded: the blocks saw the abort word
  check_broadcast(world, 0, 5003, "chain");
  check_everything(world);
  world.communicator.close();
  EXPECT(backend.allocations == 0, backend.allocations);
}

TEST(a_plan_that_cannot_be_launched_whole_is_still_waited_for) {
  struct Refusing : StagedBackend {
    using StagedBackend::StagedBackend;
    void launch(u32 rank, std::span<const Task> tasks) override {
      if (rank == refuses) throw Error("device 1 refused the launch");
      StagedBackend::launch(rank, tasks);
    }
    void end(std::span<const StreamHandle> callers) override {
      ++ends;
      StagedBackend::end(callers);
    }
    u32 refuses = 1;
    int ends = 0;
  };
  auto owned = std::make_unique<Refusing>(3);
  Refusing& backend = *owned;
  World world(3, std::move(owned));
  EXPECT_TEXT(message_of<Error>([&] { check_broadcast(world, 0, 5003, "push"); }),
              "device 1 refused the launch");
  EXPECT(backend.launches == 1 && backend.ends == 1);
  backend.refuses = 3;
  check_everything(world);
}

TEST_MAIN()
