// The plans of one operator, by signature, and what is known of the classes of calls: bounded, and safe in any thread.
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
  uint64_t unplannable_calls = 0; // of planner_calls, and of fallbacks that a planner asked for
  uint64_t evictions = 0;
  uint64_t dynamic_shape_replays = 0; // beside replays
  uint64_t traces = 0; // attempts to make a dynamic-shape plan
  size_t classes = 0; // of calls that met a second shape
  size_t dynamic_shape_classes = 0; // of these that have a dynamic-shape plan
  size_t plans = 0; // held now
};

class PlanCache {
 public:
  // The plan of this very signature; nullptr where there is none.
  std::shared_ptr<const Plan> find(const Signature& signature);
  void insert(Signature signature, std::shared_ptr<const Plan> plan);
  // The plan of the class that holds for these sizes, made for them; nullptr where there is none.
  std::shared_ptr<const Plan> find_dynamic_shape(const Signature& signature);
  // Whether a plan of the call may come out: not where calls of the class have shown that none can repeat them.
  bool is_to_be_recorded(const Signature& signature);
  // Whether the class has met another shape and may be traced once more.
  bool is_to_be_traced(const Signature& signature);
  // Notes what came of a trace, if there was one, beside the plan of the same call: the two have to say the same, for this
  // call and for the last one of the class, as far as the traced plan holds for it.
  void insert_into_class(
      const Signature& signature, const std::shared_ptr<const Plan>& fresh, std::optional<DynamicShapePlan> traced,
      std::string reason);

  void count_planned(const Plan& recorded); // what came of a planner's run
  void count_unplannable(); // a call that got no planner's run
  PlanCounts counts() const;
  // Each reason why calls could not be planned.
  std::vector<std::string> reasons() const;
  // Of each class that met a second shape and has no dynamic-shape plan.
  std::vector<std::string> reasons_for_exact() const;
  void clear(); // forgets plans, and sets the counts to 0

 private:
  using DynamicShapePlans = std::vector<std::shared_ptr<const DynamicShapePlan>>;

  struct Entry {
    Signature signature;
    std::shared_ptr<const Plan> plan;
  };
  // Calls that differ in sizes only.
  struct Class {
    c10::SmallVector<uint64_t, 32> words;
    std::shared_ptr<const DynamicShapePlans> plans; // what planners decide otherwise has one each; the latest used first
    uint32_t shapes = 0; // that were planned
    uint32_t traces = 0;
    uint32_t unplannable = 0; // calls in a row that no plan can repeat
    std::string reason; // why the last trace gave no plan, or why there was none
    c10::SmallVector<int64_t, 48> last_sizes; // of the last call that was planned, and its plan
    std::shared_ptr<const Plan> last_plan;
  };
  // Made where there is none, for which another one may be evicted; with the lock held.
  std::list<Class>::iterator class_of(const Signature& signature, std::list<Class>& evicted);

  mutable std::mutex lock_; // of what follows
  std::list<Entry> entries_; // the latest used first
  std::unordered_multimap<uint64_t, std::list<Entry>::iterator> by_hash_;
  std::list<Class> classes_; // the latest used first
  std::unordered_multimap<uint64_t, std::list<Class>::iterator> classes_by_hash_;
  // Hashes of signatures that dynamic-shape plans served; the second time they get plans of their own.
  std::array<uint64_t, 256> lately_{};
  PlanCounts counts_;
  std::vector<std::string> reasons_;
};

} // namespace backplane
