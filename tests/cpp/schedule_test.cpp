// Proves the schedules of the Simple protocol by replay: every byte arrives once, every sum has the
// promised order, no slot is written before its credit, nothing deadlocks.
//
// The replay runs each rank as far as it can, in turn. That one order proves all: a block only
// waits for counters that one other block raises and that never fall, so running a block earlier
// can never take away what another waits for.
#include <array>
#include <bit>
#include <vector>

#include "schedule/prim.h"
#include "testing.h"

using namespace pyparallel;

namespace {

constexpr u64 kSlice = 512;

// The ranks that were added, in order: 4 bits each, so that the order is part of the value.
struct Terms {
  u64 ranks = 0;
  u32 count = 0;
  bool operator==(const Terms&) const = default;
};

Terms plus(Terms terms, u32 rank) { return {terms.ranks << 4 | rank, terms.count + 1}; }

struct Slot {
  bool full = false;
  u64 offset = 0, bytes = 0;
  Terms terms;
};

struct Connection {
  u64 sent, received;
  std::array<Slot, 8> slots;
};

// One collective on one channel after the other. Memory is kept, because sanitizers make it dear.
class Replay {
 public:
  // Runs the blocks of a channel; false on a deadlock. Counters start just below their wrap.
  bool run(const FlagShape& shape, u32 channel) {
    shape_ = shape;
    channel_ = channel;
    range_ = channel_range(shape, channel);
    units_ = divide_up(range_.bytes, kUnit);
    connections_.assign(shape.nranks * shape.nranks, {~u64{0} - 2, ~u64{0} - 2, {}});
    outputs_.assign(shape.nranks * units_, {});
    turns_.clear();
    for (u32 rank = 0; rank < shape.nranks; ++rank) {
      turns_.push_back({0, prim_count(shape, rank, channel), {}, send_peers(shape, rank)});
      if (turns_[rank].count != 0) turns_[rank].prim = prim_at(shape, rank, channel, 0);
    }
    for (bool progress = true; progress;) {
      progress = false;
      for (u32 rank = 0; rank < shape_.nranks; ++rank) {
        auto& [next, count, prim, peers] = turns_[rank];
        while (next < count && step(rank, prim)) {
          if (++next < count) prim = prim_at(shape_, rank, channel_, next);
          progress = true;
        }
      }
    }
    for (const Turn& turn : turns_) {
      if (turn.next < turn.count) return false;
    }
    for (const Connection& connection : connections_)
      check(connection.sent == connection.received, "unread slices", 0);
    return true;
  }

  // Rank's output holds the whole channel, in pieces that meet; expected(offset) are the terms of
  // each.
  template <class Expected>
  void expect_output(u32 rank, Expected expected) const {
    u64 pieces = 0;
    for (u64 at = range_.begin; at < range_.end(); ++pieces) {
      const u64 bytes = output(rank, at).bytes;
      check(bytes > 0, "output has a hole", at);
      check(output(rank, at).terms == expected(at), "wrong terms", at);
      at += bytes;
      check(at <= range_.end(), "output runs over the channel", at);
    }
    check(pieces == writes(rank), "output written twice", pieces);
  }
  void expect_no_output(u32 rank) const { check(writes(rank) == 0, "rank has output", rank); }

 private:
  struct Turn {
    u64 next, count;
    Prim prim;
    u32 peers;
  };
  struct Output {
    u64 bytes = 0;  // written from there on
    Terms terms;
  };

  void check(bool ok, const char* what, u64 where) const {
    EXPECT(ok, what, " (", where, "): algorithm ", static_cast<u32>(shape_.algorithm), " ranks ",
           shape_.nranks, " root ", shape_.root, " channel ", channel_, " of ", shape_.nchannels,
           " slots ", shape_.slots, " bytes ", shape_.bytes);
  }

  u64 writes(u32 rank) const {
    u64 count = 0;
    for (u64 i = 0; i < units_; ++i) count += outputs_[rank * units_ + i].bytes > 0;
    return count;
  }

