// The hash of chunks: its definition, what it must tell apart, and blocks of several threads.
#include "device/chunk_hash.h"

#include <bit>
#include <random>
#include <set>

#include "device/send_changed.h"
#include "hashed_backend.h"
#include "team_context.h"
#include "testing.h"

using namespace pyparallel;
using namespace pyparallel::testing;

namespace {

std::vector<Pack> random_keys(u64 seed, u32 bytes) {
  std::mt19937 random(static_cast<u32>(seed));
  std::vector<Pack> keys(hash_keys(bytes));
  for (Pack& key : keys) {
    for (u32& word : key.words) word = random();
  }
  return keys;
}

std::vector<u8> random_bytes(u64 seed, u64 count) {
  std::mt19937_64 random(seed);
  std::vector<u8> bytes(count);
  for (u8& byte : bytes) byte = static_cast<u8>(random());
  return bytes;
}

ChunkHash hash_of(const std::vector<Pack>& keys, const u8* source, u64 bytes) {
  return hash_chunk<4>(HashingContext{}, keys.data(), source, static_cast<u32>(bytes));
}

// The definition, word by word.
ChunkHash reference(const std::vector<Pack>& keys, const u8* source, u64 bytes) {
  const auto word = [&](u64 i) {
    u32 value = 0;
    for (u64 b = 0; b < 4; ++b) {
      if (4 * i + b < bytes) value |= u32{source[4 * i + b]} << (8 * b);
    }
    return value;
  };
  const auto key = [&](u64 i) { return keys[i / 4].words[i % 4]; };
  ChunkHash hash{0, 0};
  for (u64 i = 0; 4 * i < round_up(bytes, 16); i += 2) {
    hash.first += u64{word(i) + key(i)} * u64{word(i + 1) + key(i + 1)};
    hash.second += u64{word(i) + key(i + 4)} * u64{word(i + 1) + key(i + 5)};
  }
  return hash;
}

// Counts hashes of variations of one chunk that are not all different.
class Distinct {
 public:
  void add(const ChunkHash& hash, const char* what, u64 where) {
    EXPECT(firsts_.insert(hash.first).second, what, " at ", where, ": the first sum is not new");
    EXPECT(seconds_.insert(hash.second).second, what, " at ", where, ": the second sum is not new");
  }

 private:
  std::set<u64> firsts_, seconds_;
};

}  // namespace

TEST(the_hash_is_its_definition_at_any_size_and_alignment) {
  const std::vector<u8> memory = random_bytes(1, 5000);
  const std::vector<Pack> keys = random_keys(2, 5000);
  for (u64 bytes = 1; bytes <= 4099; bytes += bytes < 100 ? 1 : 37) {
    for (u64 shift = 0; shift < 17; ++shift) {
      EXPECT(hash_of(keys, memory.data() + shift, bytes) ==
                 reference(keys, memory.data() + shift, bytes),
             bytes, " bytes at ", shift);
    }
  }
}

// What a sum of words times keys would miss: two flips of bit 63 cancel there.
TEST(small_changes_of_floats_are_told_apart) {
  constexpr u64 kCount = 512;
  for (u64 seed = 0; seed < 3; ++seed) {
    std::vector<float> floats(kCount);
    for (u64 i = 0; i < kCount; ++i)
      floats[i] = seed == 0 ? 1.0f : 0.01f * static_cast<float>(i % 7);
    const std::vector<Pack> keys = random_keys(seed + 3, kCount * 4);
    const auto hash = [&] {
      return hash_of(keys, reinterpret_cast<const u8*>(floats.data()), kCount * 4);
    };
    Distinct seen;
    seen.add(hash(), "no change", 0);
    for (u64 i = 0; i < kCount; ++i) {
      for (u32 bit = 0; bit < 32; ++bit) {
        const float saved = floats[i];
        floats[i] = std::bit_cast<float>(std::bit_cast<u32>(saved) ^ 1u << bit);
        seen.add(hash(), "a flipped bit", 32 * i + bit);
        floats[i] = saved;
      }
    }
    for (u64 i = 0; i < kCount; ++i) {
      for (const u64 j : {i + 1, i + 2, i + 4, i + 64, i + 256}) {
        if (j >= kCount) continue;
        floats[i] = -floats[i];
        floats[j] = -floats[j];
        if (floats[i] != 0 || floats[j] != 0) seen.add(hash(), "two flipped signs", i * kCount + j);
        floats[i] = -floats[i];
        floats[j] = -floats[j];
      }
    }
    for (u64 i = 0; i < kCount; ++i) {
      for (const u64 j : {i + 1, i + 2, i + 3, i + 4, i + 5, i + 64}) {
        if (j >= kCount || floats[i] == floats[j]) continue;
        std::swap(floats[i], floats[j]);
        seen.add(hash(), "a swap", i * kCount + j);
        std::swap(floats[i], floats[j]);
      }
    }
  }
}

