// Operators that have a planner: the boxed function that PyTorch calls for them.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <array>
#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "plans/any_shape_plan.h"
#include "plans/number_checks.h"
#include "plans/plan.h"
#include "plans/signature.h"

namespace backplane {

// What calls the Python side (planner_call.cpp): the planner, on what the operator was given. Returns what it returned, one
// value for each of the schema's; nullopt where it left the call to the CPU, for `reason`.
using PlannerResult = std::optional<std::vector<c10::IValue>>;
class Planner {
 public:
  virtual ~Planner() = default;
  virtual PlannerResult call(
      const c10::FunctionSchema& schema,
      c10::ArrayRef<c10::IValue> arguments,
      const std::vector<ArgumentFacts>& facts,
      PlannedCall& call,
      std::string& reason) = 0;
  // What the planner would do, with sizes left open: without effect, and nullopt where that cannot be told, for `reason`.
  virtual std::optional<AnyShapePlan> trace(
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

struct PlanCounts {
  uint64_t replays = 0;
  uint64_t planner_calls = 0;
  uint64_t unplannable_calls = 0; // of planner_calls, and of fallbacks that a planner asked for
  uint64_t evictions = 0;
  uint64_t any_shape_replays = 0; // beside replays
  uint64_t traces = 0; // attempts to make a plan for any shape
  size_t classes = 0; // of calls that met a second shape
  size_t any_shape_classes = 0; // of these that have a plan for any shape
  size_t plans = 0; // held now
};

class PlannedOperator {
 public:
  explicit PlannedOperator(const c10::OperatorHandle& op);

  const std::string& name() const {
    return name_;
  }

  // Numbers of type Scalar are passed through: they become kernel arguments only, and planners do not see their value. Those
  // of the arguments `passed_through` (type int or float) are, too, and those of the arguments `by_value` are not. Integers
  // of the arguments `sizes` are left open in plans for any shape, like those of type SymInt.
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

  PlanCounts counts() const;
  // Each reason why calls could not be planned.
  std::vector<std::string> reasons() const;
  // Of each class that met a second shape and has no plan for any shape.
  std::vector<std::string> reasons_for_exact() const;
  void clear(); // forgets plans, and sets the counts to 0

 private:
  struct Declaration {
    std::vector<ArgumentFacts> facts;
    std::vector<size_t> written; // the arguments that are
    NumberChecks checks;
    std::unique_ptr<Planner> planner;
  };
  struct Entry {
    Signature signature;
    std::shared_ptr<const Plan> plan;
  };
  void answer(torch::jit::Stack* stack);
  // What no planner does: by the kernel of ours that there was before planners, by PyTorch's composition, or on the CPU.
  void run_otherwise(torch::jit::Stack* stack);
  // Calls that differ in sizes only.
  struct Class {
    c10::SmallVector<uint64_t, 32> words;
    std::vector<std::shared_ptr<const AnyShapePlan>> plans;
    uint32_t shapes = 0; // that were planned
    uint32_t traces = 0;
    uint32_t unplannable = 0; // calls in a row that no plan can repeat
    std::string reason; // why there is no plan for any shape, of the last call that was planned
    c10::SmallVector<int64_t, 48> last_sizes; // of the last call that was planned, and its plan
    std::shared_ptr<const Plan> last_plan;
  };
  std::shared_ptr<const Plan> find(const Signature& signature);
  // The plan of the class that holds for these sizes, made for them; nullptr where there is none.
  std::shared_ptr<const Plan> find_any_shape(const Signature& signature);
  // Whether a plan of the call may come out: not where calls of the class have shown that none can repeat them.
  bool is_to_be_recorded(const Signature& signature);
  // Whether the class has met another shape and may be traced once more.
  bool is_to_be_traced(const Signature& signature);
  // Notes what came of a trace, if there was one, beside the plan of the same call: the two have to say the same, for this
  // call and for the last one of the class, as far as the traced plan holds for it.
  void insert_into_class(
      const Signature& signature, const std::shared_ptr<const Plan>& fresh, std::optional<AnyShapePlan> traced,
      std::string reason);
  // Made where there is none, for which another one may be evicted; with the lock held.
  std::list<Class>::iterator class_of(const Signature& signature, std::list<Class>& evicted);
  void insert(Signature signature, std::shared_ptr<const Plan> plan);
  // Runs the planner and leaves its results on the stack; returns what was recorded.
  std::shared_ptr<const Plan> plan(
      const Declaration& declaration, torch::jit::Stack* stack, PlannedCall& call, bool record);
  std::optional<AnyShapePlan> trace(
      const Declaration& declaration, c10::ArrayRef<c10::IValue> arguments, c10::DeviceIndex device, std::string& reason);
  // Runs the planner without effect, and throws where it would do something else than the plan.
  void check(const Declaration& declaration, c10::ArrayRef<c10::IValue> arguments, const PlannedCall& call, const Plan& known);

  const c10::OperatorHandle op_;
  const std::string name_;
  const std::vector<size_t> written_lists_;
  const c10::SafeKernelFunction otherwise_;
  bool falls_back_ = false; // instead
  const char* outcome_otherwise_ = ""; // in words
  std::atomic<const Declaration*> declaration_{nullptr}; // lives as long as the process, for calls under way

  mutable std::mutex lock_; // of what follows
  std::list<Entry> entries_; // the latest used first
  std::unordered_multimap<uint64_t, std::list<Entry>::iterator> by_hash_;
  std::list<Class> classes_; // the latest used first
  std::unordered_multimap<uint64_t, std::list<Class>::iterator> classes_by_hash_;
  // Hashes of signatures that plans for any shape served; the second time they get plans of their own.
  std::array<uint64_t, 256> lately_{};
  PlanCounts counts_;
  std::vector<std::string> reasons_;
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
