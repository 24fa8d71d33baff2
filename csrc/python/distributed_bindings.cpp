// Python bindings for the c10d backend.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "distributed/backend.h"
#include "distributed/library_backend.h"

namespace py = pybind11;

namespace backplane {

void bind_distributed(py::module_& module) {
  // c10d's classes must be known before a function that takes one is defined.
  py::module_::import("torch._C._distributed_c10d");
  module.def(
      "make_distributed_backend",
      [](c10::intrusive_ptr<c10d::Backend> engine, std::optional<std::pair<double, double>> link) {
        auto modelled = link.has_value() ? std::make_unique<Link>(link->first, link->second) : nullptr;
        return c10::static_intrusive_pointer_cast<c10d::Backend>(
            c10::make_intrusive<DistributedBackend>(std::move(engine), std::move(modelled)));
      },
      py::arg("engine"), py::arg("link"),
      "Return a c10d backend for bp tensors that runs collectives on `engine`, a backend for CPU tensors. `link`: the "
      "delay in seconds and the bytes per second (0: unlimited) of a modelled link, or None.");
  module.def(
      "make_library_backend",
      [](c10::intrusive_ptr<c10d::Backend> staged, c10::intrusive_ptr<c10d::Store> store,
         LibraryBackend::Libraries libraries, std::chrono::milliseconds timeout) {
        return c10::static_intrusive_pointer_cast<c10d::Backend>(
            c10::make_intrusive<LibraryBackend>(std::move(staged), std::move(store), std::move(libraries), timeout));
      },
      py::arg("staged"), py::arg("store"), py::arg("libraries"), py::arg("timeout"),
      "Return a c10d backend for bp tensors that runs collectives on `libraries`, by device index; on `staged`, a "
      "backend of make_distributed_backend, if the devices of two ranks are the same hardware.");
}

} // namespace backplane
