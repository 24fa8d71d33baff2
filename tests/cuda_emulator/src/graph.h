// Graphs of operations.

#pragma once

#include <atomic>
#include <vector>

#include "streams.h"

struct Node {
  std::weak_ptr<Graph> graph;
  std::shared_ptr<Operation> operation;
  std::vector<Node*> dependencies;
};

// Calls a function of the program when nothing refers to it any more.
struct UserObject {
  ~UserObject();

  void* given = nullptr;
  CUhostFn destroy = nullptr;
  std::atomic<unsigned> references{0}; // of the program
};

struct Graph {
  ~Graph();

  std::mutex mutex; // protects the following
  std::vector<std::shared_ptr<Node>> nodes;
  std::vector<std::shared_ptr<UserObject>> objects; // one element for each retaining call
};

struct EmptyNode : Operation {
  CUresult execute(Context&) override {
    return CUDA_SUCCESS;
  }
  int node_type() const override {
    return 5;
  }
  std::shared_ptr<Operation> clone() const override {
    return std::make_shared<EmptyNode>();
  }
};

struct ChildGraph : Operation {
  explicit ChildGraph(std::shared_ptr<Graph> given) : graph(std::move(given)) {}
  CUresult execute(Context& context) override;
  int node_type() const override {
    return 4;
  }
  std::shared_ptr<Operation> clone() const override {
    return std::make_shared<ChildGraph>(graph);
  }

  std::shared_ptr<Graph> graph;
};

// Adds a node. The caller holds no lock.
Node* add_node(
    const std::shared_ptr<Graph>& graph, std::shared_ptr<Operation> operation, std::vector<Node*> dependencies);

// Returns the nodes in an order in which they can be executed; not all of them if there is a cycle. The caller holds
// the graph's lock.
std::vector<Node*> in_order(const Graph& graph);

// Returns a graph with the same nodes in the same order.
std::shared_ptr<Graph> clone(Graph& graph);
