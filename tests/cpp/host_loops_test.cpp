// The fast loops of the host against the plain loops of the device code: bit for bit, at any
// alignment and size.
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "backend/host/host_context.h"
#include "backend/host/loops.h"
#include "device/element_type.h"
#include "device/loops.h"
#include "testing.h"

using namespace pyparallel;
using host::Stores;

namespace {

constexpr u8 kPoison = 0xa5;
constexpr u64 kGuard = 96;  // untouched bytes around every destination
constexpr std::array kSizes = {0,  1,  2,  3,  7,  8,   15,   16,   17,  31,
                               32, 33, 63, 64, 65, 127, 1000, 2047, 5000};
constexpr std::array kDTypes6 = {DType::kFloat16, DType::kBFloat16, DType::kFloat32,
                                 DType::kFloat64, DType::kInt32,    DType::kInt64};

// Bytes at a chosen distance from a multiple of 64, between guards.
class Buffer {
 public:
  Buffer(u64 bytes, u64 offset)
      : bytes_(bytes), memory_(bytes + offset + 2 * kGuard + 64, kPoison) {
    const auto start = reinterpret_cast<std::uintptr_t>(memory_.data() + kGuard);
    begin_ = memory_.data() + kGuard + (64 - start % 64) % 64 + offset;
  }
  u8* data() { return begin_; }
  void expect_guards_intact() const {
    for (const u8* p = memory_.data(); p < begin_; ++p)
      EXPECT(*p == kPoison, "before the destination");
    for (const u8* p = begin_ + bytes_; p < memory_.data() + memory_.size(); ++p) {
      EXPECT(*p == kPoison, "behind the destination");
    }
  }

 private:
  u64 bytes_;
  std::vector<u8> memory_;
  u8* begin_;
};

// All bit patterns occur: NaNs, infinities, both zeros, subnormals, integers near overflow.
void fill_random_bits(u8* to, u64 bytes, std::mt19937_64& random) {
  for (u64 i = 0; i < bytes; ++i) to[i] = static_cast<u8>(random() >> 32);
}

// The plain loops with a block of one thread.
struct PlainContext : host::HostContext {
  template <class Destinations>
  void copy(const Destinations& destinations, const u8* source, u64 bytes) const {
    copy_loop<4>(*this, destinations, source, bytes);
  }
  template <class T, class Destinations, class Sources>
  void sum(const Destinations& destinations, const Sources& sources, u64 count) const {
    sum_loop<T, 4>(*this, destinations, sources, count);
  }
};

// NaN payloads of 32 and 64 bits may differ: they depend on the order in which a compiler puts
// operands.
template <class T>
bool same(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a && b != b) return true;
  }
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <class T>
void expect_same(const u8* got, const u8* want, u64 count, const std::string& what) {
  for (u64 i = 0; i < count; ++i) {
    T a, b;
    std::memcpy(&a, got + i * sizeof(T), sizeof(T));
    std::memcpy(&b, want + i * sizeof(T), sizeof(T));
    EXPECT(same(a, b), what, ", element ", i, " of ", count);
  }
}

// How far consecutive destinations are from lying alike within a line, in bytes.
constexpr std::array kSpreads = {u64{0}, u64{3}};

