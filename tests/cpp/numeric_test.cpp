// Widening is exact and rounding is to nearest even, for every 16-bit number and around every tie.
#include "device/numeric.h"

#include <cmath>
#include <limits>

#include "testing.h"

using namespace pyparallel;

namespace {

// The value of a number with `exponent_bits` and `mantissa_bits`, from its definition.
double value_of(u16 bits, u32 exponent_bits, u32 mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const u32 exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
  const u32 mantissa = bits & ((1u << mantissa_bits) - 1);
  const int scale =
      static_cast<int>(exponent == 0 ? 1 : exponent) - bias - static_cast<int>(mantissa_bits);
  const double magnitude = std::ldexp((exponent == 0 ? 0 : 1u << mantissa_bits) + mantissa, scale);
  return bits & 0x8000 ? -magnitude : magnitude;
}

template <class T>
void check_all(u32 exponent_bits, u32 mantissa_bits) {
  const u32 infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  for (u32 bits = 0; bits < 65536; ++bits) {
    const T number{static_cast<u16>(bits)};
    const float wide = widen<T>(number);
    const u32 magnitude = bits & 0x7fff;
    if (magnitude > infinity) {
      EXPECT(std::isnan(wide) && narrow<T>(wide).bits == 0x7fff, bits);
      continue;
    }
    EXPECT(narrow<T>(wide).bits == bits, bits, " became ", narrow<T>(wide).bits);
    EXPECT(std::signbit(wide) == (bits >= 0x8000), bits);
    if (magnitude == infinity) {
      EXPECT(std::isinf(wide), bits);
    } else {
      EXPECT(wide == value_of(number.bits, exponent_bits, mantissa_bits), bits, " is ", wide);
    }
  }
  // Between two neighbours: below the middle down, above it up, in the middle to the even one.
  // Infinity stands for the next power of two.
  for (u32 low = 0; low < infinity; ++low) {
    const u16 bits = static_cast<u16>(low);
    const double middle = (value_of(bits, exponent_bits, mantissa_bits) +
                           value_of(static_cast<u16>(low + 1), exponent_bits, mantissa_bits)) /
                          2;
    const float tie = static_cast<float>(middle);
    if (tie != middle) continue;  // bfloat16's smallest tie is no fp32 number
    const float below = std::nextafter(tie, 0.0f);
    const float above = std::nextafter(tie, std::numeric_limits<float>::infinity());
    for (u32 sign : {0u, 0x8000u}) {
      const float s = sign ? -1.0f : 1.0f;
      EXPECT(narrow<T>(s * below).bits == (low | sign), "below ", tie);
      EXPECT(narrow<T>(s * above).bits == ((low + 1) | sign), "above ", tie);
      EXPECT(narrow<T>(s * tie).bits == ((low + (low & 1)) | sign), "tie ", tie);
    }
  }
  const float largest = std::numeric_limits<float>::max();
  EXPECT(narrow<T>(largest).bits == infinity && narrow<T>(-largest).bits == (infinity | 0x8000),
         largest);
  EXPECT(narrow<T>(std::numeric_limits<float>::denorm_min()).bits == 0);
  EXPECT(narrow<T>(-0.0f).bits == 0x8000);
}

}  // namespace

TEST(half) { check_all<Half>(5, 10); }

TEST(bfloat16) { check_all<BFloat16>(8, 7); }

TEST(every_nan_is_stored_as_7fff) {
  for (u32 payload : {1u, 0x400000u, 0x7fffffu, 0x2000u}) {
    for (u32 sign : {0u, 0x80000000u}) {
      const float nan = std::bit_cast<float>(0x7f800000u | payload | sign);
      EXPECT(narrow<Half>(nan).bits == 0x7fff, payload);
      EXPECT(narrow<BFloat16>(nan).bits == 0x7fff, payload);
    }
  }
}

// Seen by UBSan too.
TEST(integers_wrap) {
  const i32 low = std::numeric_limits<i32>::max();
  EXPECT(narrow<i32>(widen<i32>(low) + widen<i32>(1)) == std::numeric_limits<i32>::min());
  const i64 high = std::numeric_limits<i64>::min();
  EXPECT(narrow<i64>(widen<i64>(high) + widen<i64>(-1)) == std::numeric_limits<i64>::max());
}

TEST_MAIN()
