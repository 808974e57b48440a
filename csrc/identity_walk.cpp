#include "identity_walk.h"

#include <memory>
#include <string>

#include "check.h"

namespace py = pybind11;

namespace pyparallel {
namespace {

void throw_if_null(const void* result) {
  if (result == nullptr) throw py::error_already_set();
}

bool is_entries_name(PyObject* key) {
  return PyUnicode_Check(key) && (PyUnicode_CompareWithASCIIString(key, "_parameters") == 0 ||
                                  PyUnicode_CompareWithASCIIString(key, "_buffers") == 0 ||
                                  PyUnicode_CompareWithASCIIString(key, "_modules") == 0);
}

bool is_container(PyObject* object) { return PyDict_Check(object) || PyList_CheckExact(object); }

void append_items(References& items, PyObject* container) {
  if (PyList_CheckExact(container)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(container); ++i) {
      items.add(PyList_GET_ITEM(container, i));
    }
    return;
  }
  Py_ssize_t position = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(container, &position, &key, &value)) {
    items.add(key);
    items.add(value);
  }
}

bool same_items(PyObject* const* begin, PyObject* const* end, PyObject* container) {
  if (PyList_CheckExact(container)) {
    if (PyList_GET_SIZE(container) != end - begin) return false;
    for (Py_ssize_t i = 0; begin != end; ++begin, ++i) {
      if (PyList_GET_ITEM(container, i) != *begin) return false;
    }
    return true;
  }
  if (2 * PyDict_Size(container) != end - begin) return false;
  Py_ssize_t position = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(container, &position, &key, &value)) {
    if (begin == end || begin[0] != key || begin[1] != value) return false;
    begin += 2;
  }
  return begin == end;
}

// PEP 509: every change of any dict gives it a number that no dict has had before. So equal numbers
// mean equal items, and unequal ones nothing: writing what was there already is a change, too.
// Python 3.12 deprecates the numbers, and there all items are compared.
#if PY_VERSION_HEX < 0x030C0000
constexpr bool kDictsHaveVersions = true;
uint64_t version_of(PyObject* dict) {
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
}
#else
constexpr bool kDictsHaveVersions = false;
uint64_t version_of(PyObject*) { return 0; }
#endif

py::object attributes_of(PyObject* object) {
  auto dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
  throw_if_null(dict.ptr());
  return dict;
}

// Calls a getter or a method, which needs no arguments. Returns a new reference.
PyObject* read(PyObject* descriptor, PyObject* object) {
  if (Py_IS_TYPE(descriptor, &PyGetSetDescr_Type)) {
    const PyGetSetDef* getset = reinterpret_cast<PyGetSetDescrObject*>(descriptor)->d_getset;
    return getset->get(object, getset->closure);
  }
  const PyMethodDef* method = reinterpret_cast<PyMethodDescrObject*>(descriptor)->d_method;
  if (method->ml_flags == METH_NOARGS) return method->ml_meth(object, nullptr);
  return PyObject_CallOneArg(descriptor, object);
}

bool is_readable(PyObject* descriptor) {
  if (Py_IS_TYPE(descriptor, &PyGetSetDescr_Type)) {
    return reinterpret_cast<PyGetSetDescrObject*>(descriptor)->d_getset->get != nullptr;
  }
  return Py_IS_TYPE(descriptor, &PyMethodDescr_Type);
}

bool equal(PyObject* a, PyObject* b) {
  if (a == b) return true;
  const int result = PyObject_RichCompareBool(a, b, Py_EQ);
  if (result < 0) throw py::error_already_set();
  return result == 1;
}

}  // namespace

int References::visit(visitproc visit, void* arg) const {
  for (PyObject* item : items_) Py_VISIT(item);
  return 0;
}

// The vector is empty before any destructor runs, because those may call back.
void References::clear() {
  std::vector<PyObject*> released;
  released.swap(items_);
  for (PyObject* item : released) Py_DECREF(item);
}

IdentitySnapshot::IdentitySnapshot(const py::list& objects) {
  for (py::handle object : objects) records_.push_back(look(object.ptr()));
}

Py_ssize_t IdentitySnapshot::check(Py_ssize_t start) const {
  for (Py_ssize_t i = start; i < static_cast<Py_ssize_t>(records_.size()); ++i) {
    if (!unchanged(records_[i])) return i;
  }
  return -1;
}

void IdentitySnapshot::update(Py_ssize_t index) {
  if (index < 0 || index >= static_cast<Py_ssize_t>(records_.size())) {
    throw py::index_error(message("got index ", index, " for ", records_.size(), " objects"));
  }
  Record seen = look(records_[index].items[0]);
  std::swap(records_[index], seen);
}

IdentitySnapshot::Record IdentitySnapshot::look(PyObject* object) {
  Record record;
  record.items.add(object);
  record.items.add(reinterpret_cast<PyObject*>(Py_TYPE(object)));
  if (is_container(object)) {
    append_items(record.items, object);
    record.containers.push_back({object, record.items.size()});
    return record;
  }
  const py::object dict = attributes_of(object);
  append_items(record.items, dict.ptr());
  const size_t attributes_end = record.items.size();
  record.containers.push_back({nullptr, attributes_end});
  for (size_t i = 2; i < attributes_end; i += 2) {
    PyObject* value = record.items[i + 1];
    if (PyDict_Check(value) && is_entries_name(record.items[i])) {
      append_items(record.items, value);
      record.containers.push_back({value, record.items.size()});
    }
  }
  return record;
}

