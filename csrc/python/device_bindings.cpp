// Python bindings for devices, streams, generators and the fallback.
#include <ATen/dlpack.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>

#include <string_view>

#include "aten/attention.h"
#include "aten/kernel_capabilities.h"
#include "bindings.h"
#include "c10/generator.h"
#include "devices/device.h"
#include "devices/discovery.h"
#include "fallback/fallback.h"
#include "memory/pinned.h"
#include "streams/stream.h"
#include "streams/sync_debug.h"

namespace py = pybind11;

namespace backplane {
namespace {

// Converts a device index from Python. An index that does not fit into c10's 8 bits is out of range, too.
c10::DeviceIndex as_index(int64_t index) {
  TORCH_CHECK(
      index == static_cast<c10::DeviceIndex>(index), "bp error: invalid device ordinal: bp:", index,
      " is out of range");
  return static_cast<c10::DeviceIndex>(index);
}

c10::Stream as_stream(int64_t index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, as_index(index)), id);
}

py::list dtypes_of(const DeviceProperties& properties) {
  py::list dtypes;
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<c10::ScalarType>(i);
    if (properties.supports(type) && type != c10::ScalarType::Undefined) {
      dtypes.append(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(type))));
    }
  }
  return dtypes;
}

uint64_t dtype_bits(const py::iterable& dtypes) {
  uint64_t bits = 0;
  for (const auto& dtype : dtypes) {
    TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "dtypes must hold torch.dtype objects");
    bits |= uint64_t{1} << static_cast<int>(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  }
  return bits;
}

void bind_devices(py::module_& module) {
  py::class_<DeviceProperties>(module, "DeviceProperties", "The properties of a device.")
      .def(
          py::init([](std::string driver, std::string name, uint64_t total_memory, const std::string& address_space,
                      int compute_units, std::pair<int, int> capability, const py::iterable& dtypes,
                      std::string dialect, std::string kind, uint64_t local_memory, uint64_t largest_allocation) {
            DeviceProperties properties;
            properties.driver = std::move(driver);
            properties.name = std::move(name);
            properties.total_memory = total_memory;
            properties.addresses = address_space == "host" ? Addresses::Host
                : address_space == "device"                ? Addresses::Device
                                                           : Addresses::Synthetic;
            properties.compute_units = compute_units;
            std::tie(properties.major, properties.minor) = capability;
            properties.dtypes = dtype_bits(dtypes);
            properties.dialect = std::move(dialect);
            properties.kind = std::move(kind);
            properties.local_memory = local_memory;
            properties.largest_allocation = largest_allocation;
            return properties;
          }),
          py::kw_only(), py::arg("driver"), py::arg("name"), py::arg("total_memory"), py::arg("address_space"),
          py::arg("compute_units"), py::arg("capability"), py::arg("dtypes"), py::arg("dialect") = "",
          py::arg("kind") = "accelerator", py::arg("local_memory") = 0,
          py::arg("largest_allocation") = DeviceProperties().largest_allocation)
      .def_readonly("driver", &DeviceProperties::driver)
      .def_readonly("name", &DeviceProperties::name)
      .def_readonly("total_memory", &DeviceProperties::total_memory)
      .def_property_readonly("host_accessible", &DeviceProperties::host_accessible)
      .def_property_readonly(
          "address_space",
          [](const DeviceProperties& self) {
            static constexpr const char* kNames[] = {"synthetic", "host", "device"};
            return kNames[static_cast<int>(self.addresses)];
          })
      .def_readonly("compute_units", &DeviceProperties::compute_units)
      .def_readonly("multi_processor_count", &DeviceProperties::compute_units)
      .def_readonly("major", &DeviceProperties::major)
      .def_readonly("minor", &DeviceProperties::minor)
      .def_property_readonly("dtypes", &dtypes_of)
      .def_readonly("dialect", &DeviceProperties::dialect)
      .def_readonly("kind", &DeviceProperties::kind)
      .def("__repr__", [](const DeviceProperties& properties) {
        return c10::str(
            "_BpDeviceProperties(name='", properties.name, "', driver='", properties.driver,
            "', major=", properties.major, ", minor=", properties.minor,
            ", total_memory=", properties.total_memory >> 20, "MB, compute_units=", properties.compute_units,
            ", host_accessible=", properties.host_accessible() ? "True" : "False", ")");
      });

  module.def("in_bad_fork", &in_bad_fork);
  module.def("device_count", &device_count);
  module.def("device_properties", [](int64_t index) { return device(as_index(index)).properties(); }, py::arg("index"));
  module.def(
      "set_kernel_capabilities",
      [](int64_t index, bool attends_in_one_pass, bool runs_threads) {
        set_kernel_capabilities(as_index(index), {attends_in_one_pass, runs_threads});
      },
      py::arg("index"), py::kw_only(), py::arg("attends_in_one_pass"), py::arg("runs_threads"),
      "Set what the runtime must know about a device's kernels before planners run (csrc/aten/kernel_capabilities.h).");
  module.def(
      "why_attention_is_composed", &why_attention_is_composed, py::arg("query"), py::arg("key"), py::arg("value"),
      py::arg("mask"), py::arg("dropout_p"), py::arg("enable_gqa"));
  module.def("checked_index", [](int64_t index) { return checked_index(as_index(index)); }, py::arg("index"));
  module.def("current_device", [] {
    ensure_initialized();
    return current_device();
  });
  module.def("set_device", [](int64_t index) { set_current_device(as_index(index)); }, py::arg("index"));
  module.def(
      "exchange_device",
      [](int64_t index) { return index < 0 ? c10::DeviceIndex(-1) : exchange_current_device(as_index(index)); },
      py::arg("index"),
      "Set the current device and return the previous one. A negative index changes nothing and returns -1.");
  module.def("can_access_peer", [](int64_t index, int64_t peer) {
    Device& owner = device(as_index(index));
    Device& other = device(as_index(peer));
    DeviceCall call(owner.needs_gil() || other.needs_gil());
    return owner.can_access_peer(other);
  });
}

