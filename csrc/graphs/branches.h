// Finds the parts of a graph that can run concurrently, and assigns them to queues.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <vector>

#include "streams/capture.h"

namespace backplane {

// Nodes are submitted in the order of the capture. Queue 0 is the stream on which the graph is replayed.
struct Branches {
  // A node's queue, and what the node waits for in addition to the preceding nodes of its queue.
  struct Step {
    size_t queue = 0;
    std::vector<size_t> waits_for; // nodes in other queues
    bool waits_for_begin = false; // wait for what was submitted to queue 0 before the replay
    bool is_waited_for = false; // another queue waits for this node
  };

  size_t queues = 1;
  std::vector<Step> steps; // for each node; empty if there is one queue
  std::vector<size_t> joined; // nodes that queue 0 waits for at the end
};

// Puts each node behind a node that it depends on. A node that does not depend on the last node of any queue gets a new
// queue, while there are fewer than `max_queues`. Returns one queue if concurrency would not be worth the waits.
Branches find_branches(c10::ArrayRef<CapturedNode> nodes, size_t max_queues);

} // namespace backplane
