// Keeps Dynamo away from the runtime's own Python code.
//
// After a graph break, Dynamo compiles the Python frames that the program enters next. On bp these include planners and
// drivers, which run below PyTorch's dispatcher.
#pragma once

#include <Python.h>

namespace backplane {

// Dynamo compiles no frame of this thread during the object's lifetime. The caller holds the GIL.
class WithoutDynamo {
 public:
  WithoutDynamo() : previous_(set_callback(Py_None)) {}
  ~WithoutDynamo() {
    if (previous_ != nullptr) {
      PyObject *kind = nullptr, *value = nullptr, *trace = nullptr;
      PyErr_Fetch(&kind, &value, &trace); // a call with an error set would fail
      Py_XDECREF(set_callback(previous_));
      Py_DECREF(previous_);
      PyErr_Restore(kind, value, trace);
    }
  }
  WithoutDynamo(const WithoutDynamo&) = delete;
  WithoutDynamo& operator=(const WithoutDynamo&) = delete;

 private:
  // Returns the previous callback; nullptr if this PyTorch has no Dynamo.
  static PyObject* set_callback(PyObject* callback) {
    static PyObject* function = nullptr; // guarded by the GIL
    static bool missing = false;
    if (function == nullptr && !missing) {
      PyObject* module = PyImport_ImportModule("torch._C._dynamo.eval_frame");
      function = module != nullptr ? PyObject_GetAttrString(module, "set_eval_frame") : nullptr;
      Py_XDECREF(module);
      missing = function == nullptr;
    }
    PyObject* previous = missing ? nullptr : PyObject_CallOneArg(function, callback);
    if (previous == nullptr) {
      PyErr_Clear();
    }
    return previous;
  }

  PyObject* previous_;
};

} // namespace backplane
