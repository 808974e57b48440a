// From a DType at run time to an element type at compile time.
#pragma once
#include "../dtype.h"
#include "numeric.h"

namespace pyparallel {

// Calls visit.template operator()<T>() with the element type of `dtype` and returns what it
// returns.
template <class Visit>
decltype(auto) with_element_type(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kFloat16:
      return visit.template operator()<Half>();
    case DType::kBFloat16:
      return visit.template operator()<BFloat16>();
    case DType::kFloat32:
      return visit.template operator()<float>();
    case DType::kFloat64:
      return visit.template operator()<double>();
    case DType::kInt32:
      return visit.template operator()<i32>();
    default:
      return visit.template operator()<i64>();
  }
}

}  // namespace pyparallel
