// How drivers add devices to the socket's table.
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "device.h"
#include "discovery.h"
#include "discrete_device.h"
#include "host_device.h"
#include "python_device.h"

namespace py = pybind11;

namespace backplane {
namespace {

void add(std::unique_ptr<Device> device, bool discrete) {
  const bool hide = discrete && device->properties().host_accessible;
  add_device(hide ? make_discrete(std::move(device)) : std::move(device));
}

} // namespace

void bind_drivers(py::module_& module) {
  module.def(
      "set_discovery_functions",
      [](const py::function& discover, const py::function& initialize) {
        set_discovery_functions(discover.ptr(), initialize.ptr());
      },
      py::arg("discover"), py::arg("initialize"));
  module.def("finish_discovery", &finish_discovery);
  module.def("is_discovered", &is_discovered);
  module.def("finish_initialization", &finish_initialization);
  module.def("is_initialized", &is_initialized);
  module.def(
      "add_host_device",
      [](DeviceProperties properties, bool discrete) {
        const size_t limit = properties.total_memory;
        add(make_host_device(std::move(properties), limit), discrete);
      },
      py::arg("properties"), py::arg("discrete") = false,
      "Add a device in host memory; total_memory is its limit. `discrete`: with addresses that the CPU cannot touch.");
  module.def(
      "add_python_device",
      [](py::object device, DeviceProperties properties, bool discrete) {
        add(make_python_device(std::move(properties), std::move(device)), discrete);
      },
      py::arg("device"), py::arg("properties"), py::arg("discrete") = false,
      "Add a torch_backplane.drivers.base.Device.");
}

} // namespace backplane
