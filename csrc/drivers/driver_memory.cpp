#include "drivers/driver_memory.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string_view>

namespace py = pybind11;

namespace backplane {
namespace {

constexpr size_t kAlignment = 512; // of device addresses, see Device::allocate

struct Segment {
  PyObject* object = nullptr; // the driver's object
  void* native = nullptr; // the native handle; only with a native launcher
  size_t bytes = 0;
};

} // namespace

DriverMemory::DriverMemory(DriverObject& driver, const DeviceProperties& properties)
    : driver_(driver), properties_(properties), can_reserve_(driver.attr("can_reserve")().cast<bool>()) {}

void* DriverMemory::allocate(size_t bytes) {
  if (bytes > properties_.largest_allocation || !take(bytes)) {
    return nullptr;
  }
  void* address = nullptr;
  try {
    address = new_segment("allocate", "allocating ", bytes);
  } catch (...) {
    allocated_ -= bytes;
    throw;
  }
  if (address == nullptr) {
    allocated_ -= bytes;
  }
  return address;
}

void DriverMemory::free(void* address, size_t bytes) {
  allocated_ -= bytes;
  end_segment("free", address, bytes);
}

void* DriverMemory::reserve(size_t bytes) {
  return new_segment("reserve", "reserving address space of ", bytes);
}

void DriverMemory::unreserve(void* address, size_t bytes) {
  end_segment("unreserve", address, bytes);
}

bool DriverMemory::map(void* address, size_t bytes) {
  if (!take(bytes)) {
    return false;
  }
  try {
    const Place place = place_of(address, bytes);
    driver_.ask({"mapping ", bytes, " bytes"}, [&] { driver_.attr("map")(place.segment, place.offset, bytes); });
    return true;
  } catch (py::error_already_set& error) {
    allocated_ -= bytes;
    const DriverCall call;
    if (error.matches(PyExc_MemoryError)) {
      return false;
    }
    throw;
  } catch (...) {
    allocated_ -= bytes;
    throw;
  }
}

void DriverMemory::unmap(void* address, size_t bytes) {
  const Place place = place_of(address, bytes);
  allocated_ -= bytes;
  if (!driver_.errors().is_lost()) {
    driver_.ask("unmapping memory", [&] { driver_.attr("unmap")(place.segment, place.offset, bytes); });
  }
}

// Calls the driver's `method`, "allocate" or "reserve", and returns the address of the new segment, or null if there is
// not enough memory.
void* DriverMemory::new_segment(const char* method, const char* doing, size_t bytes) {
  driver_.errors().check();
  DriverCall call;
  const char* give_back = can_reserve_ && std::string_view(method) == "reserve" ? "unreserve" : "free";
  try {
    return driver_.errors().watch(
        Doing{doing, bytes, " bytes"}, [&] { return place(driver_.attr(method)(bytes), bytes, give_back); });
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_MemoryError)) {
      return nullptr;
    }
    throw;
  }
}

// Releases a segment of new_segment() with the driver's `method`, "free" or "unreserve".
void DriverMemory::end_segment(const char* method, void* address, size_t bytes) {
  const std::unique_ptr<Segment> segment(static_cast<Segment*>(segments_.remove(address)));
  const auto handle = py::reinterpret_steal<py::object>(segment->object);
  if (properties_.addresses == Addresses::Synthetic) {
    AddressSpace::release(address, bytes);
  }
  const DriverErrors& errors = driver_.errors();
  if (errors.is_lost()) {
    return;
  }
  try {
    driver_.ask("freeing memory", [&] { driver_.attr(method)(handle); });
  } catch (const c10::AcceleratorError&) {
    if (!errors.is_lost()) {
      throw;
    }
  }
}

std::pair<size_t, size_t> DriverMemory::info() {
  return driver_.ask("querying its free memory", [&]() -> std::pair<size_t, size_t> {
    const py::object info = driver_.attr("memory_info")();
    if (!info.is_none()) {
      return info.cast<std::pair<size_t, size_t>>();
    }
    const size_t total = properties_.total_memory;
    return {total - std::min<size_t>(allocated_, total), total};
  });
}

void* DriverMemory::insert_imported(void* native, size_t bytes) {
  py::object handle = py::int_(reinterpret_cast<uintptr_t>(native));
  void* address = address_of(handle, bytes);
  segments_.insert(address, bytes, new Segment{handle.release().ptr(), native, bytes});
  return address;
}

void* DriverMemory::remove_imported(void* address, size_t bytes) {
  const std::unique_ptr<Segment> segment(static_cast<Segment*>(segments_.remove(address)));
  Py_DECREF(segment->object);
  if (properties_.addresses == Addresses::Synthetic) {
    AddressSpace::release(address, bytes);
  }
  return segment->native;
}

DriverMemory::Exported DriverMemory::segment_of(const void* address, size_t bytes) const {
  const auto [found, offset] = segments_.resolve(address, bytes, properties_.name.c_str());
  const auto* segment = static_cast<Segment*>(found);
  void* const start = const_cast<char*>(static_cast<const char*>(address)) - offset;
  return {has_pointers() ? start : segment->native, segment->bytes, offset};
}

DriverMemory::Place DriverMemory::place_of(const void* address, size_t bytes) const {
  const auto [segment, offset] = segments_.resolve(address, bytes, properties_.name.c_str());
  return {static_cast<Segment*>(segment)->object, offset};
}

LaunchArgument DriverMemory::resolve(const KernelArgument& argument) const {
  if (argument.bytes > 0 || argument.data == nullptr) {
    return {nullptr, 0, argument.data, argument.bytes};
  }
  if (has_pointers()) {
    return {const_cast<void*>(argument.data), 0, nullptr, 0};
  }
  const auto [segment, offset] = segments_.resolve(argument.data, 1, properties_.name.c_str());
  const auto* memory = static_cast<Segment*>(segment);
  return {driver_.launcher() != nullptr ? memory->native : memory->object, offset, nullptr, 0};
}

// Counts an allocation; false if the device does not have enough memory.
bool DriverMemory::take(size_t bytes) {
  size_t used = allocated_;
  do {
    if (bytes > properties_.total_memory - std::min<size_t>(used, properties_.total_memory)) {
      return false;
    }
  } while (!allocated_.compare_exchange_weak(used, used + bytes));
  return true;
}

// Registers a new segment and returns its address. On an error, releases the segment with the driver's method
// `give_back`.
void* DriverMemory::place(const py::object& handle, size_t bytes, const char* give_back) {
  try {
    auto segment = std::make_unique<Segment>(Segment{.bytes = bytes});
    if (driver_.launcher() != nullptr && !has_pointers()) {
      segment->native = as_pointer(driver_.attr("native_segment")(handle));
    }
    void* address = address_of(handle, bytes);
    segment->object = py::object(handle).release().ptr();
    segments_.insert(address, bytes, segment.release());
    return address;
  } catch (const std::exception&) {
    const py::error_scope kept;
    driver_.call_quietly(give_back, handle);
    throw;
  }
}

void* DriverMemory::address_of(const py::object& handle, size_t bytes) const {
  if (properties_.addresses == Addresses::Synthetic) {
    return AddressSpace::reserve(bytes);
  }
  const auto value = driver_.attr("address")(handle).cast<uintptr_t>();
  TORCH_CHECK(
      value != 0 && value % kAlignment == 0, "driver ", properties_.driver, ": address() returned ", value,
      ", but segments start at multiples of ", kAlignment);
  return reinterpret_cast<void*>(value);
}

} // namespace backplane
