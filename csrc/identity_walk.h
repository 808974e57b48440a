// Finds out whether Python objects are still what they were, by identity and at the cost of a few
// nanoseconds an entry. Python's own comparison would take longer, and would take an equal object
// for the same one.
//
// Snapshots hold references to all they compare with, since the address of a freed object may be
// used again. The garbage collector sees these references. The GIL protects everything here.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace pyparallel {

// References that count, and that the garbage collector sees through visit().
class References {
 public:
  References() = default;
  ~References() { clear(); }
  References(References&& other) noexcept { items_.swap(other.items_); }
  References& operator=(References&& other) noexcept {
    items_.swap(other.items_);
    return *this;
  }

  void add(PyObject* item) { items_.push_back(Py_NewRef(item)); }
  size_t size() const { return items_.size(); }
  PyObject* operator[](size_t i) const { return items_[i]; }
  PyObject* const* data() const { return items_.data(); }
  int visit(visitproc visit, void* arg) const;
  void clear();

 private:
  std::vector<PyObject*> items_;
};

// Makes instances of T visible to the garbage collector.
template <class T>
pybind11::custom_type_setup visible_to_gc() {
  return pybind11::custom_type_setup([](PyHeapTypeObject* heap_type) {
    auto* type = &heap_type->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      if (!pybind11::detail::is_holder_constructed(self)) return 0;
      return pybind11::cast<T&>(pybind11::handle(self)).visit(visit, arg);
    };
    type->tp_clear = [](PyObject* self) {
      if (pybind11::detail::is_holder_constructed(self))
        pybind11::cast<T&>(pybind11::handle(self)).clear();
      return 0;
    };
  });
}

// What modules, lists and dicts contained when they were last looked at.
//
// A module is its type, its attributes, and the entries of the dicts _parameters, _buffers and
// _modules among them. Lists and dicts are their items. The items themselves are opaque.
class IdentitySnapshot {
 public:
  explicit IdentitySnapshot(const pybind11::list& objects);

  // The first object from `start` on that differs from what was seen, or -1.
  Py_ssize_t check(Py_ssize_t start) const;

  // Looks at one object again.
  void update(Py_ssize_t index);

  int visit(visitproc visit, void* arg) const;
  void clear();

 private:
  struct Container {
    PyObject* object;  // the dict or list; null for a module's __dict__
    size_t end;        // where its items end in Record::items
  };
  struct Record {
    References items;  // the object, its type, the items of its containers
    std::vector<Container> containers;
    // Of each container when its items were last found to be these; empty without version tags.
    mutable std::vector<uint64_t> versions;
  };

  static Record look(PyObject* object);
  static bool unchanged(const Record& record);
  static bool same_versions(const Record& record);
  static bool same_contents(const Record& record);

  std::vector<Record> records_;
};

// The values that attributes, and methods that need no arguments, had on some objects.
//
// Each is given as the descriptor of the C type that defines it, which is called directly: that
// takes about half the time of an attribute access.
class AttributeSnapshot {
 public:
  AttributeSnapshot(const pybind11::list& objects, const pybind11::list& descriptors);

  // The first object with a value that does not equal the one seen, or -1.
  Py_ssize_t check() const;

  int visit(visitproc visit, void* arg) const;
  void clear();

 private:
  References objects_;
  References descriptors_;
  References values_;  // [object][descriptor]
};

// The sum of the reference counts of the items of a list.
Py_ssize_t reference_count(const pybind11::list& objects);

void bind_identity_walk(pybind11::module_& m);

}  // namespace pyparallel