template <class T>
void check_sum(DType dtype, u32 nsources, u32 ndestinations, u64 offset, u64 count,
               std::mt19937_64& random) {
  const u64 bytes = count * sizeof(T);
  const std::string what = message(dtype_name(dtype), ", ", nsources, " sources, ", ndestinations,
                                   " destinations, offset ", offset);
  std::vector<Buffer> sources, aligned;
  std::vector<const u8*> from;
  std::vector<const void*> plain_from;
  for (u32 k = 0; k < nsources; ++k) {
    sources.emplace_back(bytes, (offset + 5 * k) % 16);
    aligned.emplace_back(bytes, 0);
    fill_random_bits(sources.back().data(), bytes, random);
    std::memcpy(aligned.back().data(), sources.back().data(), bytes);
    from.push_back(sources.back().data());
    plain_from.push_back(aligned.back().data());
  }
  Buffer plain(bytes, 0);
  void* plain_to[] = {plain.data()};
  PlainContext().sum<T>(DestinationList{plain_to, 1, 0}, SourceList{plain_from.data(), nsources, 0},
                        count);

  Buffer baseline(bytes, offset);
  u8* baseline_to[] = {baseline.data()};
  const auto index = static_cast<u32>(dtype);
  EXPECT(host::baseline_kernels().sum[index](baseline_to, 1, from.data(), nsources, bytes) ==
         bytes);
  expect_same<T>(baseline.data(), plain.data(), count, what + ", baseline");
  baseline.expect_guards_intact();
  if (const host::LoopKernels* avx2 = host::avx2_kernels()) {
    Buffer fast(bytes, offset), streamed(bytes, 0);
    u8 *fast_to[] = {fast.data()}, *streamed_to[] = {streamed.data()};
    const u64 done = avx2->sum[index](fast_to, 1, from.data(), nsources, bytes);
    EXPECT(done <= bytes && bytes - done < 128 && done % sizeof(T) == 0, done, " of ", bytes);
    expect_same<T>(fast.data(), plain.data(), done / sizeof(T), what + ", AVX2");
    EXPECT(avx2->sum_streaming[index](streamed_to, 1, from.data(), nsources, bytes) == done);
    expect_same<T>(streamed.data(), plain.data(), done / sizeof(T), what + ", AVX2, streaming");
  }
  for (const Stores stores : {Stores::kCached, Stores::kStreaming}) {
    for (const u64 spread : kSpreads) {
      std::vector<Buffer> destinations;
      std::vector<u8*> to;
      for (u32 m = 0; m < ndestinations; ++m) {
        destinations.emplace_back(bytes, (offset + spread * m) % 64);
        to.push_back(destinations.back().data());
      }
      host::sum(dtype, to.data(), ndestinations, from.data(), nsources, bytes, stores);
      for (Buffer& destination : destinations) {
        expect_same<T>(destination.data(), plain.data(), count, what);
        destination.expect_guards_intact();
      }
    }
  }
}

}  // namespace

TEST(sums_have_the_bits_of_the_plain_loop) {
  std::mt19937_64 random(1);
  for (const DType dtype : kDTypes6) {
    with_element_type(dtype, [&]<class T>() {
      for (const u32 nsources : {1u, 2u, 3u, 4u, 5u, 16u}) {
        for (const u64 size : kSizes) {
          for (u64 offset = 0; offset < 16; offset += size < 100 ? 1 : 5) {
            check_sum<T>(dtype, nsources, 1 + (nsources + offset) % 4, offset, size, random);
          }
        }
      }
    });
  }
}

// Every 16-bit number, widened and rounded back through fp32, and every sum with a number that
// makes ties.
TEST(sixteen_bit_rounding_is_exact_for_every_number) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<u16> all(65536), step(65536), want(65536), got(65536);
    for (const u16 addend : {u16{0}, u16{0x0001}, u16{0x8001}, u16{0x1400}, u16{0x3c01},
                             u16{0x7bff}, u16{0xfbff}, u16{0x7c00}, u16{0xff80}}) {
      for (u32 i = 0; i < 65536; ++i) {
        all[i] = static_cast<u16>(i);
        step[i] = addend;
        if (dtype == DType::kFloat16) {
          want[i] = narrow<Half>(widen<Half>({all[i]}) + widen<Half>({addend})).bits;
        } else {
          want[i] = narrow<BFloat16>(widen<BFloat16>({all[i]}) + widen<BFloat16>({addend})).bits;
        }
      }
      const u8* from[] = {reinterpret_cast<const u8*>(all.data()),
                          reinterpret_cast<const u8*>(step.data())};
      u8* to[] = {reinterpret_cast<u8*>(got.data())};
      host::sum(dtype, to, 1, from, 2, 2 * 65536, Stores::kCached);
      for (u32 i = 0; i < 65536; ++i) {
        EXPECT(got[i] == want[i], dtype_name(dtype), " ", i, " + ", addend, ": ", got[i], ", not ",
               want[i]);
        const u32 infinity = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
        EXPECT((got[i] & 0x7fff) <= infinity || got[i] == 0x7fff, "a NaN is stored as ", got[i]);
      }
    }
  }
}

