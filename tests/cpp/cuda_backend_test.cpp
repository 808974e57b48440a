// The CUDA backend on fake GPUs: values, order, placement, and what every failed CUDA call leaves.
#include <algorithm>
#include <deque>

#include "fake_devices.h"
// After the fakes.
#include "communicator_checks.h"

namespace pyparallel {
std::unique_ptr<Backend> make_fake_cuda_backend(std::vector<int> devices);
}

using namespace pyparallel;
using namespace pyparallel::testing;

namespace {

const std::vector<std::vector<int>> kLayouts = {{0}, {1, 2}, {0, 0, 0}, {3, 1, 3, 0}};

// Before each group every caller queues something; after it every caller must come after the group.
// The calling thread has no context, and none may be left behind.
class CallersBackend : public WrappedBackend {
 public:
  using WrappedBackend::WrappedBackend;

  void begin(std::span<const StreamHandle> callers) override {
    fake::queued.clear();
    fake::group.clear();
    for (const StreamHandle handle : callers) {
      auto* stream = reinterpret_cast<cudaStream_t>(handle);
      fake::current = stream->device;
      Work before;
      fake::queued.insert(fake::launch(stream, before));
    }
    fake::current = -1;
    WrappedBackend::begin(callers);
  }
  void end(std::span<const StreamHandle> callers) override {
    WrappedBackend::end(callers);
    for (const StreamHandle handle : callers) {
      const Work& before = reinterpret_cast<cudaStream_t>(handle)->before;
      EXPECT(std::includes(before.begin(), before.end(), fake::group.begin(), fake::group.end()),
             "a caller that does not wait for the group");
    }
    fake::run_everything();
    for (const StreamHandle handle : callers) {
      Work& before = reinterpret_cast<cudaStream_t>(handle)->before;
      before.clear();  // all of it has run; sets that grow for ever would only cost time
    }
  }
  bool wait(u64 ticket, u64 timeout_ns) override {
    fake::run_everything();  // as devices do meanwhile
    return WrappedBackend::wait(ticket, timeout_ns);
  }
};

struct Gpus {
  std::deque<CUstream_st> streams;
  CallersBackend* backend;
  World world;

  explicit Gpus(const std::vector<int>& devices, CommunicatorOptions options = kSmall)
      : world(static_cast<u32>(devices.size()), make(devices), options) {
    for (size_t rank = 0; rank < devices.size(); ++rank) {
      streams.push_back({devices[rank], {}});
      world.streams[rank] = reinterpret_cast<StreamHandle>(&streams.back());
    }
  }

 private:
  std::unique_ptr<Backend> make(const std::vector<int>& devices) {
    auto owned = std::make_unique<CallersBackend>(make_fake_cuda_backend(devices));
    backend = owned.get();
    return owned;
  }
};

void run_some(World& world) {
  const u32 last = world.nranks - 1;
  for (const auto algorithm : {"push", "chain"}) check_broadcast(world, last, 5003, algorithm);
  for (const auto algorithm : {"owner", "chain"})
    check_reduce_add(world, 0, 1003, DType::kFloat32, algorithm);
  for (const auto algorithm : {"two_shot", "ring"})
    check_all_reduce(world, 1003, DType::kBFloat16, false, algorithm);
  check_scatter_and_gather(world, 0, 40, 0);
}

int device_allocations() {
  return static_cast<int>(std::count_if(fake::memory.begin(), fake::memory.end(), [](auto& entry) {
    return entry.second.device != fake::kHost;
  }));
}

}  // namespace

TEST(every_collective_is_right_and_in_order) {
  for (const std::vector<int>& devices : kLayouts) {
    {
      Gpus gpus(devices);
      EXPECT(fake::current == -1, "creation left a context");
      run_some(gpus.world);
      EXPECT(fake::current == -1);
      const size_t allocations = fake::memory.size();
      const int events = fake::nevents;
      run_some(gpus.world);
      EXPECT(fake::memory.size() == allocations && fake::nevents == events,
             "memory or events were made in steady state");
    }
    EXPECT(fake::current == -1 && fake::memory.empty() && fake::nevents == 0,
           "something was left behind");
  }
}

TEST(memory_that_a_bad_pair_touches_is_in_host_memory) {
  fake::bad_pairs[{0, 1}] = true;
  {
    Gpus gpus({0, 1, 2});
    run_some(gpus.world);  // checks that GPU 0 never touches memory of GPU 1
    EXPECT(device_allocations() > 0);
  }
  fake::bad_pairs.clear();
}

TEST(blocking_launches_leave_event_ordered_algorithms) {
  setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  Gpus several({0, 1}), one({2, 2});
  unsetenv("CUDA_LAUNCH_BLOCKING");
  EXPECT(message_of<Error>([&] {
           check_broadcast(several.world, 0, 5003, "chain");
         }).starts_with("broadcast: chain needs kernels that run at the same time"));
  check_broadcast(several.world, 0, 5003, "auto");
  check_broadcast(several.world, 0, 64, "auto");
  check_all_reduce(several.world, 1003, DType::kFloat32, false, "auto");
  check_broadcast(one.world, 0, 5003, "chain");  // all blocks are in one launch
}

// Whatever call fails: an Error, the caller's context as before, and the next call is right.
TEST(every_failed_call_is_survived) {
  const std::vector<int> devices = {0, 1, 0};
  for (const auto algorithm : {"push", "chain"}) {
    int failed = 0;
    for (bool fails = true; fails; ++failed) {
      fake::fail_in = failed + 1;
      bool created = false;
      const std::string text = message_of<Error>([&] {
        Gpus gpus(devices);
        created = true;
        check_broadcast(gpus.world, 0, 700, algorithm);
        gpus.world.communicator.synchronize();
        fails = fake::fail_in == 0;
      });
      EXPECT(fake::current == -1, "call ", failed, " left a context: ", text);
      fails = fake::fail_in == 0;
      fake::fail_in = 0;
      if (created) {
        // A failed call in the middle of a communicator's life.
        Gpus gpus(devices);
        check_broadcast(gpus.world, 0, 700, algorithm);
        fake::fail_in = failed + 1;
        const std::string later = message_of<Error>([&] {
          check_broadcast(gpus.world, 0, 700, algorithm);
          gpus.world.communicator.synchronize();
        });
        fake::fail_in = 0;
        EXPECT(fake::current == -1, later);
        check_broadcast(gpus.world, 1, 700, algorithm);
        check_all_reduce(gpus.world, 100, DType::kInt32, false, "ring");
      }
      // close() frees nothing on a device that has failed.
      const bool in_close = text == "nothing was raised";
      EXPECT(in_close || fake::memory.empty(), "call ", failed, " lost memory: ", text);
      EXPECT(fake::nevents == 0, "call ", failed, " lost events: ", text);
      while (!fake::memory.empty()) fake::release(const_cast<char*>(fake::memory.begin()->first));
    }
    EXPECT(failed > 40, failed, " calls");
  }
}

TEST_MAIN()
