// Names of element types.
#include "dtype.h"

#include <array>

#include "check.h"

namespace pyparallel {
namespace {

constexpr std::array<const char*, kDTypes> kNames = {"float16", "bfloat16", "float32",
                                                     "float64", "int32",    "int64"};

}  // namespace

const char* dtype_name(DType dtype) { return kNames[static_cast<u32>(dtype)]; }

DType parse_dtype(std::string_view name) {
  for (u32 i = 0; i < kDTypes; ++i) {
    if (name == kNames[i]) return static_cast<DType>(i);
  }
  throw ArgumentError(
      message("the core adds float16, bfloat16, float32, float64, int32 and int64, not ", name));
}

}  // namespace pyparallel
