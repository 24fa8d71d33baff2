// Nodes of graphs: their parameters.

#include "graph_nodes.h"
#include "capture.h"
#include "copies.h"
#include "entry.h"
#include "graph.h"
#include "launch.h"

CUresult make_operation(const CUDA_KERNEL_NODE_PARAMS& given, std::shared_ptr<Operation>* made) {
  std::shared_ptr<KernelLaunch> launch;
  RETURN_ERROR(make_launch(given, &launch));
  *made = launch;
  return CUDA_SUCCESS;
}

CUresult make_operation(const CUDA_MEMCPY3D& given, std::shared_ptr<Operation>* made) {
  std::shared_ptr<Copy> copy;
  RETURN_ERROR(make_copy(given, &copy));
  *made = copy;
  return CUDA_SUCCESS;
}

CUresult make_operation(const CUDA_MEMSET_NODE_PARAMS& given, std::shared_ptr<Operation>* made) {
  std::shared_ptr<Fill> fill;
  RETURN_ERROR(make_fill(given, &fill));
  *made = fill;
  return CUDA_SUCCESS;
}

CUresult make_operation(const CUDA_HOST_NODE_PARAMS& given, std::shared_ptr<Operation>* made) {
  REQUIRE(given.fn != nullptr, CUDA_ERROR_INVALID_VALUE);
  *made = std::make_shared<HostFunction>(given);
  return CUDA_SUCCESS;
}

CUresult make_operation(const Nothing&, std::shared_ptr<Operation>* made) {
  *made = std::make_shared<EmptyNode>();
  return CUDA_SUCCESS;
}

CUresult make_operation(const Recorded& given, std::shared_ptr<Operation>* made) {
  const auto event = find(given.event);
  REQUIRE(event != nullptr, CUDA_ERROR_INVALID_HANDLE);
  *made = std::make_shared<EventRecord>(event);
  return CUDA_SUCCESS;
}

CUresult make_operation(const Awaited& given, std::shared_ptr<Operation>* made) {
  const auto event = find(given.event);
  REQUIRE(event != nullptr, CUDA_ERROR_INVALID_HANDLE);
  *made = std::make_shared<EventWait>(event);
  return CUDA_SUCCESS;
}

CUresult make_operation(const Child& given, std::shared_ptr<Operation>* made) {
  const auto graph = find(given.graph);
  REQUIRE(graph != nullptr, CUDA_ERROR_INVALID_VALUE);
  *made = std::make_shared<ChildGraph>(clone(*graph));
  return CUDA_SUCCESS;
}

namespace {

struct Place { // of a new node
  CUgraphNode* made;
  CUgraph graph;
  const CUgraphNode* dependencies;
  size_t count;
};

template <class Parameters>
CUresult add(const Place& place, const Parameters* given) {
  const auto graph = find(place.graph);
  REQUIRE(graph != nullptr && place.made != nullptr && given != nullptr, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(place.count == 0 || place.dependencies != nullptr, CUDA_ERROR_INVALID_VALUE);
  for (size_t i = 0; i < place.count; ++i) {
    const auto one = find(place.dependencies[i]);
    REQUIRE(one != nullptr && one->graph.lock() == graph, CUDA_ERROR_INVALID_VALUE);
  }
  std::shared_ptr<Operation> operation;
  RETURN_ERROR(make_operation(*given, &operation));
  *place.made = add_node(graph, operation, {place.dependencies, place.dependencies + place.count});
  return CUDA_SUCCESS;
}

// Returns the operation of a node of a type; null if the node has another type.
template <class T>
std::shared_ptr<T> operation_of(CUgraphNode handle) {
  const auto node = find(handle);
  return node == nullptr ? nullptr : std::dynamic_pointer_cast<T>(node->operation);
}

template <class T, class Parameters>
CUresult set(CUgraphNode handle, const Parameters* given) {
  REQUIRE(operation_of<T>(handle) != nullptr && given != nullptr, CUDA_ERROR_INVALID_VALUE);
  const auto node = find(handle);
  std::shared_ptr<Operation> operation;
  RETURN_ERROR(make_operation(*given, &operation));
  node->operation = operation;
  return CUDA_SUCCESS;
}

template <class T, class Parameters>
CUresult get(CUgraphNode handle, Parameters* to) {
  const auto operation = operation_of<T>(handle);
  REQUIRE(operation != nullptr && to != nullptr, CUDA_ERROR_INVALID_VALUE);
  *to = operation->parameters;
  return CUDA_SUCCESS;
}

} // namespace

API cuGraphAddKernelNode_v2(
    CUgraphNode* made,
    CUgraph graph,
    const CUgraphNode* dependencies,
    size_t count,
    const CUDA_KERNEL_NODE_PARAMS* given) {
  ENTER_UNLESS_FAILED();
  return add({made, graph, dependencies, count}, given);
}

API cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* given) {
  ENTER_UNLESS_FAILED();
  return set<KernelLaunch>(node, given);
}

API cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* to) {
  ENTER_UNLESS_FAILED();
  const auto launch = operation_of<KernelLaunch>(node);
  REQUIRE(launch != nullptr && to != nullptr, CUDA_ERROR_INVALID_VALUE);
  launch->pointers.clear();
  for (const uint64_t offset : launch->function->parameter_offsets) {
    launch->pointers.push_back(launch->parameters.data() + offset);
  }
  const unsigned *grid = launch->grid, *block = launch->block;
  *to = {launch->function.get(),  grid[0], grid[1], grid[2], block[0], block[1], block[2], launch->shared,
         launch->pointers.data(), nullptr, nullptr, nullptr};
  return CUDA_SUCCESS;
}

API cuGraphAddMemcpyNode(
    CUgraphNode* made,
    CUgraph graph,
    const CUgraphNode* dependencies,
    size_t count,
    const CUDA_MEMCPY3D* given,
    CUcontext context) {
  ENTER_UNLESS_FAILED();
  REQUIRE(find(context) != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  return add({made, graph, dependencies, count}, given);
}

API cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D* given) {
  ENTER_UNLESS_FAILED();
  return set<Copy>(node, given);
}

API cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D* to) {
  ENTER_UNLESS_FAILED();
  return get<Copy>(node, to);
}

API cuGraphAddMemsetNode(
    CUgraphNode* made,
    CUgraph graph,
    const CUgraphNode* dependencies,
    size_t count,
    const CUDA_MEMSET_NODE_PARAMS* given,
    CUcontext context) {
  ENTER_UNLESS_FAILED();
  REQUIRE(find(context) != nullptr, CUDA_ERROR_INVALID_CONTEXT);
  return add({made, graph, dependencies, count}, given);
}

API cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* given) {
  ENTER_UNLESS_FAILED();
  return set<Fill>(node, given);
}

API cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS* to) {
  ENTER_UNLESS_FAILED();
  return get<Fill>(node, to);
}

API cuGraphAddHostNode(
    CUgraphNode* made,
    CUgraph graph,
    const CUgraphNode* dependencies,
    size_t count,
    const CUDA_HOST_NODE_PARAMS* given) {
  ENTER_UNLESS_FAILED();
  return add({made, graph, dependencies, count}, given);
}

API cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS* given) {
  ENTER_UNLESS_FAILED();
  return set<HostFunction>(node, given);
}

API cuGraphHostNodeGetParams(CUgraphNode node, CUDA_HOST_NODE_PARAMS* to) {
  ENTER_UNLESS_FAILED();
  return get<HostFunction>(node, to);
}

API cuGraphAddEmptyNode(CUgraphNode* made, CUgraph graph, const CUgraphNode* dependencies, size_t count) {
  ENTER_UNLESS_FAILED();
  const Nothing given;
  return add({made, graph, dependencies, count}, &given);
}

API cuGraphAddEventRecordNode(
    CUgraphNode* made, CUgraph graph, const CUgraphNode* dependencies, size_t count, CUevent event) {
  ENTER_UNLESS_FAILED();
  const Recorded given{event};
  return add({made, graph, dependencies, count}, &given);
}

API cuGraphAddEventWaitNode(
    CUgraphNode* made, CUgraph graph, const CUgraphNode* dependencies, size_t count, CUevent event) {
  ENTER_UNLESS_FAILED();
  const Awaited given{event};
  return add({made, graph, dependencies, count}, &given);
}

API cuGraphAddChildGraphNode(
    CUgraphNode* made, CUgraph graph, const CUgraphNode* dependencies, size_t count, CUgraph child) {
  ENTER_UNLESS_FAILED();
  const Child given{child};
  return add({made, graph, dependencies, count}, &given);
}
