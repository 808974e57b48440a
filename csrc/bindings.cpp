// The Python module pyparallel._C: the only file that knows Python. Its interface is
// pyparallel/_C.pyi.
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "backend/cuda/cuda_info.h"
#include "backend/host/communication_thread.h"
#include "backend/host/faulty_backend.h"
#include "backend/host/huge_pages.h"
#include "backend/host/limits.h"
#include "check.h"
#include "communicator.h"
#include "identity_walk.h"
#include "segment_table.h"
#include "tensor_layouts.h"

namespace py = pybind11;

// The PP_ macros below are defined by CMakeLists.txt.

namespace pyparallel {
namespace {

// Gives up the GIL for its scope. Where a daemon thread wants it back after the interpreter has
// begun to end, Python up to 3.13 ends the thread by unwinding it, which no destructor survives. It
// sleeps for ever instead, as Python 3.14 makes it do.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

std::string repr_of(py::handle value) {
  const auto held = py::reinterpret_borrow<py::object>(value);  // its repr() may empty the list
  return py::repr(held);
}

// A non-negative int that fits 64 bits. Runs no Python code where it succeeds.
u64 to_u64(py::handle value, const char* what) {
  if (!PyLong_Check(value.ptr())) {
    throw py::type_error(message(what, " holds ", repr_of(value), ", which is not an int"));
  }
  // Up to Python 3.12 twice as fast as PyLong_AsUnsignedLongLong.
  static_assert(sizeof(size_t) == sizeof(u64));
  const u64 number = PyLong_AsSize_t(value.ptr());
  if (number == static_cast<u64>(-1) && PyErr_Occurred()) {
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
      PyErr_Clear();
      throw ArgumentError(message(what, " holds ", repr_of(value), ", which is not in [0, 2**64)"));
    }
    throw py::error_already_set();
  }
  return number;
}

// The items at one moment.
py::tuple to_tuple(py::handle sequence) {
  auto items = py::reinterpret_steal<py::tuple>(PySequence_Tuple(sequence.ptr()));
  if (!items) throw py::error_already_set();
  return items;
}

// The same for items that are looked at without running Python code: under the GIL nobody can
// change a list meanwhile.
py::object to_items(py::handle sequence) {
#if !defined(Py_GIL_DISABLED)
  if (PyList_CheckExact(sequence.ptr())) return py::reinterpret_borrow<py::object>(sequence);
#endif
  return to_tuple(sequence);
}

// Whether `sequence` was an array of unsigned 64-bit ints, as array("Q") is; then its items are in
// `values`.
template <class T>
bool copy_array(py::handle sequence, std::vector<T>& values) {
  static_assert(sizeof(T) == sizeof(u64));
  if (!PyObject_CheckBuffer(sequence.ptr())) return false;
  const py::buffer_info array = py::reinterpret_borrow<py::buffer>(sequence).request();
  const bool fits = array.ndim == 1 && array.item_type_is_equivalent_to<u64>() &&
                    array.strides[0] == static_cast<py::ssize_t>(sizeof(u64));
  if (!fits) return false;
  values.resize(static_cast<size_t>(array.size));
  if (!values.empty()) std::memcpy(values.data(), array.ptr, values.size() * sizeof(T));
  return true;
}

// Lists hold thousands of ints: the casters of pybind11 would take several times as long.
template <class T>
std::vector<T> to_vector(py::handle sequence, const char* what) {
  std::vector<T> values;
  if constexpr (sizeof(T) == sizeof(u64)) {
    if (copy_array(sequence, values)) return values;
  }
  const py::object items = to_items(sequence);
  const auto size = PySequence_Fast_GET_SIZE(items.ptr());
  values.resize(static_cast<size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    const u64 number = to_u64(PySequence_Fast_GET_ITEM(items.ptr(), i), what);
    if constexpr (std::is_pointer_v<T>) {
      values[static_cast<size_t>(i)] = reinterpret_cast<T>(number);
    } else {
      values[static_cast<size_t>(i)] = static_cast<T>(number);
    }
  }
  return values;
}

// Segment and Share are pairs of an offset and a size.
template <class T>
std::vector<T> to_pairs(const char* operation, py::handle offsets, py::handle sizes) {
  const auto first = to_vector<u64>(offsets, "offsets");
  const auto second = to_vector<u64>(sizes, "sizes");
  PP_CHECK_ARG(first.size() == second.size(), operation, ": got ", first.size(), " offsets and ",
               second.size(), " sizes");
  std::vector<T> pairs;
  pairs.reserve(first.size());
  for (u64 i = 0; i < first.size(); ++i) pairs.push_back({first[i], second[i]});
  return pairs;
}

// A rank that no communicator has stays one.
u32 to_rank(u64 value) { return value > kMaxRanks ? kMaxRanks : static_cast<u32>(value); }

std::unique_ptr<Communicator> make_communicator(const std::string& backend, py::handle devices,
                                                u64 timeout_ms, u32 nchannels, u32 slots,
                                                u64 slot_bytes, u64 stage_slot_bytes,
                                                const std::string& algorithms) {
  const auto list = to_vector<int>(devices, "devices");
  const WithoutGil release;
  PP_CHECK_ARG(backend == "host" || backend == "cuda", "backend is '", backend,
               "', but must be 'host' or 'cuda'");
  const auto nranks = static_cast<u32>(list.size());
  const CommunicatorOptions options{timeout_ms, nchannels,        slots,
                                    slot_bytes, stage_slot_bytes, algorithms};
  check_communicator(nranks, options);
  return std::make_unique<Communicator>(
      backend == "cuda" ? make_cuda_backend(list) : make_host_backend(nranks), nranks, options);
}

std::unique_ptr<Communicator> make_faulty_communicator(u32 nranks, u32 rank,
                                                       const std::string& fault, u32 launches,
                                                       u32 late_ms, u64 timeout_ms) {
  const CommunicatorOptions options{.timeout_ms = timeout_ms};
  check_communicator(nranks, options);
  const host::FaultPlan plan{host::FaultPlan::parse_kind(fault), rank, launches, late_ms};
  return std::make_unique<Communicator>(std::make_unique<host::FaultyBackend>(plan), nranks,
                                        options);
}

void broadcast(Communicator& self, u64 root, py::handle sources, py::handle offsets,
               py::handle sizes, py::handle destinations, py::handle streams,
               const std::string& algorithm) {
  const auto from = to_vector<const void*>(sources, "sources");
  const auto segments = to_pairs<Segment>("broadcast", offsets, sizes);
  const auto to = to_vector<void*>(destinations, "destinations");
  const auto handles = to_vector<StreamHandle>(streams, "streams");
  const WithoutGil release;
  self.broadcast(to_rank(root), from, segments, to, handles, algorithm);
}

u64 reduce_add(Communicator& self, u64 root, py::handle sources, py::handle offsets,
               py::handle sizes, u64 destination, const std::string& dtype, py::handle streams,
               const std::string& algorithm, bool asynchronous) {
  auto segments = to_pairs<Segment>("reduce_add", offsets, sizes);
  std::vector<const void*> from;
  u32 rank = 0;
  for (const py::handle row : to_tuple(sources)) {
    const auto pointers = to_vector<const void*>(row, "sources");
    PP_CHECK_ARG(pointers.size() == segments.size(), "reduce_add: rank ", rank, " has ",
                 pointers.size(), " sources for ", segments.size(), " segments");
    from.insert(from.end(), pointers.begin(), pointers.end());
    ++rank;
  }
  PP_CHECK_ARG(rank == self.nranks(), "reduce_add: got sources of ", rank, " ranks for ",
               self.nranks(), " ranks");
  auto handles = to_vector<StreamHandle>(streams, "streams");
  const WithoutGil release;
  auto* const to = reinterpret_cast<void*>(destination);
  if (asynchronous) {
    return self.reduce_add_async(to_rank(root), std::move(from), std::move(segments), to,
                                 parse_dtype(dtype), std::move(handles), algorithm);
  }
  self.reduce_add(to_rank(root), from, segments, to, parse_dtype(dtype), handles, algorithm);
  return 0;
}

void all_reduce(Communicator& self, py::handle sources, py::handle destinations, u64 count,
                const std::string& dtype, py::handle streams, const std::string& algorithm) {
  const auto from = to_vector<const void*>(sources, "sources");
  const auto to = to_vector<void*>(destinations, "destinations");
  const auto handles = to_vector<StreamHandle>(streams, "streams");
  const WithoutGil release;
  self.all_reduce(from, to, count, parse_dtype(dtype), handles, algorithm);
}

void scatter(Communicator& self, u64 root, u64 source, u64 rows, u64 pitch, py::handle offsets,
             py::handle sizes, py::handle destinations, py::handle streams) {
  const auto shares = to_pairs<Share>("scatter", offsets, sizes);
  const auto to = to_vector<void*>(destinations, "destinations");
  const auto handles = to_vector<StreamHandle>(streams, "streams");
  const WithoutGil release;
  self.scatter(to_rank(root), reinterpret_cast<const void*>(source), rows, pitch, shares, to,
               handles);
}

void gather(Communicator& self, u64 root, py::handle sources, u64 rows, u64 pitch,
            py::handle offsets, py::handle sizes, u64 destination, py::handle streams) {
  const auto from = to_vector<const void*>(sources, "sources");
  const auto shares = to_pairs<Share>("gather", offsets, sizes);
  const auto handles = to_vector<StreamHandle>(streams, "streams");
  const WithoutGil release;
  self.gather(to_rank(root), from, rows, pitch, shares, reinterpret_cast<void*>(destination),
              handles);
}

// For benchmarks only.
void move_at_limit(bool streaming, py::handle sources, py::handle destinations, u64 nbytes) {
  const auto from = to_vector<const u8*>(sources, "sources");
  const auto to = to_vector<u8*>(destinations, "destinations");
  const WithoutGil release;
  host::move_at_limit(streaming ? host::Stores::kStreaming : host::Stores::kCached, from, to,
                      nbytes);
}

std::unique_ptr<SegmentTable> make_segment_table(Communicator& communicator, u64 root,
                                                 py::handle offsets, py::handle sizes,
                                                 py::handle flats) {
  auto segments = to_pairs<Segment>("segment table", offsets, sizes);
  auto to = to_vector<void*>(flats, "flats");
  const WithoutGil release;
  return std::make_unique<SegmentTable>(communicator, to_rank(root), std::move(segments),
                                        std::move(to));
}

void send(SegmentTable& self, py::handle sources, py::handle streams, bool always) {
  const auto from = to_vector<const void*>(sources, "sources");
  const auto handles = to_vector<StreamHandle>(streams, "streams");
  const WithoutGil release;
  self.send(from, handles, always);
}

bool would_change(SegmentTable& self, py::handle sources, py::handle streams) {
  const auto from = to_vector<const void*>(sources, "sources");
  const auto handles = to_vector<StreamHandle>(streams, "streams");
  const WithoutGil release;
  return self.would_change(from, handles);
}

py::tuple transferred(SegmentTable& self) {
  Transferred bytes;
  {
    const WithoutGil release;
    bytes = self.transferred();
  }
  return py::make_tuple(bytes.sent, bytes.skipped);
}

py::object str_or_none(const std::string& text) {
  return text.empty() ? py::object(py::none()) : py::object(py::str(text));
}

// {"broadcast": {"push": ("rank_order", None), ...}, ...}
py::dict algorithms() {
  py::dict all;
  for (u32 c = 0; c < kCollectives; ++c) {
    const auto collective = static_cast<Collective>(c);
    py::dict names;
    for (const Algorithm& algorithm : algorithms_of(collective)) {
      const py::object limit = algorithm.max_bytes == ~u64{0}
                                   ? py::object(py::none())
                                   : py::object(py::int_(algorithm.max_bytes));
      names[algorithm.name] = py::make_tuple(rounding_name(algorithm.rounding), limit);
    }
    all[collective_name(collective)] = names;
  }
  return all;
}

py::dict build_info() {
  py::list targets;
  std::istringstream names(PP_CUDA_TARGETS);
  for (std::string name; names >> name;) targets.append(name);
  py::dict info;
  info["version"] = PP_VERSION;
  info["cuda"] = static_cast<bool>(PP_WITH_CUDA);
  info["cuda_version"] = str_or_none(PP_CUDA_VERSION);
  info["cuda_targets"] = targets;
  info["compiler"] = PP_COMPILER;
  info["built_with_nvcc"] = static_cast<bool>(PP_WITH_CUDA);
  return info;
}

}  // namespace
}  // namespace pyparallel

