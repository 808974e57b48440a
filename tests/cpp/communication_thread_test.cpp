// Queued operations: the thread itself, and sums of communicators on it.
#include "backend/host/communication_thread.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <latch>
#include <set>
#include <thread>

#include "backend/host/faulty_backend.h"
#include "backend/host/pool.h"
#include "communicator_checks.h"

using namespace pyparallel;
using namespace pyparallel::testing;
using host::CommunicationThread;

namespace {

constexpr u64 kLong = 30000;

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was raised";
}

void expect_text(const std::string& got, const std::string& want) {
  EXPECT(got == want, "'", got, "', not '", want, "'");
}

CommunicationThread& started() {
  CommunicationThread& thread = CommunicationThread::instance();
  EXPECT(thread.start());
  return thread;
}

// A sum of float32 with everything that it needs.
struct QueuedSum {
  World& world;
  std::vector<Bytes> sources;
  Bytes destination;
  u64 count, ticket = 0;

  QueuedSum(World& w, u64 n)
      : world(w), sources(w.sources(DType::kFloat32, n)), destination(n * 4, kPoison), count(n) {}
  void launch(const std::string& algorithm = "auto") {
    ticket = world.communicator.reduce_add_async(1, addresses(std::as_const(sources)),
                                                 {{0, count * 4}}, destination.data(),
                                                 DType::kFloat32, world.streams, algorithm);
  }
  void expect_right() const {
    EXPECT(destination == world.sum(DType::kFloat32, count), count, " elements, ticket ", ticket);
  }
};

constexpr u64 kQueued = 20'000;  // elements of a sum that is not run at once

// While one exists, the thread has not finished its first operation, so others queue up behind it.
struct Blocker {
  Blocker() {
    ticket = started().submit(this, [this] { gate.wait(); });
  }
  ~Blocker() {
    open();
    started().wait(ticket, kLong);
  }
  void open() {
    if (!std::exchange(opened, true)) gate.count_down();
  }
  std::latch gate{1};
  bool opened = false;
  u64 ticket;
};

}  // namespace

TEST(operations_run_in_order_and_waits_see_what_they_wrote) {
  CommunicationThread& thread = started();
  std::vector<u64> order, tickets;  // not atomic: ThreadSanitizer checks what a wait orders
  for (u64 i = 0; i < 1000; ++i)
    tickets.push_back(thread.submit(&order, [&order, i] { order.push_back(i); }));
  EXPECT(std::is_sorted(tickets.begin(), tickets.end()) && tickets[0] != 0);
  thread.wait(tickets[999], kLong);
  for (u64 i = 0; i < 1000; ++i) EXPECT(order[i] == i, i);
  for (const u64 ticket : tickets) thread.wait(ticket, kLong);
  EXPECT(thread.idle());
}

TEST(several_threads_submit_and_wait) {
  CommunicationThread& thread = started();
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&thread] {
      u64 sum = 0;
      for (u64 i = 1; i <= 200; ++i) {
        const u64 ticket = thread.submit(&sum, [&sum, i] { sum += i; });
        if (i % 7 == 0) thread.wait(ticket, kLong);
      }
      thread.finish(&sum);
      EXPECT(sum == 200 * 201 / 2, sum);
    });
  }
  for (auto& caller : callers) caller.join();
}

TEST(a_failure_is_raised_by_every_wait_and_else_once) {
  CommunicationThread& thread = started();
  int mine, others;
  const u64 ticket = thread.submit(&mine, [] { throw Error("it broke"); });
  const u64 after = thread.submit(&mine, [] {});
  thread.wait(after, kLong);
  thread.raise_failure(&others);
  expect_text(message_of([&] { thread.raise_failure(&mine); }), "it broke");
  thread.raise_failure(&mine);
  for (int i = 0; i < 2; ++i)
    expect_text(message_of([&] { thread.wait(ticket, kLong); }), "it broke");
  const u64 waited = thread.submit(&mine, [] { throw std::bad_alloc(); });
  expect_text(message_of([&] { thread.wait(waited, kLong); }), "std::bad_alloc");
  thread.raise_failure(&mine);  // a wait has raised it
  thread.submit(&mine, [] { throw Error("nobody asked"); });
  thread.finish(&mine);
  thread.forget(&mine);
  thread.raise_failure(&mine);
}

