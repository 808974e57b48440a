// Memory of connections: words and tables at both ends, slots at the receiver.
#include "connection_set.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"
#include "schedule/prim.h"

namespace pyparallel {
namespace {

// A word that somebody polls has a cache line pair of its own, so that no other word's traffic
// disturbs the poll.
constexpr u64 kWordBytes = 128;

u32 load(const u32& word) {
  // Acquire: pairs with the release of `complete`, after which the rest of a record may be read.
  return std::atomic_ref<u32>(const_cast<u32&>(word)).load(std::memory_order_acquire);
}

}  // namespace

ConnectionSet::ConnectionSet(Backend& backend, u32 nranks, u32 nchannels, u32 slots, u64 slot_bytes,
                             u64 timeout_ms)
    : nranks_(nranks),
      nchannels_(nchannels),
      timeout_ms_(timeout_ms),
      memory_{backend, nullptr, {}},
      operations_(kRecords),
      simple_(make_wiring(slots, slot_bytes)),
      ll_(make_wiring(kLlBuffers, ll_buffer_bytes(nchannels))) {
  const u64 words = round_up(sizeof(u32), kWordBytes);
  memory_.host = backend.allocate_host(words + kRecords * sizeof(FailureRecord));
  auto* host = static_cast<u8*>(memory_.host);
  abort_word_ = reinterpret_cast<u32*>(host);
  records_ = reinterpret_cast<FailureRecord*>(host + words);
  for (u32 rank = 0; rank < nranks; ++rank) {
    fan_outs_.push_back(
        reinterpret_cast<u64*>(allocate(rank, nchannels * kMaxRanks * sizeof(u64), 0)));
  }
}

ConnectionSet::Wiring ConnectionSet::make_wiring(u32 slots, u64 slot_bytes) {
  Wiring wiring{slots, slot_bytes, {}, {}, std::vector<bool>(nranks_ * nranks_)};
  const u32 ends = nranks_ * nchannels_;
  for (u32 rank = 0; rank < nranks_; ++rank) {
    wiring.sends.push_back(reinterpret_cast<SendEnd*>(allocate(rank, ends * sizeof(SendEnd), 0)));
    wiring.recvs.push_back(reinterpret_cast<RecvEnd*>(allocate(rank, ends * sizeof(RecvEnd), 0)));
  }
  return wiring;
}

ConnectionSet::Memory::~Memory() {
  for (const Allocation& allocation : allocations) {
    backend.release(allocation.rank, allocation.memory);
  }
  if (host) backend.release_host(host);
}

u8* ConnectionSet::allocate(u32 rank, u64 bytes, RankSet touched_by) {
  memory_.allocations.reserve(memory_.allocations.size() + 1);  // nothing fails after this
  void* memory = memory_.backend.allocate(rank, bytes, touched_by);
  memory_.allocations.push_back({rank, memory});
  return static_cast<u8*>(memory);
}

void ConnectionSet::connect(Wiring& wiring, u32 from, u32 to) {
  if (wiring.connected[from * nranks_ + to]) return;
  const u64 channel_bytes = wiring.slots * wiring.slot_bytes;
  u8* credits = allocate(from, nchannels_ * kWordBytes, 1u << to);
  u8* tails = &wiring == &ll_ ? nullptr : allocate(to, nchannels_ * kWordBytes, 1u << from);
  u8* slots = allocate(to, nchannels_ * channel_bytes, 1u << from);
  std::vector<SendEnd> sends(nchannels_);
  std::vector<RecvEnd> recvs(nchannels_);
  for (u32 channel = 0; channel < nchannels_; ++channel) {
    auto* credit = reinterpret_cast<u64*>(credits + channel * kWordBytes);
    auto* tail = tails ? reinterpret_cast<u64*>(tails + channel * kWordBytes) : nullptr;
    u8* channel_slots = slots + channel * channel_bytes;
    sends[channel] = {0, 0, credit, tail, channel_slots};
    recvs[channel] = {0, 0, tail, credit, channel_slots};
  }
  memory_.backend.write(from, wiring.sends[from] + to * nchannels_, sends.data(),
                        nchannels_ * sizeof(SendEnd));
  memory_.backend.write(to, wiring.recvs[to] + from * nchannels_, recvs.data(),
                        nchannels_ * sizeof(RecvEnd));
  wiring.connected[from * nranks_ + to] = true;
}

FlagArgs ConnectionSet::prepare(const FlagShape& shape, DType dtype, std::string operation) {
  const bool ll = is_ll(shape.algorithm);
  Wiring& wiring = ll ? ll_ : simple_;
  for (u32 rank = 0; rank < nranks_; ++rank) {
    const u32 peers = ll ? ll_role(shape, rank).send_to : send_peers(shape, rank);
    for (u32 peer = 0; peer < nranks_; ++peer) {
      if ((peers >> peer & 1) != 0) connect(wiring, rank, peer);
    }
  }
  const u64 record = launches_++ % kRecords;
  operations_[record] = std::move(operation);
  FlagArgs args{};
  args.shape = shape;
  args.shape.slots = wiring.slots;
  args.dtype = dtype;
  args.slot_bytes = wiring.slot_bytes;
  args.timeout_ns = timeout_ms_ * 1'000'000;
  args.abort_word = abort_word_;
  args.failure = records_ + record;
  for (u32 rank = 0; rank < nranks_; ++rank)
    args.ranks[rank] = {nullptr, nullptr, wiring.sends[rank], wiring.recvs[rank], fan_outs_[rank]};
  return args;
}

void ConnectionSet::abort() {
  // Relaxed, because the word carries no data.
  std::atomic_ref<u32>(*abort_word_).store(1, std::memory_order_relaxed);
}

bool ConnectionSet::poisoned() const { return load(*abort_word_) != 0; }

std::string ConnectionSet::failure() const {
  // Whoever sets the abort word writes the record in the next microseconds; a second is for ever.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  do {
    for (u64 i = 0; i < kRecords; ++i) {
      if (load(records_[i].complete) != 0) return describe(records_[i], operations_[i]);
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < deadline);
  return "a flag-ordered operation was aborted and left no record of the wait that expired";
}

std::string ConnectionSet::describe(const FailureRecord& record,
                                    const std::string& operation) const {
  return message(operation, ": rank ", record.rank, " waited ", timeout_ms_, " ms for ",
                 record.waits_for_credit ? "a credit" : "data", " from rank ", record.peer,
                 " on channel ", record.channel, ": wanted step ", record.wanted, ", saw ",
                 record.seen);
}

}  // namespace pyparallel
