// A plan that serves every shape of a class of calls: an exact plan in which numbers are computed by a tape.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "plans/plan.h"
#include "plans/tape.h"

namespace backplane {

// A number of a plan that a slot of the tape holds.
struct Patch {
  enum class Field : uint8_t {
    Bytes, // of an AllocateStep or CopyStep
    Offset, // of the address of argument or memory `index`; of a copy's destination (0) or source (1)
    Number, // of argument `index` of a launch or of a library's function, or number `index` of host work, as the dtype
    HostSize, // of host work, argument `index`, tensor `element` if that is a list: dimension `dimension`
    HostStride,
    Items, // of a launch, in dimension `index`
    Random, // how many random numbers the use `step` takes
    Size, // of result `step`, dimension `index`
    Stride,
    Start // the result's offset
  };
  Field field;
  uint32_t step; // or result, or use of random numbers
  uint32_t index;
  uint32_t slot;
  c10::ScalarType dtype = c10::ScalarType::Undefined; // of a Number: what the parameter has
  bool is_float = false; // of a Number: the slot holds a double
  uint32_t element = 0; // of a result that is a list: which tensor
  uint32_t dimension = 0; // of host work
};

class DynamicShapePlan {
 public:
  Plan plan; // for the sizes that it was made of
  TapeProgram tape;
  std::vector<Patch> patches;

  // The plan for these sizes; nullptr where a guard does not hold or a number fits nowhere. Safe in any thread.
  std::shared_ptr<const Plan> instantiate(c10::ArrayRef<int64_t> sizes) const;

 private:
  // A copy of the plan that nobody uses, to be patched for the next sizes: making one costs more than patching it.
  class Spare {
   public:
    Spare() = default;
    Spare(const Spare&) = delete;
    Spare& operator=(const Spare&) = delete;
    ~Spare() {
      delete plan_.load();
    }

    std::unique_ptr<Plan> take() {
      return std::unique_ptr<Plan>(plan_.exchange(nullptr));
    }
    void give_back(const Plan* plan) {
      delete plan_.exchange(const_cast<Plan*>(plan)); // given out as const, made as not
    }

   private:
    std::atomic<Plan*> plan_{nullptr};
  };

  bool patch(const TapeProgram::Slots& slots, Plan& made) const; // false where a number fits nowhere

  std::shared_ptr<Spare> spare_ = std::make_shared<Spare>(); // given back to by plans that outlive this
};

} // namespace backplane
