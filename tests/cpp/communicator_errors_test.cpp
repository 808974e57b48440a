// The communicator with wrong arguments, and at its end.
#include "communicator_checks.h"

using namespace pyparallel;
using namespace pyparallel::testing;

TEST(arguments_are_checked_before_anything_runs) {
  auto owned = std::make_unique<WrappedBackend>(2);
  WrappedBackend& backend = *owned;
  World world(2, std::move(owned));
  Communicator& c = world.communicator;
  Bytes a(64), b(64);
  const void* const one[] = {a.data()};
  const void* const null[] = {nullptr};
  const void* const both[] = {a.data(), b.data()};
  void* const to[] = {a.data(), b.data()};
  void* const partly[] = {a.data(), nullptr};
  const Segment whole[] = {{0, 64}}, odd[] = {{0, 10}}, large[] = {{0, 65537}},
                overlapping[] = {{0, 8}, {4, 8}};
  const Share shares[] = {{0, 4}, {4, 8}}, meeting[] = {{0, 5}, {4, 4}};
  const auto& s = world.streams;
  const std::pair<std::function<void()>, const char*> wrong[] = {
      {[&] { c.broadcast(2, one, whole, to, s, "auto"); },
       "broadcast: root is 2, but the communicator has ranks 0 to 1"},
      {[&] { c.broadcast(0, one, whole, {to, 1}, s, "auto"); },
       "broadcast: got 1 destinations for 2 ranks"},
      {[&] { c.broadcast(0, one, whole, to, {}, "auto"); }, "broadcast: got 0 streams for 2 ranks"},
      {[&] { c.broadcast(0, both, whole, to, s, "auto"); },
       "broadcast: got 2 sources for 1 segments"},
      {[&] { c.broadcast(0, null, whole, to, s, "auto"); },
       "broadcast: source 0 is null, but has 64 bytes"},
      {[&] { c.broadcast(0, one, whole, partly, s, "auto"); },
       "broadcast: rank 1 has no destination for 64 bytes"},
      {[&] { c.broadcast(0, both, overlapping, to, s, "auto"); },
       "broadcast: segment 1 starts at byte 4, but segment 0 ends at byte 8"},
      {[&] { c.broadcast(0, one, whole, to, s, "ring"); },
       "broadcast: unknown algorithm 'ring'; choose auto, push, two_hop, copy_chain, chain, "
       "two_hop_flags or ll"},
      {[&] { c.reduce_add(0, both, odd, a.data(), DType::kFloat32, s, "auto"); },
       "reduce_add: segment 0 has 10 bytes at byte 0, but an element of float32 has 4"},
      {[&] { c.reduce_add(0, one, whole, a.data(), DType::kFloat32, s, "auto"); },
       "reduce_add: got 1 sources for 2 ranks with 1 segments"},
      {[&] {
         const void* const none[] = {nullptr, nullptr};
         c.reduce_add(0, none, whole, a.data(), DType::kFloat32, s, "auto");
       },
       "reduce_add: no rank has segment 0 of 64 bytes"},
      {[&] {
         const void* const half[] = {a.data(), nullptr};
         c.reduce_add(0, half, whole, a.data(), DType::kFloat32, s, "chain");
       },
       "reduce_add: chain needs a source of every rank"},
      {[&] { c.reduce_add(0, both, whole, nullptr, DType::kFloat32, s, "auto"); },
       "reduce_add: the destination is null, but gets 64 bytes"},
      {[&] { c.all_reduce(both, partly, 16, DType::kFloat32, s, "auto"); },
       "all_reduce: rank 1 has no destination for 16 elements"},
      {[&] { c.all_reduce(both, to, 16, DType::kFloat32, s, "push"); },
       "all_reduce: unknown algorithm 'push'; choose auto, two_shot, copy_chain, ring or "
       "one_shot_ll"},
      {[&] { c.broadcast(0, one, large, to, s, "ll"); },
       "broadcast: ll carries at most 65536 bytes, not 65537"},
      {[&] { c.all_reduce(both, to, 8193, DType::kInt64, s, "one_shot_ll"); },
       "all_reduce: one_shot_ll carries at most 65536 bytes, not 65544"},
      {[&] { c.scatter(0, a.data(), 2, 11, shares, to, s); },
       "scatter: rank 1 has bytes 4 to 12 of a row, but a row has 11 bytes"},
      {[&] { c.scatter(0, nullptr, 2, 12, shares, to, s); },
       "scatter: the source of 2 rows of 12 bytes is null"},
      {[&] { c.gather(0, both, 2, 12, meeting, a.data(), s); },
       "gather: the shares of ranks 0 and 1 overlap at byte 4 of a row"},
      {[&] { c.gather(0, both, 2, 12, shares, nullptr, s); },
       "gather: the destination of 2 rows of 12 bytes is null"},
  };
  for (const auto& [call, text] : wrong) EXPECT_TEXT(message_of<ArgumentError>(call), text);
  const Segment two[] = {{0, 4}, {4, 4}};
  EXPECT_TEXT(message_of<ArgumentError>([&] { c.broadcast(0, both, two, to, s, "chain"); }),
              "broadcast: chain takes one segment, not 2");
  EXPECT(backend.launches == 0, backend.launches);
}

