// Proves the LL schedules by replay: every word arrives once, every sum is in rank order, no word
// is written over before it was read, nothing deadlocks, also when ranks run ahead.
//
// As in schedule_test.cpp, one order proves all. A block's operation falls into two steps, sending
// once its credits are there, and combining once its words are there.
#include <array>
#include <vector>

#include "schedule/ll.h"
#include "testing.h"

using namespace pyparallel;

namespace {

// One buffer of a connection: what was written last, in bytes of payload from the part's begin on.
struct Buffer {
  u64 operation = 0, bytes = 0;
  bool unread = false;
};
struct Connection {
  u64 sent, received;
  std::array<Buffer, kLlBuffers> buffers;
};

// Several operations, one after the other, on one channel.
class LlReplay {
 public:
  LlReplay(std::vector<FlagShape> shapes, u32 channel, u64 first)
      : shapes_(std::move(shapes)), channel_(channel), nranks_(shapes_[0].nranks) {
    connections_.assign(nranks_ * nranks_, {first, first, {}});
  }

  // Ranks whose turn comes first run ahead as far as they can.
  void run(bool backwards) {
    std::vector<u32> next(nranks_, 0);  // steps done
    for (bool progress = true; progress;) {
      progress = false;
      for (u32 k = 0; k < nranks_; ++k) {
        const u32 rank = backwards ? nranks_ - 1 - k : k;
        while (next[rank] < 2 * shapes_.size() && step(rank, next[rank])) {
          ++next[rank];
          progress = true;
        }
      }
    }
    for (u32 rank = 0; rank < nranks_; ++rank)
      check(next[rank] == 2 * shapes_.size(), "deadlock", next[rank]);
    for (const Connection& connection : connections_)
      check(connection.sent == connection.received, "unread words", connection.sent);
  }

 private:
  void check(bool ok, const char* what, u64 where) const {
    EXPECT(ok, what, " (", where, "): algorithm ", static_cast<u32>(shapes_[0].algorithm),
           " ranks ", nranks_, " root ", shapes_[0].root, " channel ", channel_, " of ",
           shapes_[0].nchannels, " bytes ", shapes_[0].bytes);
  }

  bool step(u32 rank, u32 step) {
    const FlagShape& shape = shapes_[step / 2];
    const Range part = channel_range(shape, channel_);
    if (part.bytes == 0) return true;
    const LlRole role = ll_role(shape, rank);
    return step % 2 == 0 ? send(rank, role, part) : combine(rank, role, shape, part);
  }

  bool send(u32 rank, const LlRole& role, Range part) {
    check((role.send_to >> rank & 1) == 0, "sends to itself", rank);
    for (u32 peer = 0; peer < nranks_; ++peer) {
      const Connection& to = connections_[rank * nranks_ + peer];
      if ((role.send_to >> peer & 1) != 0 && to.sent - to.received >= kLlBuffers) return false;
    }
    for (u32 peer = 0; peer < nranks_; ++peer) {
      if ((role.send_to >> peer & 1) == 0) continue;
      Connection& to = connections_[rank * nranks_ + peer];
      Buffer& buffer = to.buffers[to.sent & (kLlBuffers - 1)];
      check(!buffer.unread, "words written over before they were read", to.sent);
      check(ll_lines(part.bytes) * kLlLineBytes <= ll_buffer_bytes(shapes_[0].nchannels),
            "more words than a buffer has", part.bytes);
      buffer = {to.sent++, part.bytes, true};
    }
    return true;
  }

  bool combine(u32 rank, const LlRole& role, const FlagShape& shape, Range part) {
    u32 expected = 0;  // whose values the output holds
    if (is_broadcast(shape.algorithm)) {
      expected = rank == shape.root ? 0 : 1u << shape.root;
    } else if (shape.algorithm == FlagAlgorithm::kLlAllReduce || rank == shape.root) {
      expected = (1u << nranks_) - 1;
    }
    check(role.sources == expected, "wrong terms", role.sources);
    for (u32 source = 0; source < nranks_; ++source) {
      const Connection& from = connections_[source * nranks_ + rank];
      if (source == rank || (role.sources >> source & 1) == 0) continue;
      if (from.sent == from.received) return false;
    }
    for (u32 source = 0; source < nranks_; ++source) {
      if (source == rank || (role.sources >> source & 1) == 0) continue;
      Connection& from = connections_[source * nranks_ + rank];
      Buffer& buffer = from.buffers[from.received & (kLlBuffers - 1)];
      check(buffer.unread && buffer.operation == from.received && buffer.bytes == part.bytes,
            "not the words expected", from.received);
      buffer.unread = false;
      ++from.received;
    }
    return true;
  }

  std::vector<FlagShape> shapes_;
  u32 channel_, nranks_;
  std::vector<Connection> connections_;  // [from * nranks + to]
};

constexpr u64 kSizes[] = {0,          1, 15, 16, 17, 127, 128, 129, 1001, 30011, kLlMaxBytes - 1,
                          kLlMaxBytes};

}  // namespace

TEST(words_arrive_once_and_are_read_before_they_are_written_over) {
  for (const auto algorithm :
       {FlagAlgorithm::kLlBroadcast, FlagAlgorithm::kLlReduce, FlagAlgorithm::kLlAllReduce}) {
    for (u32 nranks = 1; nranks <= kMaxRanks; ++nranks) {
      const u32 nroots = algorithm == FlagAlgorithm::kLlAllReduce ? 1 : nranks;
      for (u32 root = 0; root < nroots; ++root) {
        for (u32 nchannels = 1; nchannels <= 8; ++nchannels) {
          for (const u64 bytes : kSizes) {
            // The same root again and again, then another root and size.
            const FlagShape shape{algorithm, nranks, root, nchannels, kLlBuffers, 1, bytes, 0};
            FlagShape other = shape;
            other.root = (root + 1) % nroots;
            other.bytes = 777;
            const std::vector<FlagShape> shapes = {shape, shape, shape, other, shape};
            u64 at = 0;
            for (u32 channel = 0; channel < nchannels; ++channel) {
              at += channel_range(shape, channel).bytes;
              for (const bool backwards : {false, true})
                LlReplay(shapes, channel, ~u64{0} - 2).run(backwards);
            }
            EXPECT(at == bytes, "channels carry ", at, " of ", bytes, " bytes");
          }
        }
      }
    }
  }
}

// Between two polls of one word with the same flag there is always an operation that wrote it.
TEST(buffers_are_rewritten_before_flags_repeat) {
  for (const u64 base : {u64{0}, u64{1} << 31, u64{1} << 32, ~u64{0} - (u64{1} << 32) + 1}) {
    u32 refreshed = 0;
    for (u64 operation = base; operation < base + 4; ++operation)
      if (ll_refreshes(operation)) refreshed |= 1u << (operation & (kLlBuffers - 1));
    EXPECT(refreshed == 3 && !ll_refreshes(base + 2) && !ll_refreshes(base - 1), base);
  }
  EXPECT(ll_flag(0) == 1 && ll_flag(~u64{0}) == 0 && ll_flag(u64{1} << 32) == 1);
}

TEST_MAIN()
