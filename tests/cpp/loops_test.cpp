// The plain loops and the event-ordered bodies: exact for any size, alignment, number of threads,
// parts and pointers.
#include "device/loops.h"

#include <cstring>
#include <random>

#include "device/element_type.h"
#include "device/event_ordered.h"
#include "testing.h"

using namespace pyparallel;
using namespace pyparallel::testing;

namespace {

constexpr u8 kPoison = 0xa5;
constexpr u64 kGuard = 64;

// One thread of a block. The loops hold no barrier, so running the threads one after the other is a
// valid order.
struct SerialThread {
  u32 id, count;
  u32 tid() const { return id; }
  u32 nthreads() const { return count; }
  void sync() const {}
  bool sync_and(bool ok) const { return ok; }
  template <class W>
  W load(const W* from) const {
    EXPECT(address(from) % alignof(W) == 0, "a load of ", sizeof(W), " bytes is not aligned");
    return *from;
  }
  template <class W>
  void store(W* to, W value) const {
    EXPECT(address(to) % alignof(W) == 0, "a store of ", sizeof(W), " bytes is not aligned");
    *to = value;
  }
  template <class Destinations>
  void copy(const Destinations& destinations, const u8* source, u64 bytes) const {
    copy_loop<4>(*this, destinations, source, bytes);
  }
  template <class T, class Destinations, class Sources>
  void sum(const Destinations& destinations, const Sources& sources, u64 elements) const {
    sum_loop<T, 2>(*this, destinations, sources, elements);
  }
};
static_assert(Context<SerialThread>);

template <class Run>
void run_block(u32 nthreads, Run run) {
  for (u32 id = 0; id < nthreads; ++id) run(SerialThread{id, nthreads});
}

// `bytes` bytes at `misalignment` from a multiple of 64, with a poisoned guard on both sides.
class Buffer {
 public:
  Buffer(u64 bytes, u64 misalignment) : bytes_(bytes), memory_(bytes + 2 * kGuard + 128, kPoison) {
    data_ = reinterpret_cast<u8*>(round_up(address(memory_.data()) + kGuard, 64) + misalignment);
  }
  u8* data() { return data_; }
  void fill(std::mt19937_64& random) {
    for (u64 i = 0; i < bytes_; ++i) data_[i] = static_cast<u8>(random());
  }
  void expect_guards() const {
    for (const u8* byte = memory_.data(); byte < memory_.data() + memory_.size(); ++byte) {
      const bool inside = byte >= data_ && byte < data_ + bytes_;
      EXPECT(inside || *byte == kPoison, "byte ", byte - data_, " of ", bytes_, " was written");
    }
  }

 private:
  u64 bytes_;
  std::vector<u8> memory_;
  u8* data_;
};

constexpr u64 kSizes[] = {0, 1, 2, 3, 7, 15, 16, 17, 31, 64, 127, 128, 129, 1000, 4096 + 6};

template <class T>
T random_element(std::mt19937_64& random) {
  const int small = static_cast<int>(random() % 2001) - 1000;
  return narrow<T>(static_cast<Accumulator<T>>(small * 0.37));
}
template <>
i32 random_element<i32>(std::mt19937_64& random) {
  return static_cast<i32>(random());
}
template <>
i64 random_element<i64>(std::mt19937_64& random) {
  return static_cast<i64>(random());
}

// Sums `nsources` buffers into `ndestinations` and compares with one element after the other.
template <class T>
void check_sum(u64 count, u32 nthreads, u32 nsources, u32 ndestinations, bool aligned,
               bool in_place, std::mt19937_64& random) {
  std::vector<Buffer> buffers;
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  const auto misalignment = [&] { return aligned ? 16 - sizeof(T) : random() % 8 * sizeof(T); };
  for (u32 k = 0; k < nsources + ndestinations; ++k)
    buffers.emplace_back(count * sizeof(T), misalignment());
  std::vector<T> expected(count);
  for (u32 k = 0; k < nsources; ++k) {
    T* elements = reinterpret_cast<T*>(buffers[k].data());
    for (u64 i = 0; i < count; ++i) elements[i] = random_element<T>(random);
    sources.push_back(elements);
  }
  for (u64 i = 0; i < count; ++i) {
    Accumulator<T> sum = widen<T>(static_cast<const T*>(sources[0])[i]);
    for (u32 k = 1; k < nsources; ++k) sum = sum + widen<T>(static_cast<const T*>(sources[k])[i]);
    expected[i] = narrow<T>(sum);
  }
  for (u32 k = 0; k < ndestinations; ++k) {
    const bool replaces = in_place && k < nsources;
    destinations.push_back(replaces ? buffers[k].data() : buffers[nsources + k].data());
  }
  const u32 nparts = 1 + random() % 4;
  for (u32 part = 0; part < nparts; ++part) {
    run_block(nthreads, [&](const SerialThread& c) {
      run_sum<T>(c, DestinationList{destinations.data(), ndestinations, 0},
                 SourceList{sources.data(), nsources, 0}, count * sizeof(T), part, nparts);
    });
  }
  for (const void* destination : destinations) {
    EXPECT(same_bytes(destination, expected.data(), count * sizeof(T)), count, " elements of ",
           sizeof(T), " bytes, sources ", nsources, " threads ", nthreads);
  }
  for (const Buffer& buffer : buffers) buffer.expect_guards();
}

}  // namespace

