// A graph of the hardware's own: a list of commands that a stream is given in one call (CUDA: cudaGraphExec_t).
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
  // Gives the graph to the stream. `commands`: those that the graph was made of; `changed`: some have other numbers than before.
  // Thread-safe.
  virtual void launch(c10::ArrayRef<GraphCommand> commands, bool changed, StreamHandle stream) = 0;
};

} // namespace backplane
