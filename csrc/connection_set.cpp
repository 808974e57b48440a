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
    : backend_(backend),
      nranks_(nranks),
      nchannels_(nchannels),
      slots_(slots),
      slot_bytes_(slot_bytes),
      timeout_ms_(timeout_ms),
      operations_(kRecords),
      connected_(nranks * nranks) {
  const u64 words = round_up(sizeof(u32), kWordBytes);
  auto* host = static_cast<u8*>(backend.allocate_host(words + kRecords * sizeof(FailureRecord)));
  abort_word_ = reinterpret_cast<u32*>(host);
  records_ = reinterpret_cast<FailureRecord*>(host + words);
  for (u32 rank = 0; rank < nranks; ++rank) {
    sends_.push_back(
        reinterpret_cast<SendEnd*>(allocate(rank, nranks * nchannels * sizeof(SendEnd), 0)));
    recvs_.push_back(
        reinterpret_cast<RecvEnd*>(allocate(rank, nranks * nchannels * sizeof(RecvEnd), 0)));
  }
}

ConnectionSet::~ConnectionSet() {
  for (const Allocation& allocation : allocations_)
    backend_.release(allocation.rank, allocation.memory);
  backend_.release_host(abort_word_);
}

u8* ConnectionSet::allocate(u32 rank, u64 bytes, RankSet touched_by) {
  void* memory = backend_.allocate(rank, bytes, touched_by);
  allocations_.push_back({rank, memory});
  return static_cast<u8*>(memory);
}

void ConnectionSet::connect(u32 from, u32 to) {
  if (connected_[from * nranks_ + to]) return;
  u8* sender = allocate(from, nchannels_ * 2 * kWordBytes, 1u << to);
  u8* receiver = allocate(to, nchannels_ * 2 * kWordBytes, 1u << from);
  u8* slots = allocate(to, nchannels_ * slots_ * slot_bytes_, 1u << from);
  std::vector<SendEnd> send_ends(nchannels_);
  std::vector<RecvEnd> recv_ends(nchannels_);
  for (u32 channel = 0; channel < nchannels_; ++channel) {
    auto word = [channel](u8* end, u32 i) {
      return reinterpret_cast<u64*>(end + (channel * 2 + i) * kWordBytes);
    };
    u8* channel_slots = slots + channel * slots_ * slot_bytes_;
    u64* credits = word(sender, 1);
    u64* tail = word(receiver, 1);
    send_ends[channel] = {word(sender, 0), credits, tail, channel_slots};
    recv_ends[channel] = {word(receiver, 0), tail, credits, channel_slots};
  }
  backend_.write(from, sends_[from] + to * nchannels_, send_ends.data(),
                 nchannels_ * sizeof(SendEnd));
  backend_.write(to, recvs_[to] + from * nchannels_, recv_ends.data(),
                 nchannels_ * sizeof(RecvEnd));
  connected_[from * nranks_ + to] = true;
}

FlagArgs ConnectionSet::prepare(const FlagShape& shape, DType dtype, std::string operation) {
  for (u32 rank = 0; rank < shape.nranks; ++rank) {
    // A rank sends to one peer only in a whole operation, and its first primitive names it. Channel
    // 0 is never empty where another one is not.
    if (prim_count(shape, rank, 0) == 0) continue;
    const i32 peer = prim_at(shape, rank, 0, 0).send_to;
    if (peer >= 0) connect(rank, static_cast<u32>(peer));
  }
  const u64 record = launches_++ % kRecords;
  operations_[record] = std::move(operation);
  FlagArgs args{};
  args.shape = shape;
  args.dtype = dtype;
  args.slot_bytes = slot_bytes_;
  args.timeout_ns = timeout_ms_ * 1'000'000;
  args.abort_word = abort_word_;
  args.failure = records_ + record;
  for (u32 rank = 0; rank < nranks_; ++rank)
    args.ranks[rank] = {nullptr, nullptr, sends_[rank], recvs_[rank]};
  return args;
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
