// Records the planner's actions as a plan.
//
// A recorder is active in one thread, from the moment a planner is called until it returns. What reaches the device
// meanwhile is recorded where it passes: allocations and frees in allocator.cpp, launches in planner_call.cpp, copies within the
// device in copy.cpp. Anything that a replay could not repeat calls `cannot_replay`.
#pragma once

#include <ATen/core/function_schema.h>
#include <c10/util/flat_hash_map.h>

#include <string>
#include <utility>

#include "devices/recording.h"
#include "plans/plan.h"

namespace backplane {

class Recorder final : public Recording {
 public:
  // `dry`: commands are recorded and not submitted.
  Recorder(PlannedCall& call, bool dry);
  ~Recorder() override;
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Of this thread; nullptr: nobody is recording.
  static Recorder* active() noexcept {
    return static_cast<Recorder*>(active_);
  }

  // What was recorded, and what the operator returned. The recorder stops being active.
  Plan finish(c10::ArrayRef<c10::IValue> results);

  bool is_dry() const {
    return dry_;
  }
  const PlannedCall& call() const {
    return call_;
  }

  void allocated(void* memory, size_t bytes) override;
  void freed(void* memory) override;
  void add(Step step) {
    plan_.steps.push_back(std::move(step));
  }
  void copied(const at::Tensor& destination, const at::Tensor& source, size_t bytes);
  // Takes random numbers; their seed and offset are the call's numbers with this index and the next.
  uint32_t take_random(uint64_t count);
  // Memory that outlives the call and that launches may use, such as a table of constants.
  void keep(const at::Tensor& tensor);
  void cannot_replay(std::string reason) override;

  // Where a tensor's first element is, in the plan's terms. Calls cannot_replay where it is none of the plan's memory.
  Address locate(const at::Tensor& tensor);

 private:
  ResultTensor result(const at::Tensor& tensor);

  PlannedCall& call_;
  const bool dry_;
  Recording* const outer_;
  Plan plan_;
  ska::flat_hash_map<const void*, uint32_t> living_; // start of an allocation -> its index
};

// One planner at work. Planners that it calls, by calling operators, are within it.
class PlannerScope final : public WriteWatch {
 public:
  PlannerScope(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments, PlannedCall& call)
      : schema_(schema), arguments_(arguments), call_(call), outer_(innermost()) {
    innermost_ = this;
  }
  ~PlannerScope() override {
    innermost_ = outer_;
  }
  PlannerScope(const PlannerScope&) = delete;
  PlannerScope& operator=(const PlannerScope&) = delete;

  // Of this thread; nullptr: no planner is at work.
  static PlannerScope* innermost() noexcept {
    return static_cast<PlannerScope*>(innermost_);
  }

  PlannedCall& call() const {
    return call_;
  }
  // Whether the generator or arguments that are read are no longer as they were: then nobody else can compute the call.
  bool has_effect() const {
    return has_effect_;
  }

  static void took_random_numbers() {
    for (auto* scope = innermost(); scope != nullptr; scope = scope->outer_) {
      scope->has_effect_ = true;
    }
  }

 private:
  void note_write(const c10::StorageImpl* storage, bool surely) override;
  bool reads(const c10::StorageImpl* storage) const;

  const c10::FunctionSchema& schema_;
  const c10::ArrayRef<c10::IValue> arguments_;
  PlannedCall& call_;
  PlannerScope* const outer_;
  bool has_effect_ = false;
};

} // namespace backplane
