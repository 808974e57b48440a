// Element types that the kernels can add. Copies move bytes and need no type.
#pragma once
#include <string_view>

#include "base.h"

namespace pyparallel {

enum class DType : u32 { kFloat16, kBFloat16, kFloat32, kFloat64, kInt32, kInt64 };
constexpr u32 kDTypes = 6;

PP_HD constexpr u32 element_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    default:
      return 8;
  }
}

// "float16", "bfloat16", "float32", "float64", "int32", "int64".
const char* dtype_name(DType dtype);
// Throws ArgumentError for any other name.
DType parse_dtype(std::string_view name);

}  // namespace pyparallel