TEST(a_sum_starts_with_the_first_value) {
  const float minus_zero = -0.0f;
  float got = 1;
  const u8* from[] = {reinterpret_cast<const u8*>(&minus_zero),
                      reinterpret_cast<const u8*>(&minus_zero)};
  u8* to[] = {reinterpret_cast<u8*>(&got)};
  for (const u32 nsources : {1u, 2u}) {
    host::sum(DType::kFloat32, to, 1, from, nsources, 4, Stores::kCached);
    EXPECT(got == 0 && std::signbit(got), "+0, not -0, from ", nsources, " sources");
  }
}

TEST(a_destination_may_be_a_source) {
  std::mt19937_64 random(2);
  for (const Stores stores : {Stores::kCached, Stores::kStreaming}) {
    std::vector<std::vector<i32>> values(3, std::vector<i32>(3001));
    std::vector<i32> want(3001, 0);
    std::vector<const u8*> from;
    std::vector<u8*> to;
    for (auto& row : values) {
      for (u64 i = 0; i < row.size(); ++i) {
        row[i] = static_cast<i32>(random() >> 40);
        want[i] += row[i];
      }
      from.push_back(reinterpret_cast<const u8*>(row.data()));
      to.push_back(reinterpret_cast<u8*>(row.data()));
    }
    host::sum(DType::kInt32, to.data(), 3, from.data(), 3, 3001 * 4, stores);
    for (const auto& row : values) EXPECT(row == want);
  }
}

// Copies to `ndestinations`, which start `spread` bytes after each other within a line.
void check_copy(u32 ndestinations, u64 size, u64 offset, u64 spread, Stores stores,
                std::mt19937_64& random) {
  Buffer source(size, offset);
  fill_random_bits(source.data(), size, random);
  std::vector<Buffer> destinations;
  std::vector<u8*> to;
  for (u32 m = 0; m < ndestinations; ++m) {
    destinations.emplace_back(size, (3 * offset + spread * m) % 64);
    to.push_back(destinations.back().data());
  }
  host::copy(to.data(), ndestinations, source.data(), size, stores);
  for (Buffer& destination : destinations) {
    EXPECT(std::memcmp(destination.data(), source.data(), size) == 0, size, " bytes, offset ",
           offset, ", spread ", spread);
    destination.expect_guards_intact();
  }
}

TEST(copies_are_exact_at_any_alignment) {
  std::mt19937_64 random(3);
  for (const Stores stores : {Stores::kCached, Stores::kStreaming}) {
    for (const u32 ndestinations : {1u, 2u, 3u, 15u}) {
      for (const u64 size : {0, 1, 15, 16, 17, 63, 64, 65, 191, 4095, 4096, 4097, 20000}) {
        for (u64 offset = 0; offset < 16; ++offset) {
          for (const u64 spread : kSpreads)
            check_copy(ndestinations, size, offset, spread, stores, random);
        }
      }
    }
  }
}

TEST(a_copy_to_its_own_source_writes_the_others) {
  for (const Stores stores : {Stores::kCached, Stores::kStreaming}) {
    Buffer source(1000, 0), other(1000, 0);
    std::memset(source.data(), 7, 1000);
    u8* to[] = {source.data(), other.data()};
    host::copy(to, 2, source.data(), 1000, stores);
    host::copy(to, 1, source.data(), 1000, stores);
    EXPECT(std::memcmp(source.data(), other.data(), 1000) == 0);
    other.expect_guards_intact();
  }
}

TEST(lines_are_streamed_to_all_destinations_by_both_sets_of_kernels) {
  std::mt19937_64 random(4);
  for (const host::LoopKernels* kernels : {&host::baseline_kernels(), host::avx2_kernels()}) {
    if (!kernels) continue;
    for (const u64 nlines : {0, 1, 2, 9}) {
      const u64 bytes = nlines * host::kLine;
      Buffer source(bytes, 5), first(bytes, 0), second(bytes, 0);
      fill_random_bits(source.data(), bytes, random);
      u8* to[] = {first.data(), second.data()};
      kernels->stream(to, 2, source.data(), nlines);
      for (Buffer* destination : {&first, &second}) {
        EXPECT(std::memcmp(destination->data(), source.data(), bytes) == 0, nlines, " lines");
        destination->expect_guards_intact();
      }
    }
  }
}

TEST_MAIN()