// The lemma behind the bound, checked for words of 4 bits by trying everything: two different pairs
// have sums that differ by a given number for at most one key pair in 16.
TEST(two_pairs_collide_for_one_key_in_two_to_the_word_size) {
  constexpr u32 kWords = 16, kProducts = 256;
  for (u32 message = 0; message < kWords * kWords; ++message) {
    for (u32 other = 0; other < message; ++other) {
      u32 keys_of[kProducts] = {};  // [difference]
      for (u32 key = 0; key < kWords * kWords; ++key) {
        const auto product = [&](u32 pair) {
          return (pair / kWords + key / kWords) % kWords * ((pair + key) % kWords);
        };
        ++keys_of[(product(message) - product(other)) % kProducts];
      }
      for (const u32 count : keys_of) {
        EXPECT(count <= kWords, count, " of 256 keys for ", message, " and ", other);
      }
    }
  }
}

TEST(blocks_of_several_threads_hash_and_send_the_same) {
  constexpr u32 kPeers = 2;
  std::mt19937_64 random(5);
  const std::vector<Segment> segments = {{0, 40000}, {40001, 1}, {40002, 4111}, {44544, 333}};
  const std::vector<Chunk> chunks = cut_chunks(segments, u64{1} << 20);
  const std::vector<Pack> keys = random_keys(6, kChunkBytes);
  for (const u32 nthreads : {1u, 4u, 7u}) {
    std::vector<u8> source = random_bytes(7, 50000);
    std::vector<const u8*> sources;
    for (const Segment& segment : segments) sources.push_back(source.data() + segment.offset + 1);
    std::vector<ChunkHash> hashes(chunks.size());
    SendCounters counters{};
    std::vector<std::vector<u8>> stages(kPeers, std::vector<u8>(50000)), announced(kPeers), flats;
    flats.assign(kPeers, std::vector<u8>(50000, 0xa5));
    SendArgs args{};
    args.sources = sources.data();
    args.chunks = chunks.data();
    args.nchunks = static_cast<u32>(chunks.size());
    args.keys = keys.data();
    args.hashes = hashes.data();
    args.counters = &counters;
    args.npeers = kPeers;
    for (u32 p = 0; p < kPeers; ++p) {
      announced[p].assign(chunks.size(), 0xa5);
      args.stages[p] = stages[p].data();
      args.announced[p] = announced[p].data();
    }
    Threads threads(nthreads);
    for (int round = 0; round < 10; ++round) {
      args.stale = round == 0 ? 3 : round % 3;
      source[random() % source.size()] ^= 1;
      Block block(nthreads);
      threads.run(
          [&](u32 id) { send_changed<2>(TeamContext(block, id, nthreads, 0, false), args, 0, 1); });
      for (u32 p = 0; p < kPeers; ++p) {
        const ReceiveArgs receive{chunks.data(),    args.nchunks,        0,
                                  stages[p].data(), announced[p].data(), flats[p].data()};
        threads.run([&](u32 id) {
          receive_changed(TeamContext(block, id, nthreads, 0, false), receive, 0, 1);
        });
        for (u64 k = 0; k < segments.size(); ++k) {
          EXPECT(same_bytes(flats[p].data() + segments[k].offset, sources[k], segments[k].bytes),
                 nthreads, " threads, round ", round, ", peer ", p, ", segment ", k);
        }
      }
      for (u64 c = 0; c < chunks.size(); ++c) {
        EXPECT(hashes[c] == reference(keys, sources[chunks[c].segment] + chunks[c].source_offset,
                                      chunks[c].bytes),
               "chunk ", c);
      }
    }
  }
}

TEST_MAIN()
