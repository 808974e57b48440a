// Memory of a hash sender, and its launches window by window.
#include "hash_sender.h"

#include <algorithm>
#include <random>

#include "check.h"

namespace pyparallel {
namespace {

constexpr u64 kSlotUnit = 128;

// Random and the same for the life of the process. Never destroyed, because a table may be made at
// exit.
const std::vector<Pack>& random_keys() {
  static const auto& keys = *[] {
    std::random_device random;
    auto* made = new std::vector<Pack>(hash_keys(kChunkBytes));
    for (Pack& key : *made) {
      for (u32& word : key.words) word = random();
    }
    return made;
  }();
  return keys;
}

// Pieces of one allocation, each aligned to kSlotUnit.
class Carver {
 public:
  explicit Carver(u8* memory) : memory_(memory) {}
  template <class T>
  T* take(u64 count) {
    u8* const piece = memory_ + used_;
    used_ += round_up(count * sizeof(T), kSlotUnit);
    return reinterpret_cast<T*>(piece);
  }
  u64 used() const { return used_; }

 private:
  u8* const memory_;
  u64 used_ = 0;
};

u64 slot_size(const SendTable& table) {
  const u64 end =
      table.segments.empty() ? 0 : table.segments.back().offset + table.segments.back().bytes;
  return std::clamp(round_up(std::min(end, table.slot_bytes), kSlotUnit), kSlotUnit,
                    table.slot_bytes);
}

}  // namespace

HashSender::HashSender(Backend& backend, const SendTable& table)
    : backend_(backend),
      root_rank_(table.root),
      timeout_ns_(table.timeout_ns),
      slot_bytes_(slot_size(table)),
      chunks_(cut_chunks(table.segments, slot_bytes_)),
      windows_(group_windows(chunks_, slot_bytes_)),
      sources_(table.segments.size(), nullptr) {
  for (const Window& window : windows_) {
    window_chunks_ = std::max(window_chunks_, window.end - window.first);
  }
  if (chunks_.empty()) return;
  try {
    if (table.nranks > 1) allocate_root();
    for (u32 rank = 0; rank < table.nranks; ++rank) {
      if (rank != root_rank_) allocate_peer(rank, table.flats[rank]);
    }
  } catch (...) {
    for (const auto& [rank, memory] : memory_) backend_.release(rank, memory);
    throw;
  }
  stale_ = all_peers();
}

HashSender::~HashSender() {
  try {
    if (!backend_.wait(ticket_, 2 * timeout_ns_)) return;
  } catch (const Error&) {
    return;
  }
  // Otherwise a kernel may still write to it: it is lost, not freed.
  for (const auto& [rank, memory] : memory_) backend_.release(rank, memory);
}

void HashSender::allocate_root() {
  const auto carve = [this](u8* memory) {
    Carver carver(memory);
    root_.keys = carver.take<Pack>(random_keys().size());
    root_.chunks = carver.take<Chunk>(chunks_.size());
    root_.hashes = carver.take<ChunkHash>(chunks_.size());
    root_.sources = carver.take<const u8*>(sources_.size());
    root_.counters = carver.take<SendCounters>(1);
    return carver.used();
  };
  auto* const memory =
      static_cast<u8*>(backend_.allocate(root_rank_, carve(nullptr), RankSet{1} << root_rank_));
  memory_.push_back({root_rank_, memory});
  carve(memory);
  backend_.write(root_rank_, root_.keys, random_keys().data(), random_keys().size() * sizeof(Pack));
  backend_.write(root_rank_, root_.chunks, chunks_.data(), chunks_.size() * sizeof(Chunk));
}

void HashSender::allocate_peer(u32 rank, void* flat) {
  Peer peer{rank, static_cast<u8*>(flat), nullptr, nullptr, nullptr};
  const auto carve = [&](u8* memory) {
    Carver carver(memory);
    peer.stage = carver.take<u8>(kSlots * slot_bytes_);
    peer.announced = carver.take<u8>(kSlots * window_chunks_);
    peer.chunks = carver.take<Chunk>(chunks_.size());
    return carver.used();
  };
  const RankSet users = RankSet{1} << rank | RankSet{1} << root_rank_;
  auto* const memory = static_cast<u8*>(backend_.allocate(rank, carve(nullptr), users));
  memory_.push_back({rank, memory});
  carve(memory);
  backend_.write(rank, peer.chunks, chunks_.data(), chunks_.size() * sizeof(Chunk));
  peers_.push_back(peer);
}

// Waits for the last launch where addresses changed, because it may still read the old ones. They
// seldom do.
void HashSender::update_sources(std::span<const void* const> sources) {
  if (std::equal(sources.begin(), sources.end(), sources_.begin(), sources_.end())) return;
  wait_for_last("send");
  backend_.write(root_rank_, root_.sources, sources.data(), sources.size_bytes());
  sources_.assign(sources.begin(), sources.end());
}

SendArgs HashSender::send_args(const Window& window) const {
  SendArgs args{};
  args.sources = root_.sources;
  args.chunks = root_.chunks + window.first;
  args.nchunks = static_cast<u32>(window.end - window.first);
  args.keys = root_.keys;
  args.hashes = root_.hashes + window.first;
  args.counters = root_.counters;
  args.window_offset = window.offset;
  return args;
}

void HashSender::send(std::span<const void* const> sources, std::span<const StreamHandle> streams,
                      bool always) {
  if (peers_.empty()) return;
  update_sources(sources);
  const u32 stale = always ? all_peers() : stale_;
  stale_ = all_peers();  // until everything is launched
  backend_.begin(streams);
  for (u64 step = 0; step <= windows_.size(); ++step) {
    if (step > 0) backend_.barrier();
    if (step < windows_.size()) send_window(step, stale);
    if (step > 0) receive_window(step - 1);
  }
  backend_.end(streams);
  ticket_ = backend_.ticket();
  stale_ = 0;
}

void HashSender::send_window(u64 index, u32 stale) {
  SendArgs args = send_args(windows_[index]);
  args.stale = stale;
  args.npeers = static_cast<u32>(peers_.size());
  for (u32 p = 0; p < args.npeers; ++p) {
    args.stages[p] = peers_[p].stage + index % kSlots * slot_bytes_;
    args.announced[p] = peers_[p].announced + index % kSlots * window_chunks_;
  }
  launch_send(root_rank_, args);
}

void HashSender::receive_window(u64 index) {
  const Window& window = windows_[index];
  for (const Peer& peer : peers_) {
    launch_receive(peer.rank,
                   {peer.chunks + window.first, static_cast<u32>(window.end - window.first),
                    window.offset, peer.stage + index % kSlots * slot_bytes_,
                    peer.announced + index % kSlots * window_chunks_, peer.flat});
  }
}

bool HashSender::would_change(std::span<const void* const> sources,
                              std::span<const StreamHandle> streams) {
  if (peers_.empty()) return false;
  if (stale_ != 0) return true;
  update_sources(sources);
  const u64 before = read_counters("would_change").changes;
  backend_.begin(streams);
  launch_find(root_rank_, send_args({0, 0, chunks_.size()}));
  backend_.end(streams);
  ticket_ = backend_.ticket();
  return read_counters("would_change").changes != before;
}

void HashSender::refresh(u32 rank) {
  for (u32 p = 0; p < peers_.size(); ++p) {
    if (peers_[p].rank == rank) stale_ |= 1u << p;
  }
}

Transferred HashSender::transferred() {
  if (peers_.empty()) return {};
  const SendCounters counters = read_counters("transferred");
  return {counters.sent, counters.skipped};
}

void HashSender::wait_for_last(const char* what) {
  PP_CHECK(backend_.wait(ticket_, 2 * timeout_ns_), what,
           ": the last work of the segment table was still running after ",
           2 * timeout_ns_ / 1'000'000, " ms");
}

SendCounters HashSender::read_counters(const char* what) {
  wait_for_last(what);
  SendCounters counters;
  backend_.read(root_rank_, &counters, root_.counters, sizeof counters);
  return counters;
}

}  // namespace pyparallel
