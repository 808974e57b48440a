// The order of CUDA work that StreamOrder promises, for every layout of ranks, on a runtime that
// runs nothing.
#include <algorithm>
#include <deque>
#include <utility>

// First, because the files under test call the functions that it defines.
#include "backend/cuda/cuda_check.h"
#include "backend/cuda/device_guard.h"
#include "backend/cuda/stream_order.h"
#include "fake_cuda.h"

namespace pyparallel {
namespace {

const std::vector<std::vector<int>> kLayouts = {
    {0}, {1, 2}, {0, 0, 0, 0}, {0, 1, 2, 3}, {3, 1, 3, 0, 1}, {0, 1, 2, 3, 4, 5, 6, 7}};

bool includes(const Work& all, const Work& part) {
  return std::includes(all.begin(), all.end(), part.begin(), part.end());
}

// One stream a rank on its device, or the legacy stream of its device.
class Callers {
 public:
  Callers(const std::vector<int>& devices, bool legacy) : devices_(devices) {
    for (const int device : devices) {
      streams_.push_back({device, {}});
      handles.push_back(legacy ? 0 : reinterpret_cast<StreamHandle>(&streams_.back()));
    }
  }

  // Queues one item for each rank; returns them, and in `before` what all of them come after.
  Work launch(Work& before) {
    Work launched;
    for (size_t rank = 0; rank < devices_.size(); ++rank) {
      set_device(devices_[rank]);
      Work seen;
      launched.insert(fake::launch(reinterpret_cast<cudaStream_t>(handles[rank]), seen));
      if (rank == 0) before = seen;
      std::erase_if(before, [&](int work) { return !seen.contains(work); });
    }
    return launched;
  }

  void set_capturing(bool capturing) {
    for (CUstream_st& stream : streams_) stream.capturing = capturing;
  }

  std::vector<StreamHandle> handles;

