// Python bindings for graphs: the base of torch.bp.Graph (torch_backplane/accelerator/graphs.py).
#include "bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "graphs/accelerator_graph.h"
#include "graphs/graph.h"
#include "streams/stream.h"

namespace py = pybind11;

namespace backplane {
namespace {

CaptureMode mode_named(const std::string& name) {
  TORCH_CHECK_VALUE(
      name == "global" || name == "thread_local" || name == "relaxed",
      "capture_error_mode must be 'global', 'thread_local' or 'relaxed', but got '", name, "'");
  return name == "global" ? CaptureMode::Global : name == "relaxed" ? CaptureMode::Relaxed : CaptureMode::ThreadLocal;
}

} // namespace

void bind_graphs(py::module_& module) {
  register_accelerator_graph();
  const py::call_guard<py::gil_scoped_release> released;
  py::class_<Graph>(module, "Graph")
      .def(py::init<bool>(), py::arg("keep_graph") = false)
      .def(
          "capture_begin",
          [](Graph& graph, std::optional<c10::MempoolId_t> pool, const std::string& mode) {
            graph.capture_begin(pool.value_or(c10::MempoolId_t{0, 0}), mode_named(mode));
          },
          py::arg("pool") = py::none(), py::arg("capture_error_mode") = "global", released)
      // These three can warn: the wrapper makes that a warning of Python.
      .def("capture_end", torch::wrap_pybind_function_no_gil(&Graph::capture_end))
      .def("instantiate", torch::wrap_pybind_function_no_gil(&Graph::instantiate))
      .def("replay", torch::wrap_pybind_function_no_gil(&Graph::replay))
      .def("reset", &Graph::reset, released)
      .def("pool", &Graph::pool)
      .def("enable_debug_mode", &Graph::enable_debug_mode)
      .def("debug_dump", &Graph::debug_dump, py::arg("debug_path"), released)
      .def("__len__", &Graph::size);
  module.def("capture_of", [](c10::DeviceIndex index) -> uint64_t {
    const auto capture = Capture::of(current_stream(index));
    return capture != nullptr ? capture->number() : 0;
  });
}

} // namespace backplane
