// The plans of one operator, by signature and by class of calls. Bounded in size and thread-safe.
#pragma once

#include <array>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "plans/dynamic_shape_plan.h"
#include "plans/plan.h"
#include "plans/signature.h"

namespace backplane {

struct PlanCounts {
  uint64_t replays = 0;
  uint64_t planner_calls = 0;
  uint64_t unplannable_calls = 0; // calls that cannot be replayed: planner runs and fallbacks
  uint64_t evictions = 0;
  uint64_t dynamic_shape_replays = 0; // not included in `replays`
  uint64_t traces = 0; // attempts to make a dynamic-shape plan
  size_t classes = 0; // with recorded calls of more than one shape
  size_t dynamic_shape_classes = 0; // with a dynamic-shape plan
  size_t plans = 0; // currently in the cache
};

class PlanCache {
 public:
  // The plan for exactly this signature; nullptr if there is none.
  std::shared_ptr<const Plan> find(const Signature& signature);
  void insert(Signature signature, std::shared_ptr<const Plan> plan);
  // Instantiates a dynamic-shape plan of the class for these sizes; nullptr if none has guards that hold.
  std::shared_ptr<const Plan> find_dynamic_shape(const Signature& signature);
  // Whether to record the call. False if earlier calls of the class could not be replayed.
  bool is_to_be_recorded(const Signature& signature);
  // Whether to trace the call: the class already has a plan for another shape and has attempts left. Counts the trace.
  bool is_to_be_traced(const Signature& signature);
  // Adds a recorded plan to its class, and the dynamic-shape plan if the same call was traced. The traced plan is
  // accepted only if it agrees with `fresh`, and with the class's previous plan where its guards hold. `reason`: why
  // the trace failed; empty if it succeeded or there was none.
  void insert_into_class(
      const Signature& signature,
      const std::shared_ptr<const Plan>& fresh,
      std::optional<DynamicShapePlan> traced,
      std::string reason);

  void count_planned(const Plan& recorded); // counts a planner call, or its fallback
  void count_unplannable(); // counts a call that could not be replayed
  PlanCounts counts() const;
  // The distinct reasons why calls could not be replayed.
  std::vector<std::string> reasons() const;
  // For each class with several shapes and no dynamic-shape plan: why it has none.
  std::vector<std::string> reasons_for_exact() const;
  void clear(); // drops all plans and resets the counts to 0

 private:
  using DynamicShapePlans = std::vector<std::shared_ptr<const DynamicShapePlan>>;

  struct Entry {
    Signature signature;
    std::shared_ptr<const Plan> plan;
  };
  // Calls that differ only in sizes.
  struct Class {
    c10::SmallVector<uint64_t, 32> words;
    std::shared_ptr<const DynamicShapePlans> plans; // one for each set of guards; most recently used first
    uint32_t shapes = 0; // number of recorded calls
    uint32_t traces = 0;
    uint32_t unplannable = 0; // consecutive calls that could not be replayed
    std::string reason; // why the last trace gave no plan, or why a call could not be replayed
    c10::SmallVector<int64_t, 48> last_sizes; // of the last recorded call
    std::shared_ptr<const Plan> last_plan; // of the same call
  };
  // Finds or creates the class. Moves a class that is evicted for it to `evicted`. The caller holds lock_.
  std::list<Class>::iterator class_of(const Signature& signature, std::list<Class>& evicted);

  mutable std::mutex lock_; // guards all members below
  std::list<Entry> entries_; // most recently used first
  std::unordered_multimap<uint64_t, std::list<Entry>::iterator> by_hash_;
  std::list<Class> classes_; // most recently used first
  std::unordered_multimap<uint64_t, std::list<Class>::iterator> classes_by_hash_;
  // Hashes of signatures that dynamic-shape plans served recently. A signature that occurs again gets an exact plan.
  std::array<uint64_t, 256> recent_{};
  PlanCounts counts_;
  std::vector<std::string> reasons_;
};

} // namespace backplane
