// A native graph: a list of commands that is submitted to a stream in one call (CUDA: cudaGraphExec_t).
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>

#include "devices/command.h"

namespace backplane {

struct GraphCommand {
  const Command* command;
  c10::ArrayRef<size_t> after; // indices of the commands that it depends on
};

class NativeGraph {
 public:
  virtual ~NativeGraph() = default;
  // Submits the graph to the stream. `commands`: the commands that it was instantiated from; `changed`: whether some
  // have other numbers than before. Thread-safe.
  virtual void launch(c10::ArrayRef<GraphCommand> commands, bool changed, StreamHandle stream) = 0;
};

} // namespace backplane
