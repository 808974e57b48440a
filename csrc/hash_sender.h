// The segment sender of devices that cannot read each other's memory: the root hashes what it reads
// and pushes what changed through stages.
#pragma once
#include "backend/segment_sender.h"
#include "device/send_changed.h"

namespace pyparallel {

// Remembers one hash a chunk: that of what every peer was sent last. A peer that was not sent it,
// or whose copy somebody changed, is stale until the next send().
class HashSender : public SegmentSender {
 public:
  HashSender(Backend& backend, const SendTable& table);
  ~HashSender() override;
  HashSender(const HashSender&) = delete;
  HashSender& operator=(const HashSender&) = delete;

  void send(std::span<const void* const> sources, std::span<const StreamHandle> streams,
            bool always) override;
  bool would_change(std::span<const void* const> sources,
                    std::span<const StreamHandle> streams) override;
  void refresh(u32 rank) override;
  Transferred transferred() override;

 protected:
  // Each runs a body of send_changed.h on the rank's communication stream, ordered like
  // Backend::launch().
  virtual void launch_send(u32 rank, const SendArgs& args) = 0;
  virtual void launch_find(u32 rank, const SendArgs& args) = 0;
  virtual void launch_receive(u32 rank, const ReceiveArgs& args) = 0;

 private:
  // Windows alternate between two slots of a stage: in step s the root fills that of window s while
  // peers unpack that of window s - 1, and the one before was unpacked in step s - 1.
  static constexpr u32 kSlots = 2;

  struct Peer {
    u32 rank;
    u8* flat;
    Chunk* chunks;
    u8* announced;  // kSlots times as many bytes as a window has chunks
    u8* stage;      // kSlots times slot_bytes_
  };
  struct Root {
    Pack* keys;
    Chunk* chunks;
    ChunkHash* hashes;
    const u8** sources;
    SendCounters* counters;
  };

  void allocate_root();
  void allocate_peer(u32 rank, void* flat);
  void update_sources(std::span<const void* const> sources);
  SendArgs send_args(const Window& window) const;
  void send_window(u64 index, u32 stale);
  void receive_window(u64 index);
  u32 all_peers() const { return (1u << peers_.size()) - 1; }
  void wait_for_last(const char* what);
  SendCounters read_counters(const char* what);

  Backend& backend_;
  const u32 root_rank_;
  const u64 timeout_ns_, slot_bytes_;
  const std::vector<Chunk> chunks_;
  const std::vector<Window> windows_;
  u64 window_chunks_ = 0;             // of the window that has most
  std::vector<const void*> sources_;  // as they are in root_.sources
  std::vector<std::pair<u32, void*>> memory_;
  Root root_{};
  std::vector<Peer> peers_;
  u32 stale_;       // bit p: peers_[p]
  u64 ticket_ = 0;  // of the last launch
};

}  // namespace pyparallel
