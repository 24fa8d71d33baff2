// `python -m torch_backplane run --as-cuda`: torch.device and the other C types of PyTorch accept "cuda" for bp, and bp
// devices are named "cuda". In C++ because these are static types, which Python code cannot change.
//
// PyTorch's and Backplane's own Python code decides by the device's name, so it must see the real name. Therefore the
// name depends on the module that reads it.
#include "bindings.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Event.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Stream.h>

#include <pybind11/pybind11.h>

#include <map>
#include <string>
#include <string_view>

namespace py = pybind11;

namespace backplane {
namespace {

bool is_in_package(std::string_view module, std::string_view package) {
  return module.substr(0, package.size()) == package &&
      (module.size() == package.size() || module[package.size()] == '.');
}

// Whether the Python code that runs belongs to PyTorch or Backplane. Also true in a thread without Python code.
bool called_by_pytorch() {
  PyObject* globals = PyEval_GetGlobals();
  if (globals == nullptr) {
    return true;
  }
  static PyObject* const key = PyUnicode_InternFromString("__name__");
  PyObject* name = PyDict_GetItem(globals, key); // borrowed
  if (name == nullptr || !PyUnicode_Check(name)) {
    return false;
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name, &size);
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  const std::string_view module(text, size);
  return is_in_package(module, "torch") || is_in_package(module, "torch_backplane");
}

// --- names of devices

const at::Device& wrapped_device(PyObject* self) {
  return reinterpret_cast<THPDevice*>(self)->device;
}

bool is_named_cuda(PyObject* self) {
  return wrapped_device(self).is_privateuseone() && !called_by_pytorch();
}

getter real_type = nullptr;
reprfunc real_repr = nullptr;
reprfunc real_str = nullptr;

PyObject* type_of_device(PyObject* self, void* closure) {
  return is_named_cuda(self) ? PyUnicode_InternFromString("cuda") : real_type(self, closure);
}

PyObject* repr_of_device(PyObject* self) {
  if (!is_named_cuda(self)) {
    return real_repr(self);
  }
  const at::Device& device = wrapped_device(self);
  return device.has_index() ? PyUnicode_FromFormat("device(type='cuda', index=%d)", int(device.index()))
                            : PyUnicode_FromString("device(type='cuda')");
}

PyObject* str_of_device(PyObject* self) {
  if (!is_named_cuda(self)) {
    return real_str(self);
  }
  const at::Device& device = wrapped_device(self);
  return device.has_index() ? PyUnicode_FromFormat("cuda:%d", int(device.index())) : PyUnicode_FromString("cuda");
}

void name_devices() {
  static PyGetSetDef type = {"type", type_of_device, nullptr, nullptr, nullptr};
  for (const PyGetSetDef* one = THPDeviceType.tp_getset; one->name != nullptr; ++one) {
    if (std::string_view(one->name) == type.name) {
      real_type = one->get;
      type.doc = one->doc;
    }
  }
  TORCH_INTERNAL_ASSERT(real_type != nullptr, "torch.device has no attribute `type`");
  const auto descriptor = py::reinterpret_steal<py::object>(PyDescr_NewGetSet(&THPDeviceType, &type));
  py::reinterpret_borrow<py::dict>(THPDeviceType.tp_dict)["type"] = descriptor;
  real_repr = std::exchange(THPDeviceType.tp_repr, repr_of_device);
  real_str = std::exchange(THPDeviceType.tp_str, str_of_device);
  PyType_Modified(&THPDeviceType);
}

// --- constructors

std::map<PyTypeObject*, newfunc>& real_constructors() {
  static std::map<PyTypeObject*, newfunc> constructors;
  return constructors;
}

// "bp:1" for "cuda:1"; other objects are returned as they are.
py::object translated(py::handle value) {
  if (PyUnicode_Check(value.ptr())) {
    const auto text = value.cast<std::string>();
    if (text == "cuda" || text.rfind("cuda:", 0) == 0) {
      return py::str("bp" + text.substr(4));
    }
  }
  return py::reinterpret_borrow<py::object>(value);
}

PyObject* construct(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyTypeObject* base = type;
  while (real_constructors().count(base) == 0) {
    base = base->tp_base;
  }
  try {
    py::tuple given(PyTuple_GET_SIZE(args));
    for (size_t i = 0; i < given.size(); ++i) {
      given[i] = translated(PyTuple_GET_ITEM(args, i));
    }
    py::dict named;
    if (kwargs != nullptr) {
      for (const auto& [name, value] : py::reinterpret_borrow<py::dict>(kwargs)) {
        named[name] = translated(value);
      }
    }
    return real_constructors().at(base)(type, given.ptr(), named.ptr());
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

void accept_cuda(PyTypeObject* type) {
  real_constructors().emplace(type, std::exchange(type->tp_new, construct));
}

void name_bp_cuda() {
  if (real_type != nullptr) {
    return;
  }
  name_devices();
  accept_cuda(&THPDeviceType);
  accept_cuda(reinterpret_cast<PyTypeObject*>(THPGeneratorClass));
  accept_cuda(THPStreamClass);
  accept_cuda(THPEventClass);
}

} // namespace

void bind_cuda_names(py::module_& module) {
  module.def(
      "name_bp_cuda", name_bp_cuda,
      "Lets torch.device, Generator, Stream and Event accept \"cuda\" for bp, for the rest of this process. "
      "bp devices tell code outside of PyTorch and Backplane that they are cuda devices.");
}

} // namespace backplane
