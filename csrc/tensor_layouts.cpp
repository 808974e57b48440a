#include "tensor_layouts.h"

#include <algorithm>

#include "check.h"

namespace py = pybind11;

namespace pyparallel {

// What DLPack lays down, as far as it is used here.
struct DltensorView {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;  // of elements
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major;
  uint32_t minor;
  ExchangeApi* previous;
  void* unused[3];
  int (*view)(void* object, DltensorView* out);  // 0, or -1 with a Python exception set
};

namespace {

const ExchangeApi* exchange_api(const py::capsule& capsule) {
  constexpr const char* kName = "dlpack_exchange_api";
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), kName));
  if (api == nullptr) throw py::error_already_set();
  while (api != nullptr && api->major != 1) api = api->previous;
  PP_CHECK_ARG(api != nullptr && api->view != nullptr, "no exchange API of DLPack 1 with views");
  return api;
}

DltensorView view_of(const ExchangeApi* api, PyObject* tensor) {
  DltensorView view{};
  if (api->view(tensor, &view) != 0) throw py::error_already_set();
  return view;
}

const void* address_of(const DltensorView& view) {
  return static_cast<const char*>(view.data) + view.byte_offset;
}

uint64_t dtype_of(const DltensorView& view) {
  return uint64_t{view.dtype_code} << 24 | uint64_t{view.dtype_bits} << 16 | view.dtype_lanes;
}

uint64_t kind_of(const DltensorView& view) {
  return static_cast<uint64_t>(view.device_type) << 48 |
         (static_cast<uint64_t>(view.device_id) & 0xffff) << 32 | dtype_of(view);
}

}  // namespace

TensorLayouts::TensorLayouts(const py::list& tensors, const py::capsule& api)
    : api_(exchange_api(api)) {
  for (py::handle tensor : tensors) {
    const DltensorView view = view_of(api_, tensor.ptr());
    layouts_.push_back({address_of(view), kind_of(view), dims_.size(), view.ndim});
    dims_.insert(dims_.end(), view.shape, view.shape + view.ndim);
    dims_.insert(dims_.end(), view.strides, view.strides + view.ndim);
    tensors_.add(tensor.ptr());
  }
}

Py_ssize_t TensorLayouts::check() const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Layout& layout = layouts_[i];
    const DltensorView view = view_of(api_, tensors_[i]);
    const int64_t* dims = dims_.data() + layout.dims_begin;
    if (address_of(view) != layout.address || kind_of(view) != layout.kind ||
        view.ndim != layout.ndim || !std::equal(view.shape, view.shape + view.ndim, dims) ||
        !std::equal(view.strides, view.strides + view.ndim, dims + view.ndim)) {
      return static_cast<Py_ssize_t>(i);
    }
  }
  return -1;
}

py::object TensorLayouts::addresses_of(const py::list& others) const {
  const size_t count = layouts_.size();
  PP_CHECK_ARG(count != 0 && others.size() % count == 0, "got ", others.size(),
               " tensors for the layouts of ", count);
  py::list addresses(others.size());
  for (size_t i = 0; i < others.size(); ++i) {
    const Layout& layout = layouts_[i % count];
    const DltensorView view = view_of(api_, PyList_GET_ITEM(others.ptr(), i));
    const int64_t* dims = dims_.data() + layout.dims_begin;
    bool same = dtype_of(view) == (layout.kind & 0xffffffff) && view.ndim == layout.ndim;
    for (int32_t d = 0; same && d < view.ndim; ++d) {
      same = view.shape[d] == dims[d] &&
             (view.shape[d] == 1 || view.strides[d] == dims[view.ndim + d]);
    }
    if (!same) return py::none();
    PyObject* address = PyLong_FromVoidPtr(const_cast<void*>(address_of(view)));
    if (address == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(addresses.ptr(), static_cast<Py_ssize_t>(i), address);
  }
  return addresses;
}

void bind_tensor_layouts(py::module_& m) {
  using py::literals::operator""_a;
  py::class_<TensorLayouts>(m, "TensorLayouts", visible_to_gc<TensorLayouts>())
      .def(py::init<const py::list&, const py::capsule&>(), "tensors"_a, "api"_a)
      .def("check", &TensorLayouts::check)
      .def("addresses_of", &TensorLayouts::addresses_of, "others"_a);
}

}  // namespace pyparallel
