// Ctrl-C where nobody could catch it, and where everything else is caught.
#pragma once

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <exception>

namespace backplane {

// Whether `error` is what a call can be refused with: PyTorch's errors, and Python's `Exception`s. Ctrl-C, an exit and an
// error of C++ itself are not.
inline bool is_refusal(std::exception& error) {
  if (const auto* raised = dynamic_cast<const pybind11::error_already_set*>(&error)) {
    const pybind11::gil_scoped_acquire gil;
    return raised->matches(PyExc_Exception);
  }
  if (auto* raised = dynamic_cast<python_error*>(&error)) {
    const pybind11::gil_scoped_acquire gil;
    raised->persist(); // it is not the thread's any more
    return raised->type == nullptr || PyErr_GivenExceptionMatches(raised->type, PyExc_Exception) != 0;
  }
  return dynamic_cast<const c10::Error*>(&error) != nullptr;
}

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
