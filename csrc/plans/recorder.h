// Takes down what a planner does, as a plan.
//
// A recorder is active in one thread, from the moment a planner is called until it returns. What reaches the device
// meanwhile is noted where it passes: allocations and frees in allocator.cpp, launches in planner_call.cpp, copies within the
// device in copy.cpp. Anything that a replay could not repeat calls `cannot_replay`.
#pragma once

#include <ATen/core/function_schema.h>
#include <c10/util/flat_hash_map.h>

#include <string>
#include <utility>

#include "plans/plan.h"

namespace backplane {

class Recorder {
 public:
  // `dry`: launches and copies are taken down and not done.
  Recorder(PlannedCall& call, bool dry);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Of this thread; nullptr: nobody is recording.
  static Recorder* active() noexcept {
    return active_;
  }

  // What was recorded, and what the operator returned. The recorder stops being active.
  Plan finish(c10::ArrayRef<c10::IValue> results);

  bool is_dry() const {
    return dry_;
  }
  const PlannedCall& call() const {
    return call_;
  }

  void allocated(void* memory, size_t bytes);
  void freed(void* memory);
  void launched(LaunchStep step);
  void given_to_host(HostStep step);
  void checked(CheckStep step);
  void copied(const at::Tensor& destination, const at::Tensor& source, size_t bytes);
  // Takes random numbers; their seed and offset are the call's numbers with this index and the next.
  uint32_t take_random(uint64_t count);
  // Memory that outlives the call and that launches may use, such as a table of constants.
  void keep(const at::Tensor& tensor);
  void cannot_replay(std::string reason);

  // Where a tensor's first element is, in the plan's terms. Calls cannot_replay where it is none of the plan's memory.
  Address locate(const at::Tensor& tensor);

 private:
  ResultTensor result(const at::Tensor& tensor);

  static thread_local Recorder* active_;

  PlannedCall& call_;
  const bool dry_;
  Recorder* const outer_;
  Plan plan_;
  ska::flat_hash_map<const void*, uint32_t> living_; // start of an allocation -> its index
};

// One planner at work. Planners that it calls, by calling operators, are within it.
class PlannerScope {
 public:
  PlannerScope(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments, PlannedCall& call)
      : schema_(schema), arguments_(arguments), call_(call), outer_(innermost_) {
    innermost_ = this;
  }
  ~PlannerScope() {
    innermost_ = outer_;
  }
  PlannerScope(const PlannerScope&) = delete;
  PlannerScope& operator=(const PlannerScope&) = delete;

  // Of this thread; nullptr: no planner is at work.
  static PlannerScope* innermost() noexcept {
    return innermost_;
  }

  PlannedCall& call() const {
    return call_;
  }
  // Whether the generator or arguments that are read are no longer as they were: then nobody else can compute the call.
  bool has_effect() const {
    return has_effect_;
  }

  // Memory is written, or, if not `surely`, given to something that may write to it. Throws where a planner writes to an
  // argument that its schema does not say is written.
  static void wrote(const c10::Storage& memory, bool surely = true) {
    if (innermost_ != nullptr) {
      innermost_->note_write(memory.unsafeGetStorageImpl(), surely);
    }
  }
  static void took_random_numbers() {
    for (auto* scope = innermost_; scope != nullptr; scope = scope->outer_) {
      scope->has_effect_ = true;
    }
  }

 private:
  void note_write(const c10::StorageImpl* storage, bool surely);
  bool reads(const c10::StorageImpl* storage) const;

  static thread_local PlannerScope* innermost_;

  const c10::FunctionSchema& schema_;
  const c10::ArrayRef<c10::IValue> arguments_;
  PlannedCall& call_;
  PlannerScope* const outer_;
  bool has_effect_ = false;
};

// To be called by whatever a replay could not repeat; `what` in words.
inline void note_not_replayable(const char* what) {
  if (auto* recorder = Recorder::active()) {
    recorder->cannot_replay(what);
  }
}

} // namespace backplane
