// Communicators that are closed, shared between threads and used for long: nothing hangs, nothing
// is lost, nothing is allocated in steady state.
#include <sys/wait.h>
#include <unistd.h>

#include "communicator_checks.h"

using namespace pyparallel;
using namespace pyparallel::testing;

TEST(steady_state_allocates_nothing) {
  for (const bool staged : {false, true}) {
    auto owned = staged ? std::make_unique<StagedBackend>(3) : std::make_unique<WrappedBackend>(3);
    WrappedBackend& backend = *owned;
    World world(3, std::move(owned));
    check_everything(world);
    const int calls = backend.allocation_calls;
    EXPECT(calls > 0);
    check_everything(world);
    EXPECT(backend.allocation_calls == calls, backend.allocation_calls - calls,
           " allocations in the second round");
  }
}

TEST(close_waits_for_work_in_flight) {
  auto owned = std::make_unique<AsynchronousBackend>(3);
  AsynchronousBackend& backend = *owned;
  World world(3, std::move(owned));
  const Bytes source(5000, 1);
  std::vector<Bytes> memory(3, Bytes(5000));
  const void* from[] = {source.data()};
  const Segment segment[] = {{0, 5000}};
  std::atomic<bool> rests{false};
  std::thread busy([&] {
    const std::lock_guard resting(backend.gate);
    rests = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
  });
  while (!rests) std::this_thread::yield();
  for (const auto algorithm : {"chain", "push"})
    world.communicator.broadcast(0, from, segment, addresses(memory), world.streams, algorithm);
  world.communicator.close();
  busy.join();
  EXPECT(memory[2] == source, "close() returned before the work had run");
  EXPECT(backend.allocations == 0, backend.allocations);
}

TEST(close_gives_up_on_work_that_never_ends) {
  auto owned = std::make_unique<AsynchronousBackend>(3);
  AsynchronousBackend& backend = *owned;
  CommunicatorOptions options = kSmall;
  options.timeout_ms = 20;
  std::vector<Bytes> memory(3, Bytes(5000));
  const Bytes source(5000, 1);
  {
    World world(3, std::move(owned), options);
    const void* from[] = {source.data()};
    const Segment segment[] = {{0, 5000}};
    std::unique_lock resting(backend.gate);
    world.communicator.broadcast(0, from, segment, addresses(memory), world.streams, "chain");
    EXPECT_TEXT(message_of<Error>([&] { world.communicator.synchronize(); }),
                "synchronize: work was still running after 40 ms");
    world.communicator.close();
    EXPECT(backend.allocations > 0, "memory that running work uses was freed");
  }
  EXPECT(memory[2] == source, "the work ran to its end on memory that was not freed");
}

TEST(a_communicator_may_be_closed_while_other_threads_use_it) {
  for (int round = 0; round < 20; ++round) {
    World world(2);
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&world, t] {
        const std::string text = message_of<Error>([&] {
          for (;;) check_broadcast(world, 1, 700, t % 2 ? "push" : "chain");
        });
        EXPECT_TEXT(text, "the communicator is closed");
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    world.communicator.close();
    for (auto& thread : threads) thread.join();
  }
}

// ThreadSanitizer ends a forked child that starts threads.
#if !defined(__SANITIZE_THREAD__)
TEST(a_child_forked_while_other_threads_transfer_has_a_working_communicator) {
  World world(3);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      while (!stop) check_broadcast(world, 1, 200'000, t ? "chain" : "push");
    });
  }
  for (int i = 0; i < 10; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);  // a child that hangs is a failure, not a child for ever
      check_broadcast(world, 0, 200'000, "push");
      check_broadcast(world, 0, 5000, "chain");
      World other(2);
      check_all_reduce(other, 1000, DType::kFloat32, false, "ring");
      _exit(0);
    }
    int status = -1;
    EXPECT(waitpid(child, &status, 0) == child && status == 0, "the child's status is ", status);
  }
  stop = true;
  for (auto& thread : threads) thread.join();
}
#endif

TEST_MAIN()