TEST(copies_of_any_alignment) {
  std::mt19937_64 random(1);
  for (u64 bytes : kSizes) {
    for (u64 repeat = 0; repeat < 60; ++repeat) {
      const u32 nthreads = 1 + random() % 5, ndestinations = 1 + random() % 4;
      const u64 unit = u64{1} << random() % 5;  // what all addresses have in common
      Buffer source(bytes, random() % 16);
      source.fill(random);
      std::vector<Buffer> buffers;
      std::vector<void*> destinations;
      for (u32 k = 0; k < ndestinations; ++k) {
        buffers.emplace_back(bytes, (address(source.data()) + random() % 16 * unit) % 64);
        destinations.push_back(buffers.back().data());
      }
      run_block(nthreads, [&](const SerialThread& c) {
        c.copy(DestinationList{destinations.data(), ndestinations, 0}, source.data(), bytes);
      });
      for (u32 k = 0; k < ndestinations; ++k) {
        EXPECT(same_bytes(destinations[k], source.data(), bytes), bytes, " bytes, threads ",
               nthreads);
        buffers[k].expect_guards();
      }
    }
  }
}

TEST(strided_copies_in_parts) {
  std::mt19937_64 random(2);
  for (u64 repeat = 0; repeat < 1500; ++repeat) {
    const u64 unit = u64{1} << random() % 5;
    const u64 row_bytes = (1 + random() % 40) * unit, rows = 1 + random() % 20;
    const u64 source_pitch = row_bytes + random() % 3 * unit,
              destination_pitch = row_bytes + random() % 3 * unit;
    const u32 nthreads = 1 + random() % 40, nparts = 1 + random() % 5;
    Buffer source(rows * source_pitch, random() % 3 * unit % 64),
        destination(rows * destination_pitch, random() % 3 * unit % 64);
    source.fill(random);
    std::memset(destination.data(), kPoison, rows * destination_pitch);
    const FixedList<u8*, 1> to{{destination.data()}};
    for (u32 part = 0; part < nparts; ++part) {
      run_block(nthreads, [&](const SerialThread& c) {
        run_copy(c, to, source.data(), {rows, row_bytes, source_pitch, destination_pitch}, part,
                 nparts);
      });
    }
    for (u64 row = 0; row < rows; ++row) {
      const u8* written = destination.data() + row * destination_pitch;
      EXPECT(same_bytes(written, source.data() + row * source_pitch, row_bytes), "row ", row,
             " of ", row_bytes);
      for (u64 i = row_bytes; i < destination_pitch; ++i)
        EXPECT(written[i] == kPoison, "beside row ", row);
    }
    destination.expect_guards();
  }
}

TEST(sums_of_every_type) {
  std::mt19937_64 random(3);
  for (u32 dtype = 0; dtype < kDTypes; ++dtype) {
    with_element_type(static_cast<DType>(dtype), [&]<class T>() {
      for (u64 count : kSizes) {
        for (u32 repeat = 0; repeat < 20; ++repeat) {
          check_sum<T>(count, 1 + random() % 5, 1 + random() % 16, 1 + random() % 4, random() % 2,
                       random() % 2, random);
        }
      }
    });
  }
}

// -0 + nothing is -0, and large terms cancel in rank order: 1e8 + 1 - 1e8 is 0 in fp32.
TEST(sums_start_with_the_first_source_and_keep_the_order) {
  const float negative_zero[] = {-0.0f};
  const float terms[3][1] = {{1e8f}, {1.0f}, {-1e8f}};
  float result[1];
  const FixedList<u8*, 1> to{{reinterpret_cast<u8*>(result)}};
  const SerialThread c{0, 1};
  c.sum<float>(to, FixedList<const u8*, 1>{{reinterpret_cast<const u8*>(negative_zero)}}, 1);
  EXPECT(std::bit_cast<u32>(result[0]) == 0x80000000u, result[0]);
  const void* sources[] = {terms[0], terms[1], terms[2]};
  c.sum<float>(to, SourceList{sources, 3, 0}, 1);
  EXPECT(result[0] == 0.0f, result[0]);
}

// 1 + 2^-11 + 2^-11 in half: rounded once it is 1 + 2^-10, rounded at each addition it stays 1.
TEST(sixteen_bit_sums_round_once) {
  const u16 one = 0x3c00, tiny = 0x1000;
  u16 result = 0;
  const void* sources[] = {&one, &tiny, &tiny};
  SerialThread{0, 1}.sum<Half>(FixedList<u8*, 1>{{reinterpret_cast<u8*>(&result)}},
                               SourceList{sources, 3, 0}, 1);
  EXPECT(result == 0x3c01, result);
}

TEST_MAIN()
