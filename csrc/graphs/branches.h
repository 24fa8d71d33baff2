// Which parts of a graph may run beside each other, each on a queue of its own.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <vector>

#include "streams/capture.h"

namespace backplane {

// The nodes' order, in which they are given to queues, is the capture's. Queue 0 is the stream that the graph is replayed on.
struct Branches {
  // What a node has to wait for besides what comes before it in its queue.
  struct Step {
    size_t queue = 0;
    std::vector<size_t> waits_for; // nodes in other queues
    bool waits_for_begin = false; // what queue 0 has been given before the replay
    bool is_waited_for = false;
  };

  size_t queues = 1;
  std::vector<Step> steps; // of each node; none where there is one queue
  std::vector<size_t> joined; // nodes that queue 0 waits for at the end
};

// A node follows another one in its queue where it has to come after it anyhow, and has a queue of its own where it need not
// come after the last one of any, as long as there are at most `most_queues`. One queue where more is not worth its waits.
Branches find_branches(c10::ArrayRef<CapturedNode> nodes, size_t most_queues);

} // namespace backplane