PYBIND11_MODULE(_C, m, py::mod_gil_not_used()) {
  using namespace pyparallel;
  using py::literals::operator""_a;
  m.doc() = "The compiled core of pyparallel: collectives on raw pointers.";
  m.attr("ABI") = PP_ABI;
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const ArgumentError& error) {
      py::set_error(PyExc_ValueError, error.what());
    } catch (const Error& error) {
      py::set_error(PyExc_RuntimeError, error.what());
    }
  });
  m.def("build_info", &build_info);
  m.def("algorithms", &algorithms);
  m.def("cuda_device_count", [] { return cuda_device_count(); }, py::call_guard<WithoutGil>());
  m.def("cuda_driver_version", [] { return str_or_none(cuda_driver_version()); });

  m.def(
      "advise_huge_pages",
      [](u64 address, u64 nbytes) {
        host::advise_huge_pages(reinterpret_cast<void*>(address), nbytes);
      },
      "address"_a, "nbytes"_a);
  m.def("move_at_limit", &move_at_limit, "streaming"_a, "sources"_a, "destinations"_a, "nbytes"_a);

  const CommunicatorOptions defaults;
  const auto released = py::call_guard<WithoutGil>();
  // The destructor may wait for devices, so it runs without the GIL.
  py::class_<Communicator>(m, "Communicator", py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&make_communicator), "backend"_a, "devices"_a, py::kw_only(),
           "timeout_ms"_a = defaults.timeout_ms, "nchannels"_a = defaults.nchannels,
           "slots"_a = defaults.slots, "slot_bytes"_a = defaults.slot_bytes,
           "stage_slot_bytes"_a = defaults.stage_slot_bytes, "algorithms"_a = defaults.algorithms)
      .def_property_readonly("nranks", &Communicator::nranks)
      .def_property_readonly("backend", &Communicator::backend_name)
      .def_property_readonly("closed", &Communicator::closed)
      .def("describe_selection", &Communicator::describe_selection)
      .def("broadcast", &broadcast, "root"_a, "sources"_a, "offsets"_a, "sizes"_a, "destinations"_a,
           "streams"_a, "algorithm"_a = "auto")
      .def("reduce_add", &reduce_add, "root"_a, "sources"_a, "offsets"_a, "sizes"_a,
           "destination"_a, "dtype"_a, "streams"_a, "algorithm"_a = "auto",
           "asynchronous"_a = false)
      .def("wait", &Communicator::wait, "ticket"_a, released)
      .def("all_reduce", &all_reduce, "sources"_a, "destinations"_a, "count"_a, "dtype"_a,
           "streams"_a, "algorithm"_a = "auto")
      .def("scatter", &scatter, "root"_a, "source"_a, "rows"_a, "pitch"_a, "offsets"_a, "sizes"_a,
           "destinations"_a, "streams"_a)
      .def("gather", &gather, "root"_a, "sources"_a, "rows"_a, "pitch"_a, "offsets"_a, "sizes"_a,
           "destination"_a, "streams"_a)
      .def("synchronize", &Communicator::synchronize, released)
      .def("close", &Communicator::close, released);
  m.def("faulty_communicator", &make_faulty_communicator, "nranks"_a, "rank"_a, "fault"_a,
        py::kw_only(), "launches"_a = 1, "late_ms"_a = 0, "timeout_ms"_a = defaults.timeout_ms);

  bind_identity_walk(m);
  bind_tensor_layouts(m);

  // Its destructor may wait for devices too.
  py::class_<SegmentTable>(m, "SegmentTable", py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&make_segment_table), "communicator"_a, "root"_a, "offsets"_a, "sizes"_a,
           "flats"_a, py::keep_alive<1, 2>())
      .def("send", &send, "sources"_a, "streams"_a, "always"_a = false)
      .def("would_change", &would_change, "sources"_a, "streams"_a)
      .def(
          "refresh", [](SegmentTable& self, u64 rank) { self.refresh(to_rank(rank)); }, "rank"_a,
          released)
      .def("transferred", &transferred);

  // The interpreter frees memory that queued operations may be using.
  py::module_::import("atexit").attr("register")(
      py::cpp_function([] { host::CommunicationThread::instance().finish_all(); }, released));
}