  bool step(u32 rank, const Prim& prim) {
    const u64 mask = shape_.slots - 1;
    Connection* in = prim.recv_from < 0 ? nullptr : &connection(prim.recv_from, rank);
    if (in != nullptr && in->sent == in->received) return false;
    for (u32 rest = prim.send_to; rest != 0; rest &= rest - 1) {
      const Connection& out = connection(rank, std::countr_zero(rest));
      if (out.sent - out.received >= shape_.slots) return false;
    }
    check((prim.send_to & ~turns_[rank].peers) == 0, "sends where nothing is connected",
          prim.send_to);
    check((prim.send_to & (prim.send_to - 1)) == 0 || in == nullptr || !prim.read_input,
          "a sum for several", prim.send_to);
    check(in != nullptr || prim.read_input, "nothing to move", prim.offset);
    check(prim.send_to != 0 || prim.write_output, "nowhere to move to", prim.offset);
    check(prim.bytes <= shape_.slice_bytes, "slice larger than a slot", prim.offset);
    check(prim.offset >= range_.begin && prim.offset + prim.bytes <= range_.end(),
          "outside of the channel", prim.offset);
    Terms terms;
    if (in != nullptr) {
      Slot& slot = in->slots[in->received++ & mask];
      check(slot.full && slot.offset == prim.offset && slot.bytes == prim.bytes,
            "not the slice expected", prim.offset);
      terms = slot.terms;
      slot.full = false;
    }
    if (prim.read_input) {
      // In place is allowed, so a rank must not have written what it still reads.
      check(prim.bytes == 0 || output(rank, prim.offset).bytes == 0, "input read after output",
            prim.offset);
      terms = plus(terms, rank);
    }
    if (prim.write_output && prim.bytes > 0) {
      check(prim.offset % kUnit == 0, "offset splits elements", prim.offset);
      check(output(rank, prim.offset).bytes == 0, "output written twice", prim.offset);
      output(rank, prim.offset) = {prim.bytes, terms};
    }
    for (u32 rest = prim.send_to; rest != 0; rest &= rest - 1) {
      Connection& out = connection(rank, std::countr_zero(rest));
      Slot& slot = out.slots[out.sent++ & mask];
      check(!slot.full, "slot reused before its credit", prim.offset);
      slot = {true, prim.offset, prim.bytes, terms};
    }
    return true;
  }

  Connection& connection(u32 from, u32 to) { return connections_[from * shape_.nranks + to]; }

  // Bounds lie on units, so a unit stands for all that begins there.
  Output& output(u32 rank, u64 offset) {
    return outputs_[rank * units_ + (offset - range_.begin) / kUnit];
  }
  const Output& output(u32 rank, u64 offset) const {
    return outputs_[rank * units_ + (offset - range_.begin) / kUnit];
  }

  FlagShape shape_{};
  u32 channel_ = 0;
  Range range_{};
  u64 units_ = 0;
  std::vector<Turn> turns_;              // [rank]
  std::vector<Connection> connections_;  // [from * nranks + to]
  std::vector<Output> outputs_;          // [rank * units + unit]
};

// Small sizes, both sides of a slice, odd ones, and one with several rounds for every channel of
// `nranks` ranks.
std::vector<u64> sizes(u32 nranks) {
  return {0,
          1,
          15,
          16,
          17,
          kSlice - 1,
          kSlice,
          kSlice + 1,
          30011,
          3 * 8 * kSlice * 4 + 77,
          2 * 8 * kSlice * nranks + 1};
}

template <class Visit>
void visit_shapes(FlagAlgorithm algorithm, Visit visit) {
  for (u32 nranks = 1; nranks <= kMaxRanks; ++nranks) {
    const u32 nroots = algorithm == FlagAlgorithm::kRingAllReduce ? 1 : nranks;
    for (u32 root = 0; root < nroots; ++root) {
      for (u32 nchannels = 1; nchannels <= 8; ++nchannels) {
        for (u32 slots = min_slots(algorithm); slots <= 8; slots *= 2) {
          for (u64 bytes : sizes(nranks))
            visit(FlagShape{algorithm, nranks, root, nchannels, slots, 1, bytes, kSlice});
        }
      }
    }
  }
}

// Runs all channels; checks that they cover the payload.
template <class Check>
void replay(const FlagShape& shape, Check check_outputs) {
  static Replay run;
  u64 at = 0;
  for (u32 channel = 0; channel < shape.nchannels; ++channel) {
    const Range range = channel_range(shape, channel);
    EXPECT(range.bytes == 0 || range.begin == at, "channel ", channel, " begins at ", range.begin,
           ", not ", at);
    at += range.bytes;
    EXPECT(run.run(shape, channel), "deadlock: algorithm ", static_cast<u32>(shape.algorithm),
           " ranks ", shape.nranks, " root ", shape.root, " slots ", shape.slots, " bytes ",
           shape.bytes);
    check_outputs(run);
  }
  EXPECT(at == shape.bytes, "channels carry ", at, " of ", shape.bytes, " bytes");
}

Terms rank_order(u32 nranks) {
  Terms terms;
  for (u32 rank = 0; rank < nranks; ++rank) terms = plus(terms, rank);
  return terms;
}

}  // namespace

