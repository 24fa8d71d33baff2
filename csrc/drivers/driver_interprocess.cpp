#include "drivers/driver_interprocess.h"

#include <c10/util/Exception.h>

namespace py = pybind11;

namespace backplane {

ExportedMemory DriverInterprocess::export_memory(const void* address, size_t bytes) {
  const auto segment = memory_.segment_of(address, bytes);
  const auto handle = ask("exporting memory", [&] { return native_.export_memory(segment.native); });
  return {handle, segment.bytes, segment.offset};
}

void* DriverInterprocess::import_memory(const InterprocessHandle& handle, size_t segment_bytes) {
  void* const native = ask("importing memory", [&] { return native_.import_memory(handle, segment_bytes); });
  DriverCall call;
  try {
    return memory_.insert_imported(native, segment_bytes);
  } catch (...) {
    native_.close_memory(native);
    throw;
  }
}

void DriverInterprocess::close_memory(void* address, size_t segment_bytes) {
  if (!Py_IsInitialized()) {
    return;
  }
  DriverCall call;
  const py::error_scope kept; // the caller can be a destructor that runs while an exception propagates
  streams_.finish_work();
  void* const native = memory_.remove_imported(address, segment_bytes);
  if (!driver_.errors().is_lost()) {
    ask("closing memory of another process", [&] { native_.close_memory(native); });
  }
}

EventHandle DriverInterprocess::create_event() {
  return streams_.insert_event(ask("creating an event", [&] { return native_.create_event(); }));
}

InterprocessHandle DriverInterprocess::export_event(EventHandle event) {
  NativeEvent& shared = DriverStreams::shared_event(event);
  return ask("exporting an event", [&] { return native_.export_event(shared); });
}

EventHandle DriverInterprocess::import_event(const InterprocessHandle& handle) {
  return streams_.insert_event(ask("importing an event", [&] { return native_.import_event(handle); }));
}

} // namespace backplane
