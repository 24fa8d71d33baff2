// Native graphs of a driver: the graph functions of its C launcher, and the conversion of captured commands.
#pragma once

#include <cstdint>
#include <memory>

#include "devices/device.h"
#include "drivers/driver_memory.h"
#include "drivers/driver_object.h"
#include "drivers/driver_stream.h"

namespace backplane {

// command_t in docs/driver-contract.md.
struct CCommand {
  enum Kind : uint64_t { Launch, Copy, Fill, HostCallback, Captured };

  uint64_t kind;
  const uint64_t* after; // indices of the commands that this one depends on
  uint64_t after_count;
  // A launch.
  void* kernel;
  uint64_t items[3];
  uint64_t group[3];
  const CArgument* arguments;
  uint64_t argument_count;
  // A copy, or a fill of `to`.
  void* to;
  uint64_t to_offset;
  void* from;
  uint64_t from_offset;
  uint64_t bytes;
  int value;
  // A host callback.
  void (*function)(void* argument);
  void* argument; // or what CaptureFunctions::end returned
};

struct GraphFunctions {
  int (*create)(const CCommand* commands, uint64_t count, void** graph);
  int (*update)(void* graph, const CCommand* commands, uint64_t count, int* updated);
  int (*launch)(void* graph, void* queue);
  int (*destroy)(void* graph);
};

struct CaptureFunctions {
  int (*begin)(void** queue);
  int (*end)(void* queue, void** captured);
  int (*destroy)(void* captured);
};

// Returns null if the launcher has no graphs, or does not support one of the commands; with a warning if a library or
// the driver refuses the capture of a library call. The references must outlive the graph; they live as long as the
// process.
std::unique_ptr<NativeGraph> make_driver_graph(
    c10::ArrayRef<GraphCommand> commands, DriverObject& driver, const DriverMemory& memory, DriverStreams& streams);

} // namespace backplane
