// Functions of C libraries that are passed from Python.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>

#include "devices/library_symbol.h"

namespace backplane {

// `owner` stays alive as long as a copy of the symbol exists, and is leaked if that outlives the interpreter.
inline LibrarySymbol library_symbol(std::string name, uintptr_t address, pybind11::object owner) {
  const auto release = [](void* object) {
    if (Py_IsInitialized()) {
      const pybind11::gil_scoped_acquire gil;
      const pybind11::error_scope kept;
      Py_DECREF(static_cast<PyObject*>(object));
    }
  };
  return {std::move(name), address, std::shared_ptr<void>(owner.release().ptr(), release)};
}

} // namespace backplane