TEST(broadcasts_deliver_once) {
  for (const auto algorithm : {FlagAlgorithm::kChainBroadcast, FlagAlgorithm::kTwoHopBroadcast}) {
    visit_shapes(algorithm, [](const FlagShape& shape) {
      replay(shape, [&](const Replay& run) {
        for (u32 rank = 0; rank < shape.nranks; ++rank) {
          if (rank == shape.root) {
            run.expect_no_output(rank);
          } else {
            run.expect_output(rank, [&](u64) { return plus({}, shape.root); });
          }
        }
      });
    });
  }
}

TEST(chain_reduce_sums_in_rank_order) {
  visit_shapes(FlagAlgorithm::kChainReduce, [](const FlagShape& shape) {
    replay(shape, [&](const Replay& run) {
      for (u32 rank = 0; rank < shape.nranks; ++rank) {
        if (rank == shape.root) {
          run.expect_output(rank, [&](u64) { return rank_order(shape.nranks); });
        } else {
          run.expect_no_output(rank);
        }
      }
    });
  });
}

TEST(ring_sums_once_and_in_place) {
  visit_shapes(FlagAlgorithm::kRingAllReduce, [](const FlagShape& shape) {
    replay(shape, [&](const Replay& run) {
      for (u32 rank = 0; rank < shape.nranks; ++rank) {
        run.expect_output(rank, [&](u64 at) {
          // The order rotates: shard s starts at rank s + 1. Which shard this is follows from the
          // round.
          const Range channel =
              channel_range(shape, static_cast<u32>(at / channel_range(shape, 0).bytes));
          const u64 round = (at - channel.begin) / (shape.nranks * kSlice);
          const Range whole = piece_range(channel, shape.nranks * kSlice, round);
          u32 shard = 0;
          while (at >= part_range(whole, shape.nranks, shard).end()) ++shard;
          Terms terms;
          for (u32 k = 1; k <= shape.nranks; ++k) terms = plus(terms, (shard + k) % shape.nranks);
          return terms;
        });
      }
    });
  });
}

// The replay finds deadlocks: a ring with one slot is one.
TEST(ring_needs_two_slots) {
  for (u32 nranks = 2; nranks <= kMaxRanks; ++nranks) {
    Replay replay;
    EXPECT(!replay.run({FlagAlgorithm::kRingAllReduce, nranks, 0, 1, 1, 1, 1, kSlice}, 0), "ranks ",
           nranks);
  }
}

// The root sends every byte once, each other rank its shard to the others once more.
TEST(two_hop_shares_the_work) {
  for (u32 nranks = 2; nranks <= kMaxRanks; ++nranks) {
    const u64 bytes = 20 * kSlice * (nranks - 1);
    const FlagShape shape{FlagAlgorithm::kTwoHopBroadcast, nranks, 1, 1, 2, 1, bytes, kSlice};
    for (u32 rank = 0; rank < nranks; ++rank) {
      u64 sent = 0;
      for (u64 i = 0; i < prim_count(shape, rank, 0); ++i) {
        const Prim prim = prim_at(shape, rank, 0, i);
        for (u32 peer = 0; peer < nranks; ++peer) sent += (prim.send_to >> peer & 1) * prim.bytes;
      }
      EXPECT(sent == (rank == 1 ? bytes : bytes / (nranks - 1) * (nranks - 2)), "rank ", rank,
             " of ", nranks, " sends ", sent);
    }
  }
}

TEST(parts_cover_more_than_32_bits) {
  const Range whole{0, (u64{1} << 35) + 5};
  u64 at = 0;
  for (u32 i = 0; i < 7; ++i) {
    const Range part = part_range(whole, 7, i);
    EXPECT(part.begin == at, "part ", i);
    at = part.end();
  }
  EXPECT(at == whole.bytes, at);
  const FlagShape shape{FlagAlgorithm::kChainBroadcast, 2, 0, 1, 4, 1, whole.bytes, kSlice};
  const Prim last = prim_at(shape, 1, 0, prim_count(shape, 1, 0) - 1);
  EXPECT(last.offset + last.bytes == whole.bytes, last.offset);
}

TEST_MAIN()
