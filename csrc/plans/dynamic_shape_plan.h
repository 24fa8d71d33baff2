// A plan for many shapes of a class of calls: an exact plan, and a tape that computes its size-dependent numbers.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "plans/plan.h"
#include "plans/tape.h"

namespace backplane {

// A number in a plan that is replaced by the value of a tape slot.
struct Patch {
  enum class Field : uint8_t {
    Bytes, // of an AllocateStep or CopyStep
    Offset, // of the address of argument or memory `index`; for a copy: destination (0) or source (1)
    Number, // argument `index` of a launch or library call, or number `index` of a host callback, converted to `dtype`
    HostSize, // size `dimension` of a host callback's argument `index` (of tensor `element`, if that is a list)
    HostStride, // stride, likewise
    Items, // global size of a launch in dimension `index`
    Random, // the number of random numbers that RandomUse `step` takes
    Size, // of result `step` (of tensor `element`, if that is a list), dimension `index`
    Stride, // likewise
    Start // offset of result `step`
  };
  Field field;
  uint32_t step; // index into steps, results or random, depending on the field
  uint32_t index;
  uint32_t slot;
  c10::ScalarType dtype = c10::ScalarType::Undefined; // Number: the parameter's dtype
  bool is_float = false; // Number: the slot holds the bits of a double
  uint32_t element = 0; // which tensor of a list
  uint32_t dimension = 0; // HostSize and HostStride
};

class DynamicShapePlan {
 public:
  Plan plan; // for the sizes of the traced call
  TapeProgram tape;
  std::vector<Patch> patches;

  // Returns the plan for these sizes, or nullptr if a guard does not hold or a computed number is out of range.
  // Thread-safe.
  std::shared_ptr<const Plan> instantiate(c10::ArrayRef<int64_t> sizes) const;

 private:
  // Keeps one unused copy of the plan to patch for the next sizes: copying costs more than patching.
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
      delete plan_.exchange(const_cast<Plan*>(plan)); // created as non-const in instantiate()
    }

   private:
    std::atomic<Plan*> plan_{nullptr};
  };

  bool patch(const TapeProgram::Slots& slots, Plan& made) const; // false if a number is out of range

  std::shared_ptr<Spare> spare_ = std::make_shared<Spare>(); // shared: instantiated plans can outlive this object
};

} // namespace backplane
