// Operators that have a planner: the boxed function that PyTorch calls for them.
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

// What calls the Python side (planner_call.cpp): the planner, on what the operator was given. Returns what it returned, one
// value for each of the schema's; nullopt where it left the call to the CPU.
using PlannerResult = std::optional<std::vector<c10::IValue>>;
struct LeftToCpu {
  std::string reason;
  bool refused = false; // PyTorch refuses the call, and the CPU's kernel has the words
};
class Planner {
 public:
  virtual ~Planner() = default;
  virtual PlannerResult call(
      const c10::FunctionSchema& schema,
      c10::ArrayRef<c10::IValue> arguments,
      const std::vector<ArgumentFacts>& facts,
      PlannedCall& call,
      LeftToCpu& left) = 0;
  // What the planner would do, with sizes left open: without effect, and nullopt where that cannot be told, for `reason`.
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
  Check // plans are replayed, and planners run beside and must say the same
};
void set_plan_mode(PlanMode mode);
PlanMode plan_mode();

// Whether each operator waits until the device is done, so that what a kernel reports is its own call's error.
void set_launch_blocking(bool blocking);

class PlannedOperator {
 public:
  explicit PlannedOperator(const c10::OperatorHandle& op);

  const std::string& name() const {
    return name_;
  }

  // Numbers of type Scalar are passed through: they become kernel arguments only, and planners do not see their value. Those
  // of the arguments `passed_through` (type int or float) are, too, and those of the arguments `by_value` are not. Integers
  // of the arguments `sizes` are left open in dynamic-shape plans, like those of type SymInt.
  // `checks` hold in every call that is planned or replayed; where one does not, the CPU has the words for it.
  void set_planner(
      std::unique_ptr<Planner> planner,
      const std::vector<std::string>& passed_through,
      const std::vector<std::string>& by_value,
      const std::vector<std::string>& sizes,
      const std::vector<NumberCheck>& checks);

  // Runs the operator on the stack: by its plan, by its planner, or on the CPU.
  void run(torch::jit::Stack* stack);

  // Seconds of each part of `times` calls with these arguments, which must have a plan: for benchmarks/overhead.py. The
  // device is held up meanwhile, for 50 µs a call: one that is the processor would take the cores.
  struct Times {
    double call = 0; // all, through the dispatcher; what the others leave is dispatch
    double signature = 0; // and finding the plan
    double allocation = 0; // of what the plan allocates, and freeing it
    double launch = 0; // of the plan's kernels
    double results = 0; // making the tensors
  };
  Times time(c10::ArrayRef<c10::IValue> arguments, size_t times);

  PlanCache& cache() {
    return cache_;
  }

 private:
  struct Declaration {
    std::vector<ArgumentFacts> facts;
    std::vector<size_t> written; // the arguments that are
    NumberChecks checks;
    std::unique_ptr<Planner> planner;
  };
  void answer(torch::jit::Stack* stack);
  // What no planner does: by the kernel of ours that there was before planners, by PyTorch's composition, or on the CPU.
  void run_otherwise(torch::jit::Stack* stack);
  // Runs the planner and leaves its results on the stack; returns what was recorded.
  std::shared_ptr<const Plan> plan(
      const Declaration& declaration, torch::jit::Stack* stack, PlannedCall& call, bool record);
  std::optional<DynamicShapePlan> trace(
      const Declaration& declaration, c10::ArrayRef<c10::IValue> arguments, c10::DeviceIndex device, std::string& reason);
  // What the planner does for a call on the device, without effect. nullopt: it leaves the call to the CPU.
  std::optional<Plan> rehearse(
      const Declaration& declaration, c10::ArrayRef<c10::IValue> arguments, c10::DeviceIndex device, LeftToCpu& left);
  // Answers a call of a stream that is being captured.
  void capture(
      Capture& capture, const Declaration& declaration, torch::jit::Stack* stack, PlannedCall& call,
      const Signature& signature);
  // Rehearses, and throws where the planner would do something else than the plan.
  void check(const Declaration& declaration, c10::ArrayRef<c10::IValue> arguments, const PlannedCall& call, const Plan& known);

  const c10::OperatorHandle op_;
  const std::string name_;
  const std::vector<size_t> written_lists_;
  const c10::SafeKernelFunction otherwise_;
  bool falls_back_ = false; // instead
  const char* outcome_otherwise_ = ""; // in words
  std::atomic<const Declaration*> declaration_{nullptr}; // lives as long as the process, for calls under way
  PlanCache cache_;
};

// The record of an operator, made and registered for PrivateUse1 at the first call. Throws for an unknown name.
PlannedOperator& planned_operator(const std::string& name);
// Visits the operators that have a record.
void for_each_planned_operator(const std::function<void(PlannedOperator&)>& visit);

// What planned operators do, while somebody listens in this thread (torch_backplane.plans.explain).
struct PlanEvent {
  std::string operator_name;
  std::string arguments;
  std::string outcome; // "replayed", "planned", …
  std::string plan;
};
std::vector<PlanEvent>* listen(std::vector<PlanEvent>* events); // nullptr: nobody. Returns who listened before

} // namespace backplane
