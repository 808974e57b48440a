// The host backend: its threads, its tiles, and the floating-point mode they run in.
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "backend/host/block_threads.h"
#include "backend/host/float_mode.h"
#include "backend/host/pool.h"
#include "testing.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace pyparallel;

namespace {

constexpr u8 kPoison = 0xa5;
const std::vector<StreamHandle> kStreams(4, 0);

// Counts without atomics: ThreadSanitizer reports it if the pool does not order them.
void expect_each_tile_once(u64 ntiles) {
  std::vector<u32> counts(ntiles, 0);
  const auto count = [](void* context, u64 tile) {
    // Long enough for a sleeping thread to wake up and take tiles too.
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(2);
    while (std::chrono::steady_clock::now() < end) {
    }
    ++(*static_cast<std::vector<u32>*>(context))[tile];
  };
  host::Pool::instance().run(ntiles, count, &counts);
  for (u64 t = 0; t < ntiles; ++t) {
    EXPECT(counts[t] == 1, "tile ", t, " of ", ntiles, " ran ", counts[t], " times");
  }
}

// A task, the memory it works on, and what it should leave there.
struct Case {
  std::vector<std::vector<u8>> sources, destinations, want;
  std::vector<const void*> from;
  std::vector<void*> to;
  Task task;

  Case(u64 rows, u64 row_bytes, u64 source_pitch, u64 destination_pitch, u32 nsources,
       u32 ndestinations, bool sum, std::mt19937_64& random) {
    for (u32 k = 0; k < nsources; ++k) {
      auto& source = sources.emplace_back(rows * source_pitch + 1);
      for (u8& byte : source) byte = static_cast<u8>(random() >> 32);
      from.push_back(source.data());
    }
    for (u32 m = 0; m < ndestinations; ++m) {
      destinations.emplace_back(rows * destination_pitch + 1, kPoison);
      to.push_back(destinations.back().data());
    }
    want = destinations;
    for (auto& bytes : want) {
      for (u64 row = 0; row < rows; ++row) {
        for (u64 i = 0; i < row_bytes; ++i)
          bytes[row * destination_pitch + i] = sources[0][row * source_pitch + i];
      }
      for (u64 i = 0; sum && i + 4 <= row_bytes; i += 4) {
        u32 total = 0;
        for (const auto& source : sources) {
          u32 value;
          std::memcpy(&value, source.data() + i, 4);
          total += value;
        }
        std::memcpy(bytes.data() + i, &total, 4);
      }
    }
    task = {from.data(), to.data(),    nsources,          ndestinations, rows,
            row_bytes,   source_pitch, destination_pitch, sum,           DType::kInt32};
  }
};

void expect_tasks_right(std::vector<std::unique_ptr<Case>> cases) {
  const auto backend = make_host_backend(4);
  std::vector<Task> tasks;
  for (const auto& one : cases) tasks.push_back(one->task);
  backend->begin(kStreams);
  backend->launch(0, std::span(tasks).first(tasks.size() / 2));
  backend->launch(1, std::span(tasks).subspan(tasks.size() / 2));
  backend->end(kStreams);
  for (u64 c = 0; c < cases.size(); ++c) {
    EXPECT(cases[c]->destinations == cases[c]->want, "task ", c, " of ", cases.size(), " with ",
           cases[c]->task.rows, " rows of ", cases[c]->task.row_bytes, " bytes");
  }
}

}  // namespace

TEST(the_pool_runs_each_tile_once) {
  for (const u64 ntiles : {0, 1, 2, 3, 7, 200}) {
    for (int round = 0; round < 500; ++round) expect_each_tile_once(ntiles);
  }
}

TEST(several_threads_may_use_the_pool) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int round = 0; round < 200; ++round) expect_each_tile_once(20);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(blocks_run_at_the_same_time) {
  for (const u32 nblocks : {1u, 3u, 2u, 16u}) {
    std::barrier<> meeting(nblocks);  // hangs unless all blocks run together
    for (int round = 0; round < 50; ++round) {
      host::BlockThreads::instance().run(
          nblocks,
          [](void* context, u32) { static_cast<std::barrier<>*>(context)->arrive_and_wait(); },
          &meeting);
    }
  }
}

// ThreadSanitizer ends a forked child that starts threads.
#if !defined(__SANITIZE_THREAD__)
TEST(a_forked_child_has_threads_of_its_own) {
  expect_each_tile_once(100);
  const pid_t child = fork();
  if (child == 0) {
    expect_each_tile_once(100);
    std::barrier<> meeting(3);
    host::BlockThreads::instance().run(
        3, [](void* context, u32) { static_cast<std::barrier<>*>(context)->arrive_and_wait(); },
        &meeting);
    _exit(0);
  }
  int status = -1;
  EXPECT(waitpid(child, &status, 0) == child && status == 0, "the child's status is ", status);
  expect_each_tile_once(100);
}
#endif

