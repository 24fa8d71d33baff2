// Operators that have a planner, and the boxed kernel that PyTorch calls for them.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plans/dynamic_shape_plan.h"
#include "plans/number_checks.h"
#include "plans/plan.h"
#include "plans/plan_cache.h"
#include "plans/signature.h"

namespace backplane {

class Capture;

// One value for each result in the schema; nullopt if the planner left the call to the fallback (RunOnCPU).
using PlannerResult = std::optional<std::vector<c10::IValue>>;
struct FallbackReason {
  std::string reason;
  bool refused = false; // the arguments are invalid (Refused): the CPU kernel raises the error
};
// Interface to a planner in Python (planner_call.cpp).
class Planner {
 public:
  virtual ~Planner() = default;
  // Calls the planner with the operator's arguments.
  virtual PlannerResult call(
      const c10::FunctionSchema& schema,
      c10::ArrayRef<c10::IValue> arguments,
      const std::vector<ArgumentFacts>& facts,
      PlannedCall& call,
      FallbackReason& left) = 0;
  // Runs the planner over symbolic sizes, without side effects. Returns nullopt and sets `reason` if it cannot be
  // traced.
  virtual std::optional<DynamicShapePlan> trace(
      const c10::FunctionSchema& schema,
      c10::ArrayRef<c10::IValue> arguments,
      const std::vector<ArgumentFacts>& facts,
      PlannedCall& call,
      std::string& reason) = 0;
};

enum class PlanMode {
  Off, // planners run at each call
  On,
  Check // plans are replayed, and a dry run of the planner must give the same plan
};
void set_plan_mode(PlanMode mode);
PlanMode plan_mode();

// Whether each operator synchronizes its stream, so that an error reported by a kernel is raised by the call that
// launched it.
void set_launch_blocking(bool blocking);

class PlannedOperator {
 public:
  explicit PlannedOperator(const c10::OperatorHandle& op);

  const std::string& name() const {
    return name_;
  }

  // Numbers of type Scalar are passed through: they only become kernel arguments, and planners do not see their value.
  //   passed_through: arguments of type int or float that are passed through, too.
  //   by_value: Scalar arguments that are not passed through.
  //   sizes: integer arguments that are symbolic in traces, like arguments of type SymInt.
  //   checks: conditions that hold in every planned or replayed call. If one does not hold, the CPU kernel raises the
  //     error.
  void set_planner(
      std::unique_ptr<Planner> planner,
      const std::vector<std::string>& passed_through,
      const std::vector<std::string>& by_value,
      const std::vector<std::string>& sizes,
      const std::vector<NumberCheck>& checks);

  // Runs the operator on the stack: replays a plan, calls the planner, or runs the fallback.
  void run(torch::jit::Stack* stack);

  // Seconds that each part of `times` calls takes, for benchmarks/overhead.py. The arguments must have a plan. The
  // device sleeps meanwhile, for 50 µs per call: a CPU device would otherwise compete for the cores.
  struct Times {
    double call = 0; // the whole call through the dispatcher; what the parts below do not cover is dispatch
    double signature = 0; // computing the signature and finding the plan
    double allocation = 0; // allocating and freeing the plan's memory
    double launch = 0; // launching the plan's kernels
    double results = 0; // creating the result tensors
  };
  Times time(c10::ArrayRef<c10::IValue> arguments, size_t times);

  PlanCache& cache() {
    return cache_;
  }

 private:
  struct Declaration {
    std::vector<ArgumentFacts> facts;
    std::vector<size_t> written; // indices of the arguments that the operator writes
    NumberChecks checks;
    std::unique_ptr<Planner> planner;
  };
  void answer(torch::jit::Stack* stack);
  PlannedCall new_call(c10::DeviceIndex device) const;
  PlannerResult call_planner(
      const Declaration& declaration, c10::ArrayRef<c10::IValue> arguments, PlannedCall& call, FallbackReason& left);
  // Runs the fallback: the C++ kernel that was registered before the planner, PyTorch's composite kernel, or the CPU
  // kernel.
  void run_otherwise(torch::jit::Stack* stack);
  // Runs the planner and puts its results on the stack. Returns the recorded plan.
  std::shared_ptr<const Plan> plan(
      const Declaration& declaration, torch::jit::Stack* stack, PlannedCall& call, bool record);
  std::optional<DynamicShapePlan> trace(
      const Declaration& declaration,
      c10::ArrayRef<c10::IValue> arguments,
      c10::DeviceIndex device,
      std::string& reason);
  // Runs the planner without submitting commands and returns the plan; nullopt if it leaves the call to the fallback.
  std::optional<Plan> dry_run(
      const Declaration& declaration,
      c10::ArrayRef<c10::IValue> arguments,
      c10::DeviceIndex device,
      FallbackReason& left);
  // Runs a call on a stream that is being captured.
  void capture(
      Capture& capture,
      const Declaration& declaration,
      torch::jit::Stack* stack,
      PlannedCall& call,
      const Signature& signature);
  // Rehearses the call, and throws if the result differs from the plan.
  void check(
      const Declaration& declaration, c10::ArrayRef<c10::IValue> arguments, const PlannedCall& call, const Plan& known);

  const c10::OperatorHandle op_;
  const std::string name_;
  const std::vector<size_t> written_lists_;
  const std::optional<int> indices_; // position of the argument `indices`; those on the CPU are copied to the device
  const c10::SafeKernelFunction otherwise_;
  bool falls_back_ = false; // run_otherwise() runs the CPU kernel, not otherwise_
  const char* outcome_otherwise_ = ""; // what run_otherwise() does, for PlanEvent::outcome
  std::atomic<const Declaration*> declaration_{nullptr}; // never freed: running calls may still use it
  std::atomic<bool> reads_tf32_{false}; // whether float32_in_tf32() is a part of signatures
  PlanCache cache_;
};

// The operator's PlannedOperator, created and registered for PrivateUse1 on first use. Throws ValueError for an unknown
// name.
PlannedOperator& planned_operator(const std::string& name);
// Visits every PlannedOperator.
void for_each_planned_operator(const std::function<void(PlannedOperator&)>& visit);

// One call of a planned operator, as reported to torch_backplane.plans.explain.
struct PlanEvent {
  std::string operator_name;
  std::string arguments;
  std::string outcome; // "replayed", "planned", …
  std::string plan;
};
// Appends this thread's events to `events` from now on; nullptr: nowhere. Returns the previous vector.
std::vector<PlanEvent>* listen(std::vector<PlanEvent>* events);

} // namespace backplane
