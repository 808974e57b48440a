// Connections between ranks, made when an operation first needs them, and the abort word that they
// share.
#pragma once
#include <string>
#include <vector>

#include "backend/backend.h"

namespace pyparallel {

// Once a wait has expired the abort word stays set for ever, because a late kernel may still read
// it. The set is then poisoned: its owner replaces it as a whole and frees it when all work that
// may use it has finished.
class ConnectionSet {
 public:
  ConnectionSet(Backend& backend, u32 nranks, u32 nchannels, u32 slots, u64 slot_bytes,
                u64 timeout_ms);
  // Destroyed only after all work that uses the set has finished.
  ConnectionSet(const ConnectionSet&) = delete;
  ConnectionSet& operator=(const ConnectionSet&) = delete;

  // The launch arguments of `shape` without inputs and outputs. Makes the connections that the
  // shape uses. `operation` names the launch in failure().
  FlagArgs prepare(const FlagShape& shape, DType dtype, std::string operation);

  u32 nchannels() const { return nchannels_; }

  // Makes all blocks that use the set leave.
  void abort();
  bool poisoned() const;
  // Which wait of a poisoned set expired, as a sentence. Waits briefly for a record that a kernel
  // is just writing.
  std::string failure() const;

 private:
  // What the set has allocated; freed also when making the set fails half way.
  struct Memory {
    struct Allocation {
      u32 rank;
      void* memory;
    };
    Backend& backend;
    void* host = nullptr;
    std::vector<Allocation> allocations;
    ~Memory();
  };
  // The connections of one protocol.
  struct Wiring {
    u32 slots;
    u64 slot_bytes;
    std::vector<SendEnd*> sends;  // per rank, in its device's memory: [peer * nchannels + channel]
    std::vector<RecvEnd*> recvs;
    std::vector<bool> connected;  // [from * nranks + to]
  };
  Wiring make_wiring(u32 slots, u64 slot_bytes);
  u8* allocate(u32 rank, u64 bytes, RankSet touched_by);
  void connect(Wiring& wiring, u32 from, u32 to);
  std::string describe(const FailureRecord& record, const std::string& operation) const;

  const u32 nranks_, nchannels_;
  const u64 timeout_ms_;
  Memory memory_;

  u32* abort_word_ = nullptr;
  // One record a launch, used in turn, so that a record says which launch failed. More than can be
  // outstanding.
  static constexpr u64 kRecords = 128;
  FailureRecord* records_ = nullptr;
  std::vector<std::string> operations_;
  u64 launches_ = 0;

  Wiring simple_, ll_;
  std::vector<u64*> fan_outs_;  // per rank, in its device's memory
};

}  // namespace pyparallel