 private:
  std::vector<int> devices_;
  std::deque<CUstream_st> streams_;
};

// The same for the communication streams.
Work launch_everywhere(const StreamOrder& order, Work& before) {
  Work launched;
  for (u32 d = 0; d < order.ndevices(); ++d) {
    set_device(order.device(d));
    Work seen;
    launched.insert(fake::launch(order.stream(d), seen));
    if (d == 0) before = seen;
    std::erase_if(before, [&](int work) { return !seen.contains(work); });
  }
  return launched;
}

// Begins a group and launches two steps of it, the first one after what callers queue. Returns
// their work; `before` is what comes before the second.
std::pair<Work, Work> begin_two_steps(StreamOrder& order, Callers& callers, Work& before) {
  const Work inputs = callers.launch(before);
  order.begin(callers.handles);
  const Work first = launch_everywhere(order, before);
  EXPECT(includes(before, inputs), "ranks ", callers.handles.size());
  order.barrier();
  const Work second = launch_everywhere(order, before);
  EXPECT(includes(before, first), "ranks ", callers.handles.size());
  return {first, second};
}

TEST(groups_run_after_all_callers_and_before_what_callers_queue_next) {
  for (const std::vector<int>& devices : kLayouts) {
    for (const bool legacy : {false, true}) {
      StreamOrder order(devices);
      Callers callers(devices, legacy);
      const int nevents = fake::nevents;
      for (int group = 0; group < 5; ++group) {
        Work before;
        const auto [first, second] = begin_two_steps(order, callers, before);
        order.barrier();
        const Work third = launch_everywhere(order, before);
        EXPECT(includes(before, second), "ranks ", devices.size());
        order.end(callers.handles);
        callers.launch(before);
        EXPECT(includes(before, first) && includes(before, second) && includes(before, third),
               "ranks ", devices.size());
      }
      EXPECT(fake::nevents == nevents, "an event was made in steady state");
    }
  }
}

// A group that an exception cut short has no end(); its ticket still covers what it launched.
TEST(tickets_cover_all_devices) {
  for (const std::vector<int>& devices : kLayouts) {
    for (const bool cut_short : {false, true}) {
      for (u32 last = 0; last < devices.size(); ++last) {
        StreamOrder order(devices);
        EXPECT(order.finished(order.ticket()), "nothing was launched");
        Callers callers(devices, false);
        order.begin(callers.handles);
        Work before;
        fake::run_everything();
        set_device(devices[last]);
        fake::launch(order.stream(order.device_index(last)), before);
        if (!cut_short) order.end(callers.handles);
        const u64 ticket = order.ticket();
        EXPECT(!order.finished(ticket), "rank ", last);
        EXPECT(!order.wait(ticket, 1'000'000), "rank ", last);
        fake::run_everything();
        EXPECT(order.finished(ticket) && order.wait(ticket, 0), "rank ", last);
      }
    }
  }
}

TEST(tickets_stay_right_when_events_are_used_again) {
  StreamOrder order(std::vector<int>{0, 1});
  Callers callers({0, 1}, false);
  std::vector<u64> tickets;
  for (int group = 0; group < 200; ++group) {
    if (group % 64 == 0) fake::run_everything();  // begin() waits for the 64th group before
    order.begin(callers.handles);
    Work before;
    launch_everywhere(order, before);
    order.end(callers.handles);
    tickets.push_back(order.ticket());
  }
  for (size_t group = 0; group < tickets.size(); ++group) {
    EXPECT(order.finished(tickets[group]) == (group < 192), group);
  }
  fake::run_everything();
  for (const u64 ticket : tickets) EXPECT(order.finished(ticket), ticket);
}

TEST(groups_can_be_captured) {
  for (const std::vector<int>& devices : kLayouts) {
    StreamOrder order(devices);
    Callers callers(devices, false);
    order.begin(callers.handles);
    order.end(callers.handles);
    const u64 ticket = order.ticket();
    fake::run_everything();
    EXPECT(!order.capturing(callers.handles));
    callers.set_capturing(true);
    EXPECT(order.capturing(callers.handles));
    const int ngroups = devices.size() == 1 ? 70 : 3;  // also more than may be outstanding
    for (int group = 0; group < ngroups; ++group) {
      Work before;
      const auto [first, second] = begin_two_steps(order, callers, before);
      order.end(callers.handles);
      callers.launch(before);
      EXPECT(includes(before, second), "ranks ", devices.size());
    }
    EXPECT(order.ticket() == ticket && order.finished(ticket), "captured groups have no ticket");
    // The end of the capture.
    callers.set_capturing(false);
    for (u32 d = 0; d < order.ndevices(); ++d) order.stream(d)->capturing = false;
    Work before;
    order.begin(callers.handles);
    launch_everywhere(order, before);
    order.end(callers.handles);
    EXPECT(order.ticket() == ticket + 1 && !order.finished(ticket + 1));
    fake::run_everything();
    EXPECT(order.finished(ticket + 1));
  }
}

// Otherwise two communicators could each hold one device and wait for the other one.
TEST(communicators_share_the_stream_of_a_device) {
  StreamOrder one(std::vector<int>{0, 1}), other(std::vector<int>{2, 1});
  EXPECT(one.stream(1) == other.stream(1));
  EXPECT(one.stream(0) != one.stream(1) && setup_stream(1) != one.stream(1));
}

TEST(bad_streams_are_found_before_anything_waits) {
  const auto begin_fails = [](StreamOrder& order, Callers& callers) {
    try {
      order.begin(callers.handles);
      return false;
    } catch (const Error&) {
      return true;
    }
  };
  StreamOrder order(std::vector<int>{0, 1});
  Callers capturing({0, 1}, false), swapped({1, 0}, false), few({0}, false);
  reinterpret_cast<cudaStream_t>(capturing.handles[1])->capturing = true;
  Work before;
  capturing.launch(before);
  const Work queued = order.stream(0)->before;
  EXPECT(begin_fails(order, capturing));
  EXPECT(begin_fails(order, swapped), "streams of the wrong devices");
  EXPECT(begin_fails(order, few), "one stream for two ranks");
  EXPECT(order.stream(0)->before == queued);
}

}  // namespace
}  // namespace pyparallel

TEST_MAIN()
