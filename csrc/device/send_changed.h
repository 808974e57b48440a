// The bodies of a segment table where hashes decide. The root's blocks hash each chunk, push what
// changed into the peers' stages, and announce what they pushed; each peer's blocks unpack what was
// announced. Event-ordered: a barrier of the backend lies between the two.
#pragma once
#include "../schedule/chunks.h"
#include "chunk_hash.h"

namespace pyparallel {

// Counters of a table, in memory of the root's device.
struct SendCounters {
  u64 sent, skipped;  // bytes, over all peers
  u64 changes;        // chunks that find_changes() found
};

// The root's side of one window of chunks. Passed by value. Peers are counted without the root.
struct SendArgs {
  const u8* const* sources;  // [segment]
  const Chunk* chunks;
  u32 nchunks;
  const Pack* keys;
  ChunkHash* hashes;  // [chunk]: of what was sent last
  SendCounters* counters;
  u64 window_offset;
  u32 npeers;
  u32 stale;                 // bit p: peer p gets every chunk
  void* stages[kMaxRanks];   // [peer]: where the window lies in its stage
  u8* announced[kMaxRanks];  // [peer]: a byte a chunk, 1 if it was pushed
};

// A peer's side of the same window.
struct ReceiveArgs {
  const Chunk* chunks;
  u32 nchunks;
  u64 window_offset;
  const u8* stage;
  const u8* announced;
  u8* flat;
};

template <Context C>
PP_D Chunk load_chunk(const C& c, const Chunk* chunk) {
  return {c.load(&chunk->source_offset), c.load(&chunk->offset), c.load(&chunk->segment),
          c.load(&chunk->bytes)};
}

// Block `block` of `nblocks` hashes its chunks of the window and calls visit(i, chunk, source,
// hash, changed) with the same values in every thread.
template <u32 kUnroll, HashContext C, class Visit>
PP_D void visit_chunks(const C& c, const SendArgs& args, u32 block, u32 nblocks, Visit visit) {
  for (u32 i = block; i < args.nchunks; i += nblocks) {
    const Chunk chunk = load_chunk(c, args.chunks + i);
    const u8* source = reinterpret_cast<const u8*>(
        c.load(reinterpret_cast<const u64*>(args.sources + chunk.segment)));
    source += chunk.source_offset;
    // Before the barrier inside hash_chunk(), because a thread overwrites it after that.
    const ChunkHash last{c.load(&args.hashes[i].first), c.load(&args.hashes[i].second)};
    const ChunkHash hash = hash_chunk<kUnroll>(c, args.keys, source, chunk.bytes);
    visit(i, chunk, source, hash, !(hash == last));
  }
}

template <u32 kUnroll, HashContext C>
PP_D void send_changed(const C& c, const SendArgs& args, u32 block, u32 nblocks) {
  const u32 all = (1u << args.npeers) - 1;
  u64 sent = 0, skipped = 0;
  const auto send = [&](u32 i, const Chunk& chunk, const u8* source, const ChunkHash& hash,
                        bool changed) {
    const u32 peers = changed ? all : args.stale;
    if (changed && c.tid() == 0) {
      c.store(&args.hashes[i].first, hash.first);
      c.store(&args.hashes[i].second, hash.second);
    }
    for (u32 p = c.tid(); p < args.npeers; p += c.nthreads())
      c.store(args.announced[p] + i, static_cast<u8>(peers >> p & 1));
    const u64 at = chunk.offset - args.window_offset;
    if (peers == all) {
      c.copy(DestinationList{args.stages, args.npeers, at}, source, chunk.bytes);
    } else {
      for (u32 p = 0; p < args.npeers; ++p) {
        if ((peers >> p & 1) == 0) continue;
        c.copy(FixedList<u8*, 1>{{static_cast<u8*>(args.stages[p]) + at}}, source, chunk.bytes);
      }
    }
    for (u32 p = 0; p < args.npeers; ++p) {
      ((peers >> p & 1) != 0 ? sent : skipped) += chunk.bytes;
    }
  };
  visit_chunks<kUnroll>(c, args, block, nblocks, send);
  if (c.tid() == 0) {
    c.add(&args.counters->sent, sent);
    c.add(&args.counters->skipped, skipped);
  }
}

// Counts changed chunks, and changes nothing else.
template <u32 kUnroll, HashContext C>
PP_D void find_changes(const C& c, const SendArgs& args, u32 block, u32 nblocks) {
  u64 changes = 0;
  const auto count = [&](u32, const Chunk&, const u8*, const ChunkHash&, bool changed) {
    changes += changed ? 1 : 0;
  };
  visit_chunks<kUnroll>(c, args, block, nblocks, count);
  if (c.tid() == 0 && changes != 0) c.add(&args.counters->changes, changes);
}

template <Context C>
PP_D void receive_changed(const C& c, const ReceiveArgs& args, u32 block, u32 nblocks) {
  for (u32 i = block; i < args.nchunks; i += nblocks) {
    if (c.load(args.announced + i) == 0) continue;
    const Chunk chunk = load_chunk(c, args.chunks + i);
    c.copy(FixedList<u8*, 1>{{args.flat + chunk.offset}},
           args.stage + (chunk.offset - args.window_offset), chunk.bytes);
  }
}

}  // namespace pyparallel