TEST(a_wait_is_bounded_and_may_be_repeated) {
  CommunicationThread& thread = started();
  u64 ticket;
  {
    Blocker blocker;
    ticket = thread.submit(&blocker, [] {});
    const auto start = std::chrono::steady_clock::now();
    expect_text(message_of([&] { thread.wait(ticket, 30); }),
                "wait: no queued sum was finished for 30 ms; 1 are queued before this one");
    const auto waited = std::chrono::steady_clock::now() - start;
    EXPECT(waited >= std::chrono::milliseconds(30) && waited < std::chrono::seconds(20));
  }
  thread.wait(ticket, kLong);
  const std::string text = message_of([&] { thread.wait(ticket + 1, kLong); });
  expect_text(text, message("wait: this process has issued no ticket ", ticket + 1));
  EXPECT(message_of([&] { thread.wait(1, kLong); }) != "nothing was raised");
}

// Progress restarts the clock: a long queue is no failure.
TEST(a_long_queue_is_waited_for) {
  CommunicationThread& thread = started();
  u64 ticket = 0;
  for (int i = 0; i < 10; ++i) {
    ticket =
        thread.submit(&ticket, [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
  }
  thread.wait(ticket, 300);
}

TEST(queued_sums_are_right) {
  for (const u32 n : {2u, 3u, 4u}) {
    World world(n, make_host_backend(n), CommunicatorOptions{});
    std::vector<QueuedSum> sums;
    for (u64 i = 0; i < 40; ++i) sums.emplace_back(world, i % 10 == 9 ? 200'000 : kQueued + i);
    for (QueuedSum& sum : sums) sum.launch();
    for (u64 i = 0; i < sums.size(); ++i) {
      const QueuedSum& sum = sums[i % 2 == 0 ? i : sums.size() - i];  // in any order
      EXPECT(sum.ticket != 0);
      world.communicator.wait(sum.ticket);
      sum.expect_right();
    }
  }
}

TEST(a_small_sum_is_done_at_once_where_nothing_is_queued) {
  World world(3);
  QueuedSum sum(world, 1000);
  sum.launch();
  EXPECT(sum.ticket == 0, sum.ticket);
  sum.expect_right();
  world.communicator.wait(0);
  QueuedSum empty(world, 0);
  empty.launch();
  EXPECT(empty.ticket == 0);
  QueuedSum behind(world, 1000);
  {
    Blocker blocker;
    behind.launch();
    EXPECT(behind.ticket != 0);
    EXPECT(behind.destination == Bytes(4000, kPoison), "it ran before its turn");
  }
  world.communicator.wait(behind.ticket);
  behind.expect_right();
}

TEST(arguments_are_checked_by_the_call) {
  World world(2);
  QueuedSum sum(world, kQueued);
  expect_text(message_of([&] { sum.launch("ring"); }),
              "reduce_add: unknown algorithm 'ring'; choose auto, owner, copy_chain, chain or ll");
  sum.sources.pop_back();
  expect_text(message_of([&] { sum.launch(); }),
              "reduce_add: got 1 sources for 2 ranks with 1 segments");
  EXPECT(CommunicationThread::instance().idle());
}

TEST(synchronize_close_and_the_destructor_wait_for_queued_sums) {
  for (const auto end : {"synchronize", "close", "destructor"}) {
    auto world = std::make_unique<World>(3);
    std::vector<QueuedSum> sums;
    for (int i = 0; i < 20; ++i) sums.emplace_back(*world, kQueued);
    Blocker blocker;
    for (QueuedSum& sum : sums) sum.launch();
    std::thread opener([&blocker] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      blocker.open();
    });
    const Bytes want = world->sum(DType::kFloat32, kQueued);
    if (end == std::string_view("synchronize")) world->communicator.synchronize();
    if (end == std::string_view("close")) world->communicator.close();
    if (end == std::string_view("destructor")) world.reset();
    opener.join();
    for (const QueuedSum& sum : sums) EXPECT(sum.destination == want, end);
  }
}

TEST(a_sum_that_failed_is_raised_by_wait_and_the_next_one_is_right) {
  auto owned = std::make_unique<host::FaultyBackend>(host::FaultPlan{.rank = 1});
  host::FaultPlan& plan = owned->plan;
  CommunicatorOptions options = kSmall;
  options.timeout_ms = 200;
  World world(3, std::move(owned), options);
  const std::string want = "chain reduce_add: rank ";
  QueuedSum failing(world, kQueued), right(world, kQueued);
  const auto fail = [&] {
    plan.launches = 1;
    failing.launch("chain");
    while (!CommunicationThread::instance().idle()) std::this_thread::yield();
  };
  fail();
  EXPECT(message_of([&] { world.communicator.wait(failing.ticket); }).starts_with(want));
  right.launch();
  world.communicator.wait(right.ticket);
  right.expect_right();

  // Nobody waits: the next call, whichever it is.
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"reduce_add_async", [&] { right.launch(); }},
      {"broadcast", [&] { check_broadcast(world, 0, 64, "auto"); }},
      {"all_reduce", [&] { check_all_reduce(world, 64, DType::kFloat32, false, "ring"); }},
      {"synchronize", [&] { world.communicator.synchronize(); }},
      {"close", [&] { world.communicator.close(); }},
  };
  for (const auto& [name, call] : calls) {
    fail();
    const std::string text = message_of(call);
    EXPECT(text.starts_with(want), name, ": ", text);
    EXPECT(message_of([&] { world.communicator.wait(failing.ticket); }).starts_with(want), name);
  }
  EXPECT(world.communicator.closed());
}

