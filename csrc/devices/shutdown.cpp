#include "devices/shutdown.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "compat.h"
#include "devices/device.h"
#include "devices/discovery.h"

namespace backplane {
namespace {

using torch::autograd::Edge;
using torch::autograd::variable_list;
using NodePointer = decltype(Edge::function);

// Computes nothing. Runs in the autograd thread of its input's device.
struct Passing final : torch::autograd::Node {
  explicit Passing(const at::Tensor& input) {
    add_input_metadata(input);
  }

  variable_list apply(variable_list&&) override {
    return variable_list(num_outputs());
  }
};

// Counts the devices for which PyTorch's engine has a thread. The engine starts threads at its first backward pass, for
// the devices that exist then: there are none before that pass, and none for bp if torch_backplane was imported later.
struct EngineThreads : torch::autograd::Engine {
  static size_t count() {
    return (get_default_engine().*&EngineThreads::device_ready_queues_).size();
  }
};

// Runs an empty backward pass through the thread of every device. The calling thread must have no thread-local state
// that backward passes inherit.
void pass_through_all_devices() {
  torch::autograd::edge_list edges;
  const auto count = std::min<size_t>(device_count(), EngineThreads::count());
  for (c10::DeviceIndex index = 0; index < static_cast<c10::DeviceIndex>(count); ++index) {
    const auto device = c10::Device(c10::kPrivateUse1, index);
    edges.emplace_back(compat::make_node<NodePointer, Passing>(at::empty({0}, device)), 0);
  }
  const at::Tensor seed = at::zeros({});
  const NodePointer start = compat::make_node<NodePointer, Passing>(seed);
  start->set_next_edges(std::move(edges));
  torch::autograd::Engine::get_default_engine().execute(
      {Edge(start, 0)}, {seed}, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
}

std::atomic<int> running{0}; // the number of running host functions
std::atomic<bool> exiting{false};

void finish_host_calls() {
  exiting.store(true);
  while (running.load() > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

} // namespace

void finish_autograd_threads() {
  if (!is_initialized() || in_bad_fork() || EngineThreads::count() == 0) {
    return;
  }
  std::exception_ptr failure;
  std::thread([&] {
    try {
      pass_through_all_devices();
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
  }).join();
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
}

void finish_host_calls_at_exit() {
  std::atexit(finish_host_calls);
}

HostCall::HostCall() noexcept {
  running.fetch_add(1);
  may_run_ = !exiting.load();
}

HostCall::~HostCall() {
  running.fetch_sub(1);
}

} // namespace backplane