bool IdentitySnapshot::unchanged(const Record& record) {
  PyObject* const* const items = record.items.data();
  if (reinterpret_cast<PyObject*>(Py_TYPE(items[0])) != items[1]) return false;
  return same_versions(record) || same_contents(record);
}

// Whether nothing was written to the containers since same_contents() was last true.
bool IdentitySnapshot::same_versions(const Record& record) {
  if (record.versions.empty()) return false;
  for (size_t c = 0; c < record.containers.size(); ++c) {
    PyObject* const container = record.containers[c].object;
    const uint64_t version = container != nullptr
                                 ? version_of(container)
                                 : version_of(attributes_of(record.items[0]).ptr());
    if (version != record.versions[c]) return false;
  }
  return true;
}

bool IdentitySnapshot::same_contents(const Record& record) {
  record.versions.clear();
  PyObject* const* const items = record.items.data();
  PyObject* const* item = items + 2;
  bool dicts_only = kDictsHaveVersions;
  for (const Container& container : record.containers) {
    PyObject* const* const end = items + container.end;
    // A module's own dict is asked for each time, because it may have been replaced. The others are
    // among the items just compared, so they are still the same dicts.
    const py::object dict = container.object != nullptr
                                ? py::reinterpret_borrow<py::object>(container.object)
                                : attributes_of(items[0]);
    if (!same_items(item, end, dict.ptr())) {
      record.versions.clear();
      return false;
    }
    dicts_only = dicts_only && PyDict_Check(dict.ptr());
    if (dicts_only) record.versions.push_back(version_of(dict.ptr()));
    item = end;
  }
  if (!dicts_only) record.versions.clear();
  return true;
}

int IdentitySnapshot::visit(visitproc visit, void* arg) const {
  for (const Record& record : records_) {
    if (const int stop = record.items.visit(visit, arg)) return stop;
  }
  return 0;
}

void IdentitySnapshot::clear() {
  std::vector<Record> released;
  released.swap(records_);
}

AttributeSnapshot::AttributeSnapshot(const py::list& objects, const py::list& descriptors) {
  for (py::handle descriptor : descriptors) {
    if (!is_readable(descriptor.ptr())) {
      throw py::type_error(
          message(std::string(py::repr(descriptor)), " is no attribute or method of a C type"));
    }
    descriptors_.add(descriptor.ptr());
  }
  for (py::handle object : objects) {
    for (size_t d = 0; d < descriptors_.size(); ++d) {
      auto* type = PyDescr_TYPE(descriptors_[d]);
      if (!PyObject_TypeCheck(object.ptr(), type)) {
        throw py::type_error(
            message("expected a ", type->tp_name, ", but got a ", Py_TYPE(object.ptr())->tp_name));
      }
      const auto value = py::reinterpret_steal<py::object>(read(descriptors_[d], object.ptr()));
      throw_if_null(value.ptr());
      values_.add(value.ptr());
    }
    objects_.add(object.ptr());
  }
}

Py_ssize_t AttributeSnapshot::check() const {
  const size_t ndescriptors = descriptors_.size();
  for (size_t i = 0; i < objects_.size(); ++i) {
    for (size_t d = 0; d < ndescriptors; ++d) {
      const auto value = py::reinterpret_steal<py::object>(read(descriptors_[d], objects_[i]));
      throw_if_null(value.ptr());
      if (!equal(value.ptr(), values_[i * ndescriptors + d])) return static_cast<Py_ssize_t>(i);
    }
  }
  return -1;
}

int AttributeSnapshot::visit(visitproc visit, void* arg) const {
  for (const References* references : {&objects_, &descriptors_, &values_}) {
    if (const int stop = references->visit(visit, arg)) return stop;
  }
  return 0;
}

void AttributeSnapshot::clear() {
  objects_.clear();
  descriptors_.clear();
  values_.clear();
}

Py_ssize_t reference_count(const py::list& objects) {
  Py_ssize_t sum = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects.ptr()); ++i) {
    sum += Py_REFCNT(PyList_GET_ITEM(objects.ptr(), i));
  }
  return sum;
}

void bind_identity_walk(py::module_& m) {
  using py::literals::operator""_a;
  py::class_<IdentitySnapshot>(m, "IdentitySnapshot", visible_to_gc<IdentitySnapshot>())
      .def(py::init<const py::list&>(), "objects"_a)
      .def("check", &IdentitySnapshot::check, "start"_a = 0)
      .def("update", &IdentitySnapshot::update, "index"_a);
  py::class_<AttributeSnapshot>(m, "AttributeSnapshot", visible_to_gc<AttributeSnapshot>())
      .def(py::init<const py::list&, const py::list&>(), "objects"_a, "descriptors"_a)
      .def("check", &AttributeSnapshot::check);
  m.def("reference_count", &reference_count, "objects"_a);
}

}  // namespace pyparallel