TEST(tasks_of_any_shape_are_exact) {
  std::mt19937_64 random(1);
  for (const u32 ndestinations : {1u, 3u}) {
    for (const u64 row_bytes : {1, 3, 64, 1000, 70001}) {
      for (const u64 rows : {0, 1, 2, 33, 1500}) {
        if (rows * row_bytes > 2'000'000) continue;
        std::vector<std::unique_ptr<Case>> cases;
        for (const u64 gap : {0, 5}) {
          cases.push_back(std::make_unique<Case>(rows, row_bytes, row_bytes + gap, row_bytes, 1,
                                                 ndestinations, false, random));
          cases.push_back(std::make_unique<Case>(rows, row_bytes, row_bytes, row_bytes + gap, 1,
                                                 ndestinations, false, random));
        }
        expect_tasks_right(std::move(cases));
      }
    }
  }
}

TEST(many_small_and_some_large_tasks_together) {
  std::mt19937_64 random(2);
  for (const u32 count : {1u, 2u, 10u, 700u}) {
    std::vector<std::unique_ptr<Case>> cases;
    for (u32 i = 0; i < count; ++i) {
      const bool large = i % 100 == 7;
      const u32 nsources = 1 + random() % 4;
      // Copies of odd sizes shift where the tiles after them begin.
      const u64 bytes =
          4 * (random() % (large ? 300'000 : 300)) + (nsources == 1 ? random() % 4 : 0);
      cases.push_back(std::make_unique<Case>(1, bytes, bytes, bytes, nsources, 1 + random() % 3,
                                             nsources > 1, random));
    }
    expect_tasks_right(std::move(cases));
  }
}

TEST(tasks_behind_a_barrier_see_what_came_before) {
  constexpr u64 kBytes = 1 << 20;
  std::vector<u8> a(kBytes, 1), b(kBytes, 2), c(kBytes, 3);
  const void* from[] = {a.data(), b.data()};
  void* to[] = {b.data(), c.data()};
  const auto task = [&](int i) {
    return Task{from + i, to + i, 1, 1, 1, kBytes, kBytes, kBytes, false, {}};
  };
  const Task first = task(0), second = task(1);
  const auto backend = make_host_backend(4);
  backend->begin(kStreams);
  backend->launch(0, {&first, 1});
  backend->barrier();
  backend->launch(0, {&second, 1});
  backend->end(kStreams);
  EXPECT(c == a);
}

TEST(memory_is_zeroed_and_aligned) {
  const auto backend = make_host_backend(1);
  for (const u64 bytes : {1, 127, 128, 5000}) {
    auto* memory = static_cast<u8*>(backend->allocate(0, bytes, 0));
    EXPECT(reinterpret_cast<std::uintptr_t>(memory) % 128 == 0);
    for (u64 i = 0; i < bytes; ++i) EXPECT(memory[i] == 0);
    std::memset(memory, kPoison, bytes);
    backend->release(0, memory);
  }
}

#if defined(__x86_64__)
TEST(sums_keep_subnormals_whatever_the_callers_mode_is) {
  constexpr u32 kFlushes = 0x8040;  // FTZ and DAZ
  const u32 saved = _mm_getcsr();
  for (const u64 count : {10, 1'000'000}) {        // in the caller, and on the pool
    std::vector<u32> ones(count, 1), twos(count);  // 1: the smallest subnormal
    const void* from[] = {ones.data(), ones.data()};
    void* to[] = {twos.data()};
    const Task task{from, to, 2, 1, 1, count * 4, count * 4, count * 4, true, DType::kFloat32};
    const auto backend = make_host_backend(1);
    _mm_setcsr(saved | kFlushes);
    backend->begin(kStreams);
    backend->launch(0, {&task, 1});
    backend->end(kStreams);
    EXPECT((_mm_getcsr() & kFlushes) == kFlushes, "the caller's mode was not put back");
    _mm_setcsr(saved);
    for (u64 i = 0; i < count; ++i)
      EXPECT(twos[i] == 2, "element ", i, " of ", count, " is ", twos[i]);
  }
}

// The first launch may come from a thread that flushes, and new threads inherit that.
TEST(block_threads_start_in_the_default_mode) {
  const u32 saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);
  std::vector<u32> modes(24);
  host::BlockThreads::instance().run(
      24,
      [](void* context, u32 block) {
        (*static_cast<std::vector<u32>*>(context))[block] = _mm_getcsr() & 0xffc0;
      },
      &modes);
  _mm_setcsr(saved);
  for (const u32 mode : modes) EXPECT(mode == 0x1f80, mode);
}
#endif

TEST_MAIN()
