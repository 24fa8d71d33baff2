// Records the planner's actions as a plan.
//
// A recorder is active in the planner's thread while the planner runs. Each action is recorded where it is performed:
// allocations and frees in allocator.cpp, launches in planner_call.cpp, copies within the device in copy.cpp. Code that
// does something a replay cannot repeat calls `cannot_replay`.
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
  // `dry`: commands are recorded but not submitted.
  Recorder(PlannedCall& call, bool dry);
  ~Recorder() override;
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // The active recorder of this thread; nullptr if there is none.
  static Recorder* active() noexcept {
    return static_cast<Recorder*>(active_);
  }

  // Deactivates the recorder and returns the plan with the operator's results.
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
  // Takes random numbers. Returns the index of the seed among the call's numbers; the offset follows it.
  uint32_t take_random(uint64_t count);
  // Adds memory that the plan keeps and that its launches can use, such as a table of constants.
  void keep(const at::Tensor& tensor);
  void cannot_replay(std::string reason) override;

  // The plan address of a tensor's first element. Calls cannot_replay if the plan cannot refer to its memory.
  Address locate(const at::Tensor& tensor);

 private:
  ResultTensor result(const at::Tensor& tensor);

  PlannedCall& call_;
  const bool dry_;
  Recording* const outer_;
  Plan plan_;
  ska::flat_hash_map<const void*, uint32_t> live_; // live allocations: start address -> index
};

// The dynamic scope of one planner call. A planner that calls operators has their planners' scopes nested in its own.
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

  // The innermost scope of this thread; nullptr if no planner runs.
  static PlannerScope* innermost() noexcept {
    return static_cast<PlannerScope*>(innermost_);
  }

  PlannedCall& call() const {
    return call_;
  }
  // Whether the planner has advanced the generator or written to an argument that the operator reads. The fallback can
  // then no longer compute the call.
  bool has_effect() const {
    return has_effect_;
  }

  // float32_in_tf32() (signature.h), which becomes a part of the signatures of all calls that are being planned.
  static uint64_t read_tf32();

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
