// Runs a collective of a communicator and compares every byte with what it should give.
#pragma once
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "communicator.h"
#include "device/element_type.h"
#include "testing.h"
#include "wrapped_backend.h"

namespace pyparallel::testing {

constexpr u8 kPoison = 0xa5;
constexpr CommunicatorOptions kSmall{
    .timeout_ms = 30000, .nchannels = 2, .slots = 4, .slot_bytes = 256, .stage_slot_bytes = 1024};

// Small whole numbers, whose sums are exact in every type and order.
inline u32 value_at(u32 rank, u64 i) { return static_cast<u32>((i + 3 * rank) % 7); }

// "auto" and the names of all algorithms of a collective that carry so many bytes.
inline std::vector<std::string_view> names_of(Collective collective, u64 bytes) {
  std::vector<std::string_view> names{"auto"};
  for (const Algorithm& algorithm : algorithms_of(collective)) {
    if (bytes <= algorithm.max_bytes) names.push_back(algorithm.name);
  }
  return names;
}

using Bytes = std::vector<u8>;

template <class T>
T element_of(u32 value) {
  return narrow<T>(static_cast<Accumulator<T>>(value));
}

// Element i is value(i), as the dtype stores it.
inline Bytes encode(DType dtype, u64 count, const std::function<u32(u64)>& value) {
  Bytes bytes(count * element_bytes(dtype));
  with_element_type(dtype, [&]<class T>() {
    for (u64 i = 0; i < count; ++i) {
      const T element = element_of<T>(value(i));
      std::memcpy(bytes.data() + i * sizeof(T), &element, sizeof(T));
    }
  });
  return bytes;
}

struct World {
  u32 nranks;
  Communicator communicator;
  std::vector<StreamHandle> streams;

  World(u32 n, std::unique_ptr<Backend> backend, CommunicatorOptions options = kSmall)
      : nranks(n), communicator(std::move(backend), n, options), streams(n, 0) {}
  explicit World(u32 n) : World(n, make_host_backend(n)) {}

