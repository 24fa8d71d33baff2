#include "drivers/driver_kernel.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <sstream>

#include "devices/profile.h"

namespace py = pybind11;

namespace backplane {
namespace {

std::string numbered(const std::string& text) {
  std::istringstream lines(text);
  std::ostringstream result;
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    result << (number > 1 ? "\n" : "") << number << "\t" << line;
  }
  return result.str();
}

// "RuntimeError: …", without the traceback.
std::string described(const py::error_already_set& error) {
  return c10::str(
      py::str(error.type().attr("__name__")).cast<std::string>(), ": ", py::str(error.value()).cast<std::string>());
}

// Calls `function`, and again if Ctrl-C interrupts it: an interrupted build would leave a kernel that can never be
// launched. Raises the KeyboardInterrupt afterwards, or immediately after more than kPatience interrupts.
template <typename Function>
void uninterrupted(const Function& function) {
  constexpr int kPatience = 10;
  for (int interrupts = 0;;) {
    try {
      function();
      if (interrupts > 0) {
        PyErr_SetInterrupt(); // interrupts the next Python code
      }
      return;
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_KeyboardInterrupt) || ++interrupts > kPatience) {
        throw;
      }
    }
  }
}

} // namespace

DriverKernel::DriverKernel(KernelSource source, DriverObject& driver, std::function<void()> finished)
    : source_(std::move(source)), driver_(driver), finished_(std::move(finished)) {}

DriverKernel::~DriverKernel() {
  native_.reset();
  if (object_ != nullptr && Py_IsInitialized()) {
    DeviceCall gil(true);
    const py::error_scope kept;
    Py_DECREF(object_);
  }
}

std::string DriverKernel::name() const {
  return c10::str("the kernel ", source_.entry, " of ", source_.operator_name);
}

void DriverKernel::launch(
    void* queue, const LaunchSpec& size, c10::ArrayRef<LaunchArgument> arguments, uint64_t generation) {
  if (native_ != nullptr) {
    native_->launch(queue, size, arguments, generation);
  } else {
    call_driver(queue, size, arguments);
  }
}

void DriverKernel::build() {
  TORCH_CHECK(Py_IsInitialized(), "kernel ", source_.entry, " cannot be built after Python has been finalized");
  DeviceCall gil(true);
  driver_.errors().check();
  std::string failure;
  const InsideDriverCall inside;
  const ProfiledRange profiled(Activity::Kind::Building, "build", source_.entry);
  try {
    py::object kernel;
    uintptr_t native = 0;
    uninterrupted([&] {
      kernel = source_.is_binary ? driver_.attr("load")(py::bytes(source_.code), source_.entry)
                                 : driver_.attr("compile")(source_.code, source_.entry);
      native = driver_.launcher() == nullptr ? 0 : driver_.attr("native_kernel")(kernel).cast<uintptr_t>();
    });
    if (driver_.launcher() != nullptr) {
      native_handle_ = reinterpret_cast<void*>(native);
      native_ = driver_.launcher()->kernel(native_handle_, source_.is_binary ? "" : source_.code);
    }
    object_ = kernel.release().ptr();
  } catch (const py::error_already_set& error) {
    driver_.errors().convert(error, c10::str("building ", name()));
    failure = described(error);
  }
  TORCH_CHECK(
      failure.empty(), name(), source_.is_binary ? " could not be loaded for " : " could not be built for ",
      driver_.name(), ": ", failure, source_.is_binary ? "" : "\nThe kernel:\n" + numbered(source_.code));
}

void DriverKernel::finished() noexcept {
  finished_();
}

void DriverKernel::call_driver(void* stream, const LaunchSpec& size, c10::ArrayRef<LaunchArgument> arguments) {
  TORCH_CHECK(Py_IsInitialized(), "kernel ", source_.entry, " was launched after Python has been finalized");
  DeviceCall gil(true);
  py::list values;
  for (const LaunchArgument& argument : arguments) {
    if (argument.bytes > 0) {
      values.append(py::bytes(static_cast<const char*>(argument.data), argument.bytes));
    } else {
      const py::handle memory = argument.memory == nullptr ? Py_None : static_cast<PyObject*>(argument.memory);
      values.append(py::make_tuple(memory, argument.offset));
    }
  }
  const py::handle kernel(object_), queue(static_cast<PyObject*>(stream));
  const py::tuple items = py::cast(size.global_size), group = py::cast(size.group_size);
  if (size.has_attributes()) {
    const auto attributes =
        py::module_::import("torch_backplane.drivers.base")
            .attr("LaunchAttributes")(size.dynamic_shared_memory, py::tuple(py::cast(size.cluster)), size.cooperative);
    driver_.attr("launch_with_attributes")(kernel, items, group, attributes, values, queue);
  } else {
    driver_.attr("launch")(kernel, items, group, values, queue);
  }
}

KernelResources DriverKernel::resources() {
  return driver_.ask("getting the resources of a kernel", [&] {
    if (!resources_.has_value()) {
      const py::object found = driver_.attr("kernel_resources")(py::handle(object_));
      const auto number = [&](const char* name) {
        return found.is_none() ? std::nullopt : found.attr(name).cast<std::optional<int64_t>>();
      };
      resources_ = {number("registers"), number("spilled_bytes"), number("static_shared_memory")};
      most_dynamic_shared_memory_ = number("max_dynamic_shared_memory");
    }
    return *resources_;
  });
}

std::optional<int64_t> DriverKernel::most_dynamic_shared_memory() {
  resources();
  return most_dynamic_shared_memory_;
}

} // namespace backplane
