// Graphs: nodes and dependencies.

#include <algorithm>
#include <map>
#include <set>

#include "entry.h"
#include "graph.h"

Graph::~Graph() {
  for (const auto& one : nodes) {
    Registry<Node>::all().remove(one.get());
  }
}

Node* add_node(
    const std::shared_ptr<Graph>& graph, std::shared_ptr<Operation> operation, std::vector<Node*> dependencies) {
  auto node = std::make_shared<Node>();
  node->graph = graph;
  node->operation = std::move(operation);
  node->dependencies = std::move(dependencies);
  Registry<Node>::all().add(node);
  std::lock_guard lock(graph->mutex);
  graph->nodes.push_back(node);
  return node.get();
}

std::vector<Node*> in_order(const Graph& graph) {
  std::vector<Node*> order;
  std::set<const Node*> placed;
  for (size_t before = SIZE_MAX; before != order.size();) {
    before = order.size();
    for (const auto& node : graph.nodes) {
      const auto is_placed = [&](const Node* one) { return placed.count(one) != 0; };
      const auto& dependencies = node->dependencies;
      if (!is_placed(node.get()) && std::all_of(dependencies.begin(), dependencies.end(), is_placed)) {
        order.push_back(node.get());
        placed.insert(node.get());
      }
    }
  }
  return order;
}

std::shared_ptr<Graph> clone(Graph& graph) {
  auto made = std::make_shared<Graph>();
  std::map<const Node*, Node*> copies;
  std::lock_guard lock(graph.mutex);
  made->objects = graph.objects;
  for (const auto& node : graph.nodes) {
    copies[node.get()] = add_node(made, node->operation->clone(), {});
  }
  for (const auto& node : graph.nodes) {
    for (const Node* dependency : node->dependencies) {
      copies[node.get()]->dependencies.push_back(copies[dependency]);
    }
  }
  return made;
}

CUresult ChildGraph::execute(Context& context) {
  std::vector<std::shared_ptr<Operation>> all;
  {
    std::lock_guard lock(graph->mutex);
    for (const Node* node : in_order(*graph)) {
      all.push_back(node->operation);
    }
  }
  for (const auto& one : all) {
    RETURN_ERROR(one->execute(context));
  }
  return CUDA_SUCCESS;
}

// --- the API ---------------------------------------------------------------------------------------------------------

API cuGraphCreate(CUgraph* made, unsigned flags) {
  ENTER_UNLESS_FAILED();
  REQUIRE(made != nullptr && flags == 0, CUDA_ERROR_INVALID_VALUE);
  *made = Registry<Graph>::all().add(std::make_shared<Graph>());
  return CUDA_SUCCESS;
}

API cuGraphDestroy(CUgraph handle) {
  ENTER_UNLESS_FAILED();
  return Registry<Graph>::all().remove(handle) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// Declares `graph`, of the parameter `handle`.
#define ENTER_GRAPH()              \
  ENTER_UNLESS_FAILED();           \
  const auto graph = find(handle); \
  REQUIRE(graph != nullptr, CUDA_ERROR_INVALID_VALUE)

// Declares `node` and `graph`, of the parameter `handle`, and holds the graph's lock.
#define ENTER_NODE()                                   \
  ENTER_UNLESS_FAILED();                               \
  const auto node = find(handle);                      \
  REQUIRE(node != nullptr, CUDA_ERROR_INVALID_VALUE);  \
  const auto graph = node->graph.lock();               \
  REQUIRE(graph != nullptr, CUDA_ERROR_INVALID_VALUE); \
  std::lock_guard graph_lock(graph->mutex)

API cuGraphClone(CUgraph* made, CUgraph handle) {
  ENTER_GRAPH();
  REQUIRE(made != nullptr, CUDA_ERROR_INVALID_VALUE);
  *made = Registry<Graph>::all().add(clone(*graph));
  return CUDA_SUCCESS;
}

API cuGraphNodeGetType(CUgraphNode handle, int* type) {
  ENTER_NODE();
  REQUIRE(type != nullptr, CUDA_ERROR_INVALID_VALUE);
  *type = node->operation->node_type();
  return CUDA_SUCCESS;
}

namespace {

// Stores up to `*count` nodes, and the number of those that were stored; all of them are counted if `to` is null.
CUresult give(const std::vector<Node*>& all, CUgraphNode* to, size_t* count) {
  REQUIRE(count != nullptr, CUDA_ERROR_INVALID_VALUE);
  if (to == nullptr) {
    *count = all.size();
    return CUDA_SUCCESS;
  }
  for (size_t i = 0; i < *count; ++i) {
    to[i] = i < all.size() ? all[i] : nullptr;
  }
  *count = std::min(*count, all.size());
  return CUDA_SUCCESS;
}

std::vector<Node*> dependents(const Graph& graph, Node* of) {
  std::vector<Node*> all;
  for (const auto& one : graph.nodes) {
    if (std::count(one->dependencies.begin(), one->dependencies.end(), of) != 0) {
      all.push_back(one.get());
    }
  }
  return all;
}

void clear(CUgraphEdgeData* data, const size_t* count) {
  if (data != nullptr) {
    std::fill_n(data, *count, CUgraphEdgeData{});
  }
}

} // namespace

API cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  ENTER_GRAPH();
  std::lock_guard lock(graph->mutex);
  std::vector<Node*> all;
  for (const auto& one : graph->nodes) {
    all.push_back(one.get());
  }
  return give(all, nodes, count);
}

API cuGraphGetRootNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  ENTER_GRAPH();
  std::lock_guard lock(graph->mutex);
  std::vector<Node*> all;
  for (const auto& one : graph->nodes) {
    if (one->dependencies.empty()) {
      all.push_back(one.get());
    }
  }
  return give(all, nodes, count);
}

API cuGraphGetEdges_v2(CUgraph handle, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* data, size_t* count) {
  ENTER_GRAPH();
  REQUIRE((from == nullptr) == (to == nullptr) && count != nullptr, CUDA_ERROR_INVALID_VALUE);
  std::lock_guard lock(graph->mutex);
  std::vector<Node*> begins, ends;
  for (const auto& one : graph->nodes) {
    for (Node* dependency : one->dependencies) {
      begins.push_back(dependency);
      ends.push_back(one.get());
    }
  }
  size_t same = *count;
  RETURN_ERROR(give(begins, from, count));
  RETURN_ERROR(give(ends, to, &same));
  clear(data, count);
  return CUDA_SUCCESS;
}

API cuGraphNodeGetDependencies_v2(CUgraphNode handle, CUgraphNode* nodes, CUgraphEdgeData* data, size_t* count) {
  ENTER_NODE();
  RETURN_ERROR(give(node->dependencies, nodes, count));
  clear(data, count);
  return CUDA_SUCCESS;
}

API cuGraphNodeGetDependentNodes_v2(CUgraphNode handle, CUgraphNode* nodes, CUgraphEdgeData* data, size_t* count) {
  ENTER_NODE();
  RETURN_ERROR(give(dependents(*graph, node.get()), nodes, count));
  clear(data, count);
  return CUDA_SUCCESS;
}

namespace {

// Checks pairs of nodes, and calls the function with the dependencies of each second node and the first one.
template <class Function>
CUresult for_each_edge(Graph& graph, const CUgraphNode* from, const CUgraphNode* to, size_t count, Function function) {
  REQUIRE(count == 0 || (from != nullptr && to != nullptr), CUDA_ERROR_INVALID_VALUE);
  std::lock_guard lock(graph.mutex);
  const auto is_own = [&](const Node* handle) {
    const auto node = find(handle);
    return node != nullptr && node->graph.lock().get() == &graph;
  };
  for (size_t i = 0; i < count; ++i) {
    REQUIRE(is_own(from[i]) && is_own(to[i]) && from[i] != to[i], CUDA_ERROR_INVALID_VALUE);
    const auto& known = to[i]->dependencies;
    RETURN_ERROR(function(to[i]->dependencies, std::find(known.begin(), known.end(), from[i]), from[i]));
  }
  return CUDA_SUCCESS;
}

} // namespace

API cuGraphAddDependencies_v2(
    CUgraph handle, const CUgraphNode* from, const CUgraphNode* to, const CUgraphEdgeData*, size_t count) {
  ENTER_GRAPH();
  return for_each_edge(*graph, from, to, count, [](auto& dependencies, auto at, Node* one) {
    REQUIRE(at == dependencies.end(), CUDA_ERROR_INVALID_VALUE);
    dependencies.push_back(one);
    return CUDA_SUCCESS;
  });
}

API cuGraphRemoveDependencies_v2(
    CUgraph handle, const CUgraphNode* from, const CUgraphNode* to, const CUgraphEdgeData*, size_t count) {
  ENTER_GRAPH();
  return for_each_edge(*graph, from, to, count, [](auto& dependencies, auto at, Node*) {
    REQUIRE(at != dependencies.end(), CUDA_ERROR_INVALID_VALUE);
    dependencies.erase(at);
    return CUDA_SUCCESS;
  });
}

API cuGraphDestroyNode(CUgraphNode handle) {
  ENTER_NODE();
  for (Node* one : dependents(*graph, node.get())) {
    auto& dependencies = one->dependencies;
    dependencies.erase(std::remove(dependencies.begin(), dependencies.end(), node.get()), dependencies.end());
  }
  Registry<Node>::all().remove(node.get());
  auto& all = graph->nodes;
  all.erase(std::remove(all.begin(), all.end(), node), all.end());
  return CUDA_SUCCESS;
}
