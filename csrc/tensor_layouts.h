// Where tensors lie in memory, read through the exchange API of DLPack 1.2: a table of C functions
// that a tensor type offers. So nothing here knows torch, and reading a tensor takes some tens of
// nanoseconds. The GIL protects everything here.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "identity_walk.h"

namespace pyparallel {

struct ExchangeApi;

class TensorLayouts {
 public:
  // `api` is the capsule __dlpack_c_exchange_api__ of the tensors' type. Throws what the API raises
  // for tensors that do not lie in memory, such as sparse ones.
  TensorLayouts(const pybind11::list& tensors, const pybind11::capsule& api);

  // The first tensor that lies elsewhere, or has another dtype, shape or stride than before; or -1.
  Py_ssize_t check() const;

  // The addresses of other tensors, if there are as many or a multiple, and each has the dtype,
  // shape and strides of its counterpart; else None. A dimension of size 1 may have any stride.
  pybind11::object addresses_of(const pybind11::list& others) const;

  int visit(visitproc visit, void* arg) const { return tensors_.visit(visit, arg); }
  void clear() { tensors_.clear(); }

 private:
  struct Layout {
    const void* address;
    uint64_t kind;      // dtype and device
    size_t dims_begin;  // sizes, then strides, in dims_
    int32_t ndim;
  };

  const ExchangeApi* api_;
  References tensors_;
  std::vector<Layout> layouts_;
  std::vector<int64_t> dims_;
};

void bind_tensor_layouts(pybind11::module_& m);

}  // namespace pyparallel
