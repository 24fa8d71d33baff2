#include "plans/plan_cache.h"

#include <algorithm>
#include <utility>

namespace backplane {
namespace {

constexpr size_t kMaxPlans = 1024; // per operator; the least recently used plans are evicted
constexpr size_t kMaxClasses = 1024; // likewise
constexpr size_t kMaxDynamicShapePlans = 32; // per class
constexpr uint32_t kMaxTraces = 64; // per class, including failed ones
constexpr uint32_t kMaxFutileTraces = 2; // per class without a dynamic-shape plan
// After kMaxUnplannable consecutive calls of a class that cannot be replayed, its calls are not recorded: without a
// recording, the operators that the planner calls use their own plans. Every kUnplannableAgain-th call is still
// recorded, because whether a call can be replayed can depend on its sizes.
constexpr uint32_t kMaxUnplannable = 2;
constexpr uint32_t kUnplannableAgain = 64;

} // namespace

std::shared_ptr<const Plan> PlanCache::find(const Signature& signature) {
  std::lock_guard<std::mutex> guard(lock_);
  const auto [first, last] = by_hash_.equal_range(signature.hash);
  for (auto found = first; found != last; ++found) {
    if (found->second->signature == signature) {
      entries_.splice(entries_.begin(), entries_, found->second);
      counts_.replays += found->second->plan->unplannable.empty();
      return found->second->plan;
    }
  }
  return nullptr;
}

std::list<PlanCache::Class>::iterator PlanCache::class_of(const Signature& signature, std::list<Class>& evicted) {
  const auto hash = hash_of_class(signature);
  const auto [first, last] = classes_by_hash_.equal_range(hash);
  for (auto found = first; found != last; ++found) {
    if (found->second->words == signature.words) {
      classes_.splice(classes_.begin(), classes_, found->second);
      return found->second;
    }
  }
  static const auto none = std::make_shared<const DynamicShapePlans>();
  classes_.push_front({signature.words, none, 0, 0, 0, "", {}, nullptr});
  classes_by_hash_.emplace(hash, classes_.begin());
  if (classes_.size() > kMaxClasses) {
    const auto oldest = std::prev(classes_.end());
    std::erase_if(classes_by_hash_, [&](const auto& one) { return one.second == oldest; });
    evicted.splice(evicted.begin(), classes_, oldest);
  }
  return classes_.begin();
}

std::shared_ptr<const Plan> PlanCache::find_dynamic_shape(const Signature& signature) {
  std::list<Class> evicted; // freed after the lock is released
  std::shared_ptr<const DynamicShapePlans> plans;
  {
    std::lock_guard<std::mutex> guard(lock_);
    plans = class_of(signature, evicted)->plans;
  }
  for (auto plan = plans->begin(); plan != plans->end(); ++plan) {
    const auto made = (*plan)->instantiate(signature.sizes);
    if (made == nullptr) {
      continue;
    }
    bool again = false;
    {
      std::lock_guard<std::mutex> guard(lock_);
      if (const auto before = plan - plans->begin(); before > 0) {
        if (Class& known = *class_of(signature, evicted); known.plans == plans) { // not changed by another thread
          auto reordered = std::make_shared<DynamicShapePlans>(*plans);
          std::rotate(reordered->begin(), reordered->begin() + before, reordered->begin() + before + 1);
          known.plans = std::move(reordered);
        }
      }
      ++counts_.dynamic_shape_replays;
      uint64_t& met = recent_[signature.hash % recent_.size()];
      again = std::exchange(met, signature.hash) == signature.hash;
    }
    if (again) {
      insert(signature, made);
    }
    return made;
  }
  return nullptr;
}

bool PlanCache::is_to_be_traced(const Signature& signature) {
  std::list<Class> evicted; // freed after the lock is released
  std::lock_guard<std::mutex> guard(lock_);
  const Class& known = *class_of(signature, evicted);
  const uint32_t most = known.plans->empty() ? kMaxFutileTraces : kMaxTraces;
  const bool is_repeated = known.last_plan != nullptr && known.last_plan->unplannable.empty();
  if (!is_repeated || known.plans->size() >= kMaxDynamicShapePlans || known.traces >= most) {
    return false;
  }
  ++counts_.traces;
  return true;
}

bool PlanCache::is_to_be_recorded(const Signature& signature) {
  std::list<Class> evicted; // freed after the lock is released
  std::lock_guard<std::mutex> guard(lock_);
  Class& known = *class_of(signature, evicted);
  if (known.unplannable < kMaxUnplannable || ++known.unplannable % kUnplannableAgain == 0) {
    return true;
  }
  ++counts_.unplannable_calls;
  return false;
}

void PlanCache::insert_into_class(
    const Signature& signature,
    const std::shared_ptr<const Plan>& fresh,
    std::optional<DynamicShapePlan> traced,
    std::string reason) {
  std::list<Class> evicted; // freed after the lock is released, like the previous plan in `last`
  std::shared_ptr<const Plan> last = fresh;
  std::lock_guard<std::mutex> guard(lock_);
  Class& known = *class_of(signature, evicted);
  known.traces += traced.has_value() || !reason.empty(); // not counted earlier: the planner may reject the call
  if (traced.has_value()) {
    const auto held_against = [&](const auto& sizes, const Plan& plan, bool has_to_hold) {
      if (!reason.empty()) {
        return;
      }
      const auto made = traced->instantiate(sizes);
      if (made != nullptr || has_to_hold) {
        reason = plan.unplannable.empty() ? difference(made != nullptr ? *made : Plan{}, plan) : plan.unplannable;
      }
    };
    held_against(signature.sizes, *fresh, /*has_to_hold=*/true);
    if (known.last_plan != nullptr) {
      held_against(known.last_sizes, *known.last_plan, /*has_to_hold=*/false);
    }
    if (reason.empty()) {
      auto longer = std::make_shared<DynamicShapePlans>(*known.plans);
      longer->insert(longer->begin(), std::make_shared<const DynamicShapePlan>(std::move(*traced)));
      known.plans = std::move(longer);
    }
  }
  if (reason.empty()) {
    reason = fresh->unplannable;
  }
  if (!reason.empty()) {
    known.reason = std::move(reason);
  }
  known.unplannable = fresh->unplannable.empty() || fresh->falls_back ? 0 : known.unplannable + 1;
  ++known.shapes;
  known.last_sizes.assign(signature.sizes.begin(), signature.sizes.end());
  known.last_plan.swap(last);
}

void PlanCache::insert(Signature signature, std::shared_ptr<const Plan> plan) {
  std::shared_ptr<const Plan> evicted; // freed after the lock is released
  std::lock_guard<std::mutex> guard(lock_);
  const auto hash = signature.hash;
  entries_.push_front({std::move(signature), std::move(plan)});
  by_hash_.emplace(hash, entries_.begin());
  if (entries_.size() > kMaxPlans) {
    const auto oldest = std::prev(entries_.end());
    const auto [first, last] = by_hash_.equal_range(oldest->signature.hash);
    by_hash_.erase(std::find_if(first, last, [&](const auto& one) { return one.second == oldest; }));
    evicted = std::move(oldest->plan);
    entries_.pop_back();
    ++counts_.evictions;
  }
}

PlanCounts PlanCache::counts() const {
  std::lock_guard<std::mutex> guard(lock_);
  PlanCounts counts = counts_;
  counts.plans = entries_.size();
  for (const Class& one : classes_) {
    counts.classes += one.shapes > 1;
    counts.dynamic_shape_classes += !one.plans->empty();
  }
  return counts;
}

std::vector<std::string> PlanCache::reasons_for_exact() const {
  std::lock_guard<std::mutex> guard(lock_);
  std::vector<std::string> found;
  for (const Class& one : classes_) {
    if (one.shapes > 1 && one.plans->empty()) {
      found.push_back(one.reason);
    }
  }
  return found;
}

std::vector<std::string> PlanCache::reasons() const {
  std::lock_guard<std::mutex> guard(lock_);
  return reasons_;
}

void PlanCache::clear() {
  std::list<Entry> gone; // freed after the lock is released: destroying kernels may call the device
  std::list<Class> forgotten;
  std::lock_guard<std::mutex> guard(lock_);
  gone.swap(entries_);
  by_hash_.clear();
  forgotten.swap(classes_);
  classes_by_hash_.clear();
  recent_ = {};
  counts_ = {};
  reasons_.clear();
}

void PlanCache::count_planned(const Plan& recorded) {
  std::lock_guard<std::mutex> guard(lock_);
  counts_.planner_calls += !recorded.falls_back;
  if (recorded.unplannable.empty()) {
    return;
  }
  ++counts_.unplannable_calls;
  if (std::find(reasons_.begin(), reasons_.end(), recorded.unplannable) == reasons_.end()) {
    reasons_.push_back(recorded.unplannable);
  }
}

void PlanCache::count_unplannable() {
  std::lock_guard<std::mutex> guard(lock_);
  ++counts_.unplannable_calls;
}

} // namespace backplane