TEST(options_are_checked) {
  const auto make = [](u32 nranks, CommunicatorOptions options) {
    return message_of<ArgumentError>(
        [&] { Communicator(make_host_backend(nranks), nranks, options); });
  };
  EXPECT_TEXT(make(17, {}), "a communicator has 1 to 16 ranks, not 17");
  EXPECT_TEXT(make(2, {.slots = 3}), "slots is 3, but must be a power of two from 2 on");
  EXPECT_TEXT(make(2, {.slot_bytes = 100}), "slot_bytes is 100, but must be a multiple of 128");
  EXPECT_TEXT(make(2, {.timeout_ms = 0}), "timeout_ms is 0, but must be from 1 to 1000000000");
  EXPECT_TEXT(make(2, {.algorithms = "reduce_add:push"}),
              "PYPARALLEL_ALGO: reduce_add: unknown algorithm 'push'; choose auto, owner, "
              "copy_chain, chain or ll");
}

TEST(a_capture_takes_event_ordered_algorithms_only) {
  class CapturingBackend : public WrappedBackend {
   public:
    using WrappedBackend::WrappedBackend;
    bool capturing(std::span<const StreamHandle>) override { return true; }
  };
  CommunicatorOptions options = kSmall;
  options.algorithms = "broadcast:chain,all_reduce:ring";
  World world(3, std::make_unique<CapturingBackend>(3), options);
  check_broadcast(world, 1, 1000, "auto");
  check_all_reduce(world, 1000, DType::kFloat16, false, "auto");
  EXPECT_TEXT(message_of<Error>([&] { check_broadcast(world, 1, 1000, "chain"); }),
              "broadcast: chain cannot be captured in a CUDA graph, because kernels that wait for "
              "each other must not be replayed apart; use algorithm \"auto\"");
}

TEST(nothing_to_move_launches_nothing) {
  auto owned = std::make_unique<WrappedBackend>(3);
  WrappedBackend& backend = *owned;
  World world(3, std::move(owned));
  for (const auto algorithm : names_of(Collective::kBroadcast, 0))
    check_broadcast(world, 1, 0, algorithm);
  for (const auto algorithm : names_of(Collective::kReduceAdd, 0))
    check_reduce_add(world, 1, 0, DType::kFloat32, algorithm);
  for (const auto algorithm : names_of(Collective::kAllReduce, 0))
    check_all_reduce(world, 0, DType::kFloat32, false, algorithm);
  check_scatter_and_gather(world, 0, 0, 0);
  check_scatter_and_gather(world, 0, 5, 7);
  EXPECT(backend.launches == 0, backend.launches);
}

TEST(a_closed_communicator_says_so) {
  World world(2);
  world.communicator.close();
  world.communicator.close();
  EXPECT(world.communicator.closed());
  EXPECT_TEXT(message_of<Error>([&] { check_broadcast(world, 0, 8, "auto"); }),
              "the communicator is closed");
  EXPECT_TEXT(message_of<Error>([&] { world.communicator.synchronize(); }),
              "the communicator is closed");
}

TEST(memory_is_released_by_close) {
  auto owned = std::make_unique<StagedBackend>(3);
  StagedBackend& backend = *owned;
  World world(3, std::move(owned));
  check_everything(world);
  EXPECT(backend.allocations > 0);
  world.communicator.close();
  EXPECT(backend.allocations == 0, backend.allocations, " allocations were not released");
}

TEST(flag_ordered_needs_blocks_that_run_together) {
  struct NoChannels : WrappedBackend {
    using WrappedBackend::WrappedBackend;
    u32 max_channels() const override { return 0; }
  };
  World world(2, std::make_unique<NoChannels>(2));
  const std::string text = message_of<Error>([&] { check_broadcast(world, 0, 64, "chain"); });
  EXPECT(text.find("chain") != text.npos, text);
  check_broadcast(world, 0, 64, "auto");
}

TEST_MAIN()
