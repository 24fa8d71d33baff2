// A cache of objects that a library needs for each kind of call, such as plans of Fourier transforms.
#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace backplane {

// Evicts the least recently used objects. Thread-safe. An evicted object is destroyed when its last user releases it.
template <typename Key, typename Value>
class LruCache {
 public:
  explicit LruCache(size_t max_size) : max_size_(max_size) {}

  // Returns the object of a key. Calls `make` if there is none.
  std::shared_ptr<Value> get(const Key& key, const std::function<std::shared_ptr<Value>()>& make) {
    Entries evicted; // destroyed after the lock is released
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = places_.find(key);
    if (found != places_.end()) {
      entries_.splice(entries_.begin(), entries_, found->second);
      return found->second->second;
    }
    auto made = make();
    entries_.emplace_front(key, made);
    places_[key] = entries_.begin();
    shrink(evicted);
    return made;
  }

  size_t size() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return entries_.size();
  }

  size_t max_size() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return max_size_;
  }

  void limit(size_t most) {
    Entries evicted;
    const std::lock_guard<std::mutex> guard(mutex_);
    max_size_ = most;
    shrink(evicted);
  }

 private:
  using Entries = std::list<std::pair<Key, std::shared_ptr<Value>>>;

  void shrink(Entries& evicted) {
    while (entries_.size() > max_size_) {
      places_.erase(entries_.back().first);
      evicted.splice(evicted.begin(), entries_, std::prev(entries_.end()));
    }
  }

  std::mutex mutex_;
  Entries entries_; // most recently used first
  std::map<Key, typename Entries::iterator> places_;
  size_t max_size_;
};

} // namespace backplane
