#include "graphs/branches.h"

#include <algorithm>
#include <optional>

namespace backplane {
namespace {

// Weights, measured on PoCL. Waiting for another queue costs as much as kWeightOfWait small
// kernels. A launch counts as one small kernel per kItems work items, at most kMaxWeight. Other commands usually take
// longer, and count as kMaxWeight.
constexpr size_t kWeightOfWait = 12;
constexpr size_t kItems = 8192;
constexpr size_t kMaxWeight = 32;

size_t weight(const CapturedNode& node) {
  const auto* launch = std::get_if<KernelLaunch>(&node.command.command());
  if (launch == nullptr) {
    return kMaxWeight;
  }
  const auto& [x, y, z] = launch->spec.global_size;
  return std::clamp(x * y * z / kItems, size_t{1}, kMaxWeight);
}

// For each queue, the last of its nodes that is ordered before a point. Nodes are counted from 1; 0: none.
using Past = std::vector<size_t>;

void add(Past& past, const Past& more) {
  for (size_t queue = 0; queue < past.size(); ++queue) {
    past[queue] = std::max(past[queue], more[queue]);
  }
}

class Search {
 public:
  Search(c10::ArrayRef<CapturedNode> nodes, size_t max_queues) : nodes_(nodes), most_(max_queues), last_(1, 0) {}

  Branches found() {
    for (size_t node = 0; node < nodes_.size(); ++node) {
      place(node);
    }
    found_.queues = last_.size();
    if (found_.queues == 1) {
      return {};
    }
    Past joined = past_of_queue(0);
    for (size_t node = nodes_.size(); node-- > 0;) { // latest first: a wait for it covers the nodes before it
      if (joined[found_.steps[node].queue] < node + 1) {
        found_.joined.push_back(node);
        found_.steps[node].is_waited_for = true;
        add(joined, past_[node]);
      }
    }
    return pays() ? std::move(found_) : Branches{};
  }

 private:
  bool pays() const {
    size_t concurrent = 0, waits = found_.joined.size();
    for (size_t node = 0; node < nodes_.size(); ++node) {
      const Branches::Step& step = found_.steps[node];
      concurrent += step.queue == 0 ? 0 : weight(nodes_[node]);
      waits += step.waits_for.size() + (step.waits_for_begin ? 1 : 0);
    }
    return concurrent >= kWeightOfWait * waits;
  }

  Past past_of_queue(size_t queue) const {
    const size_t last = last_[queue];
    return last == 0 ? Past(most_, 0) : past_[last - 1];
  }

  // Chooses the queue for a node: among queues whose last node is ordered before it, queue 0 (which all others must
  // join), or else the queue with the latest last node. If there is none, a new queue, or else the least recently used
  // one.
  size_t queue_after(const Past& before) {
    std::optional<size_t> found;
    for (size_t queue = 0; queue < last_.size() && found != size_t{0}; ++queue) {
      if (last_[queue] <= before[queue] && (!found.has_value() || last_[queue] > last_[*found])) {
        found = queue;
      }
    }
    if (found.has_value()) {
      return *found;
    }
    if (last_.size() < most_) {
      last_.push_back(0);
      return last_.size() - 1;
    }
    return std::min_element(last_.begin(), last_.end()) - last_.begin(); // the least recently used
  }

  void place(size_t node) {
    auto after = nodes_[node].after;
    std::sort(after.rbegin(), after.rend());
    Past before(most_, 0);
    for (const size_t one : after) {
      add(before, past_[one]);
    }
    Branches::Step step;
    step.queue = queue_after(before);
    const bool is_first = step.queue != 0 && last_[step.queue] == 0;
    Past past = past_of_queue(step.queue);
    for (const size_t one : after) {
      if (past[found_.steps[one].queue] < one + 1) {
        step.waits_for.push_back(one);
        found_.steps[one].is_waited_for = true;
        add(past, past_[one]);
      }
    }
    step.waits_for_begin = is_first && step.waits_for.empty();
    last_[step.queue] = past[step.queue] = node + 1;
    past_.push_back(std::move(past));
    found_.steps.push_back(std::move(step));
  }

  const c10::ArrayRef<CapturedNode> nodes_;
  const size_t most_;
  std::vector<size_t> last_; // for each queue, its last node, counted from 1
  std::vector<Past> past_; // for each node, including the node itself
  Branches found_;
};

} // namespace

Branches find_branches(c10::ArrayRef<CapturedNode> nodes, size_t max_queues) {
  return Search(nodes, max_queues).found();
}

} // namespace backplane