void bind_streams(py::module_& module) {
  const auto triple = [](c10::Stream stream) {
    return std::make_tuple(stream.id(), stream.device_index(), static_cast<int64_t>(stream.device_type()));
  };
  module.def(
      "current_stream", [triple](int64_t index) { return triple(current_stream(as_index(index))); }, py::arg("index"),
      "Return (stream_id, device_index, device_type), as torch.Stream takes them.");
  module.def("default_stream", [triple](int64_t index) { return triple(default_stream(as_index(index))); });
  module.def("pool_stream", [triple](int64_t index, int64_t priority) {
    return triple(pool_stream(as_index(index), priority < kLeastPriority ? kGreatestPriority : kLeastPriority));
  });
  module.def("external_stream", [triple](int64_t index, const py::int_& number) {
    void* const handle = PyLong_AsVoidPtr(number.ptr()); // nullptr for numbers that are not addresses
    PyErr_Clear();
    const auto found = handle == nullptr ? std::nullopt : external_stream(as_index(index), handle);
    TORCH_CHECK(
        found.has_value(), "an external stream must be made from the bp_stream of a stream of bp:", index, ", but got ",
        std::string(py::str(py::handle(number))), "; native handles are not accepted, because the driver ",
        device(as_index(index)).properties().driver, " has no adopt_stream() method");
    return triple(*found);
  });
  module.def(
      "native_handle", [](int64_t index, c10::StreamId id) { return native_handle(as_stream(index, id)); },
      "Return the hardware API's handle of a stream's queue.");
  // Changes the device type and number in a DLPack capsule.
  module.def("set_dlpack_device", [](const py::capsule& capsule, int type, int id) {
    const DLDevice given{static_cast<DLDeviceType>(type), id};
    if (std::string_view(capsule.name()) == "dltensor_versioned") {
      capsule.get_pointer<DLManagedTensorVersioned>()->dl_tensor.device = given;
    } else {
      capsule.get_pointer<DLManagedTensor>()->dl_tensor.device = given;
    }
  });
  module.def(
      "set_stream",
      [](c10::StreamId id, int64_t index, int64_t device_type) {
        const auto type = static_cast<c10::DeviceType>(device_type);
        exchange_current_stream(c10::Stream(c10::Stream::UNSAFE, c10::Device(type, as_index(index)), id));
        exchange_current_device(as_index(index));
      },
      py::arg("stream_id"), py::arg("device_index"), py::arg("device_type"),
      "Make the stream the current stream of its device, and its device the current device.");
  module.def("stream_handle", [](int64_t index, c10::StreamId id) {
    return reinterpret_cast<uintptr_t>(stream_identity(as_stream(index, id)));
  });
  module.def("stream_priority", [](int64_t index, c10::StreamId id) { return stream_priority(as_stream(index, id)); });
  module.def(
      "elapsed_ms",
      [](uintptr_t start, uintptr_t end) {
        return elapsed_ms(reinterpret_cast<const Event*>(start), reinterpret_cast<const Event*>(end));
      },
      py::arg("start"), py::arg("end"), "Return the milliseconds between two events, given as torch.Event.event_id.");
  module.def("set_sync_debug_mode", [](int mode) { set_sync_debug_mode(static_cast<SyncDebugMode>(mode)); });
  module.def("sync_debug_mode", [] { return static_cast<int>(sync_debug_mode()); });
  module.def(
      "synchronize", [](int64_t index) { synchronize_device(as_index(index)); }, py::arg("index"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "sleep",
      [](double milliseconds) {
        Device& owner = device(-1);
        const auto handle = stream_handle(current_stream(-1));
        DeviceCall call(owner);
        owner.sleep(milliseconds, handle);
      },
      py::arg("milliseconds"), py::call_guard<py::gil_scoped_release>(),
      "Keep the current stream busy for about this long.");
  module.attr("DEVICE_TYPE") = static_cast<int64_t>(c10::kPrivateUse1);
  module.attr("LEAST_PRIORITY") = kLeastPriority;
  module.attr("GREATEST_PRIORITY") = kGreatestPriority;
}

void bind_fallback(py::module_& module) {
  module.def("fallback_counts", [] {
    py::dict counts;
    for (const auto& [name, calls] : fallback_counts()) {
      counts[py::str(name)] = counts.contains(name) ? counts[py::str(name)].cast<uint64_t>() + calls : calls;
    }
    return counts;
  });
  module.def("reset_fallback_counts", &reset_fallback_counts);
  py::enum_<FallbackPolicy>(module, "FallbackPolicy")
      .value("warn", FallbackPolicy::Warn)
      .value("silent", FallbackPolicy::Silent)
      .value("error", FallbackPolicy::Error);
  module.def("set_fallback_policy", &set_fallback_policy);
  module.def("fallback_policy", &fallback_policy);
}

} // namespace

void bind_device(py::module_& module) {
  bind_devices(module);
  bind_streams(module);
  bind_fallback(module);
  module.def("default_generator", [](int64_t index) { return default_generator(as_index(index)); });
  module.def("is_pinned_address", [](uintptr_t address) { return is_pinned(reinterpret_cast<void*>(address)); });
}

} // namespace backplane