  std::vector<Bytes> sources(DType dtype, u64 count) const {
    std::vector<Bytes> all;
    for (u32 r = 0; r < nranks; ++r) {
      all.push_back(encode(dtype, count, [r](u64 i) { return value_at(r, i); }));
    }
    return all;
  }
  Bytes sum(DType dtype, u64 count) const {
    return encode(dtype, count, [this](u64 i) {
      u32 total = 0;
      for (u32 r = 0; r < nranks; ++r) total += value_at(r, i);
      return total;
    });
  }
};

inline std::vector<const void*> addresses(const std::vector<Bytes>& all) {
  std::vector<const void*> pointers;
  for (const Bytes& bytes : all) pointers.push_back(bytes.data());
  return pointers;
}
inline std::vector<void*> addresses(std::vector<Bytes>& all) {
  std::vector<void*> pointers;
  for (Bytes& bytes : all) pointers.push_back(bytes.data());
  return pointers;
}

inline void check_broadcast(World& world, u32 root, u64 bytes, std::string_view algorithm) {
  const std::vector<Bytes> sources = world.sources(DType::kInt32, (bytes + 3) / 4);
  std::vector<Bytes> destinations(world.nranks, Bytes(bytes, kPoison));
  const void* source[] = {sources[root].data()};
  const Segment segment[] = {{0, bytes}};
  world.communicator.broadcast(root, source, segment, addresses(destinations), world.streams,
                               algorithm);
  for (u32 r = 0; r < world.nranks; ++r) {
    const Bytes want =
        r == root ? Bytes(bytes, kPoison)
                  : Bytes(sources[root].begin(), sources[root].begin() + static_cast<i64>(bytes));
    EXPECT(destinations[r] == want, algorithm, ", ", world.nranks, " ranks, root ", root, ", rank ",
           r, ", ", bytes, " bytes");
  }
}

inline void check_reduce_add(World& world, u32 root, u64 count, DType dtype,
                             std::string_view algorithm) {
  const std::vector<Bytes> sources = world.sources(dtype, count);
  const u64 bytes = count * element_bytes(dtype);
  Bytes destination(bytes, kPoison);
  const Segment segment[] = {{0, bytes}};
  world.communicator.reduce_add(root, addresses(sources), segment, destination.data(), dtype,
                                world.streams, algorithm);
  EXPECT(destination == world.sum(dtype, count), algorithm, ", ", world.nranks, " ranks, root ",
         root, ", ", count, " ", dtype_name(dtype));
}

inline void check_all_reduce(World& world, u64 count, DType dtype, bool in_place,
                             std::string_view algorithm) {
  std::vector<Bytes> sources = world.sources(dtype, count);
  std::vector<Bytes> fresh(world.nranks, Bytes(count * element_bytes(dtype), kPoison));
  std::vector<Bytes>& destinations = in_place ? sources : fresh;
  world.communicator.all_reduce(addresses(std::as_const(sources)), addresses(destinations), count,
                                dtype, world.streams, algorithm);
  for (u32 r = 0; r < world.nranks; ++r) {
    EXPECT(destinations[r] == world.sum(dtype, count), algorithm, ", rank ", r, " of ",
           world.nranks, ", ", count, " ", dtype_name(dtype), in_place ? ", in place" : "");
  }
}

// Rank r gets a share of r + 1 columns of 3 bytes; ranks in `skip` are left out.
inline void check_scatter_and_gather(World& world, u32 root, u64 rows, u32 skip) {
  const u32 n = world.nranks;
  std::vector<Share> shares;
  u64 pitch = 2;  // columns of nobody around the shares
  for (u32 r = 0; r < n; ++r) {
    shares.push_back({pitch, 3 * (r + 1)});
    pitch += 3 * (r + 1);
  }
  pitch += 2;
  Bytes matrix(rows * pitch);
  for (u64 i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<u8>(i % 251);
  std::vector<Bytes> pieces;
  std::vector<void*> to;
  for (u32 r = 0; r < n; ++r) pieces.emplace_back(rows * shares[r].bytes, kPoison);
  for (u32 r = 0; r < n; ++r) to.push_back((skip >> r & 1) != 0 ? nullptr : pieces[r].data());
  world.communicator.scatter(root, matrix.data(), rows, pitch, shares, to, world.streams);
  Bytes want_matrix(matrix.size(), kPoison);
  for (u32 r = 0; r < n; ++r) {
    for (u64 row = 0; row < rows; ++row) {
      for (u64 i = 0; i < shares[r].bytes; ++i) {
        const u64 at = row * pitch + shares[r].offset + i;
        const bool skipped = (skip >> r & 1) != 0;
        EXPECT(pieces[r][row * shares[r].bytes + i] == (skipped ? kPoison : matrix[at]),
               "scatter, rank ", r, " of ", n, ", root ", root, ", row ", row, ", byte ", i);
        if (!skipped) want_matrix[at] = matrix[at];
      }
    }
  }
  Bytes gathered(matrix.size(), kPoison);
  const std::vector<const void*> from(to.begin(), to.end());
  world.communicator.gather(root, from, rows, pitch, shares, gathered.data(), world.streams);
  EXPECT(gathered == want_matrix, "gather, ", n, " ranks, root ", root, ", ", rows, " rows");
}

inline void check_everything(World& world) {
  for (u32 root = 0; root < world.nranks; ++root) {
    for (const u64 size : {0, 1, 5, 127, 128, 129, 1000, 5003, 20001}) {
      for (const auto algorithm : names_of(Collective::kBroadcast, size))
        check_broadcast(world, root, size, algorithm);
      const auto dtype = static_cast<DType>(size % kDTypes);
      for (const auto algorithm : names_of(Collective::kReduceAdd, size * element_bytes(dtype)))
        check_reduce_add(world, root, size, dtype, algorithm);
    }
    for (const u64 rows : {0, 1, 7, 400}) {
      check_scatter_and_gather(world, root, rows, 0);
      check_scatter_and_gather(world, root, rows, 1u << root);
    }
  }
  for (const u64 count : {0, 1, 5, 127, 1000, 5003}) {
    for (u32 dtype = 0; dtype < kDTypes; ++dtype) {
      const u64 bytes = count * element_bytes(static_cast<DType>(dtype));
      for (const auto algorithm : names_of(Collective::kAllReduce, bytes)) {
        check_all_reduce(world, count, static_cast<DType>(dtype), false, algorithm);
        check_all_reduce(world, count, static_cast<DType>(dtype), true, algorithm);
      }
    }
  }
}

}  // namespace pyparallel::testing
