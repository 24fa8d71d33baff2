// Ctrl-C where nobody could catch it.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace backplane {

// Python code that a destructor called may be what Ctrl-C interrupts. Where `error` is that, the next Python code is
// interrupted instead, and this is true.
inline bool postpone_interrupt(const std::exception& error) {
  const auto* raised = dynamic_cast<const pybind11::error_already_set*>(&error);
  if (raised == nullptr || !Py_IsInitialized()) {
    return false;
  }
  const pybind11::gil_scoped_acquire gil;
  if (!raised->matches(PyExc_KeyboardInterrupt)) {
    return false;
  }
  PyErr_SetInterrupt();
  return true;
}

} // namespace backplane
