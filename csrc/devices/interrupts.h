// Handling of Ctrl-C (KeyboardInterrupt) in destructors, and in code that catches all other errors.
#pragma once

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <exception>

namespace backplane {

// Whether `error` can mean that a call is rejected: an error of PyTorch, or a Python `Exception`. KeyboardInterrupt,
// SystemExit and errors of C++ itself are not.
inline bool is_refusal(std::exception& error) {
  if (const auto* raised = dynamic_cast<const pybind11::error_already_set*>(&error)) {
    const pybind11::gil_scoped_acquire gil;
    return raised->matches(PyExc_Exception);
  }
  if (auto* raised = dynamic_cast<python_error*>(&error)) {
    const pybind11::gil_scoped_acquire gil;
    raised->persist(); // takes the error out of the thread state
    return raised->type == nullptr || PyErr_GivenExceptionMatches(raised->type, PyExc_Exception) != 0;
  }
  return dynamic_cast<const c10::Error*>(&error) != nullptr;
}

// For destructors that call Python code, which Ctrl-C can interrupt. If `error` is a KeyboardInterrupt, interrupts the
// next Python code instead and returns true.
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
