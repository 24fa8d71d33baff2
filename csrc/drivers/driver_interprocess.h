// Sharing of a driver's memory and events between processes.
#pragma once

#include "devices/interprocess.h"
#include "drivers/driver_memory.h"
#include "drivers/driver_object.h"
#include "drivers/driver_stream.h"

namespace backplane {

class DriverInterprocess final : public Interprocess {
 public:
  // The arguments must outlive this object.
  DriverInterprocess(
      const NativeInterprocess& native, DriverObject& driver, DriverMemory& memory, DriverStreams& streams)
      : native_(native), driver_(driver), memory_(memory), streams_(streams) {}

  ExportedMemory export_memory(const void* address, size_t bytes) override;
  void* import_memory(const InterprocessHandle& handle, size_t segment_bytes) override;
  void close_memory(void* address, size_t segment_bytes) override;
  EventHandle create_event() override;
  InterprocessHandle export_event(EventHandle event) override;
  EventHandle import_event(const InterprocessHandle& handle) override;

 private:
  // Calls the launcher and converts its errors.
  template <typename Function>
  std::invoke_result_t<Function> ask(const char* doing, const Function& function) {
    driver_.errors().check();
    try {
      return function();
    } catch (const NativeError& error) {
      driver_.errors().convert(error, driver_.object(), doing);
    }
  }

  const NativeInterprocess& native_;
  DriverObject& driver_;
  DriverMemory& memory_;
  DriverStreams& streams_;
};

} // namespace backplane