// A failure belongs to the sum that failed, not to those behind it in the queue.
TEST(sums_behind_one_that_failed_are_right) {
  auto owned = std::make_unique<host::FaultyBackend>(host::FaultPlan{.rank = 1, .launches = 1});
  CommunicatorOptions options = kSmall;
  options.timeout_ms = 200;
  World world(2, std::move(owned), options);
  QueuedSum failing(world, kQueued), right(world, kQueued);
  failing.launch("chain");
  right.ticket = started().submit(&right, [&] {
    world.communicator.reduce_add(1, addresses(std::as_const(right.sources)),
                                  std::vector<Segment>{{0, kQueued * 4}}, right.destination.data(),
                                  DType::kFloat32, world.streams, "auto");
  });
  world.communicator.wait(right.ticket);
  right.expect_right();
  EXPECT(message_of([&] { world.communicator.wait(failing.ticket); }) != "nothing was raised");
}

TEST(queued_and_ordinary_operations_of_several_threads) {
  World first(2, make_host_backend(2), CommunicatorOptions{});
  World second(3, make_host_backend(3), CommunicatorOptions{});
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      World& world = t % 2 ? first : second;
      for (int i = 0; i < 10; ++i) {
        QueuedSum a(world, kQueued), b(world, 100'000);
        a.launch();
        b.launch();
        check_broadcast(world, 1, 200'000, "push");
        world.communicator.wait(b.ticket);
        world.communicator.wait(a.ticket);
        a.expect_right();
        b.expect_right();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// Which threads run the tiles of a job.
struct Tiles {
  std::mutex mutex;
  std::set<std::thread::id> threads;

  void run() {
    host::Pool::instance().run(
        200,
        [](void* context, u64) {
          auto& tiles = *static_cast<Tiles*>(context);
          {
            const std::lock_guard<std::mutex> lock(tiles.mutex);
            tiles.threads.insert(std::this_thread::get_id());
          }
          std::this_thread::sleep_for(std::chrono::microseconds(200));
        },
        this);
  }
};

TEST(queued_work_takes_a_quarter_of_the_cores_until_somebody_waits) {
  const u64 cores = host::Pool::instance().concurrency();
  Tiles alone, hurried;
  alone.run();  // starts the workers
  EXPECT(alone.threads.size() == cores, alone.threads.size());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until they sleep again
  alone.threads.clear();
  const u64 ticket = started().submit(&alone, [&] { alone.run(); });
  while (!started().idle()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT(alone.threads.size() == std::max<u64>(cores / 4, 1), alone.threads.size(), " threads");
  started().wait(ticket, kLong);
  const u64 second = started().submit(&hurried, [&] { hurried.run(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  started().wait(second, kLong);
  EXPECT(hurried.threads.size() == cores, hurried.threads.size(), " threads");
}

// ThreadSanitizer ends a forked child that starts threads.
#if !defined(__SANITIZE_THREAD__)
TEST(a_forked_child_has_a_thread_of_its_own_and_none_of_the_queue) {
  World world(2);
  QueuedSum sum(world, kQueued);
  auto blocker = std::make_unique<Blocker>();
  sum.launch();
  const pid_t child = fork();
  if (child == 0) {
    // Tickets of the parent are unknown, nothing is waited for, and sums work.
    const bool unknown =
        message_of([&] { world.communicator.wait(sum.ticket); }) != "nothing was raised";
    world.communicator.synchronize();
    QueuedSum mine(world, kQueued);
    mine.launch();
    world.communicator.wait(mine.ticket);
    mine.expect_right();
    _exit(unknown && mine.ticket != 0 ? 0 : 1);
  }
  int status = -1;
  EXPECT(waitpid(child, &status, 0) == child && status == 0, "the child's status is ", status);
  blocker.reset();
  world.communicator.wait(sum.ticket);
  sum.expect_right();
}
#endif

TEST_MAIN()
