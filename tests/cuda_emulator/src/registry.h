// Objects by handle. A handle is the object's address, and valid until the object is removed.

#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

template <class T>
class Registry {
 public:
  T* add(std::shared_ptr<T> object) {
    std::lock_guard lock(mutex_);
    T* handle = object.get();
    objects_[handle] = std::move(object);
    return handle;
  }

  // Returns null for an invalid handle.
  std::shared_ptr<T> find(const T* handle) {
    std::lock_guard lock(mutex_);
    const auto at = objects_.find(handle);
    return at == objects_.end() ? nullptr : at->second;
  }

  std::shared_ptr<T> remove(const T* handle) {
    std::lock_guard lock(mutex_);
    const auto at = objects_.find(handle);
    if (at == objects_.end()) {
      return nullptr;
    }
    std::shared_ptr<T> object = std::move(at->second);
    objects_.erase(at);
    return object;
  }

  template <class Condition>
  void remove_if(Condition condition) {
    std::vector<std::shared_ptr<T>> removed; // destroyed without the lock
    std::lock_guard lock(mutex_);
    for (auto at = objects_.begin(); at != objects_.end();) {
      if (condition(*at->second)) {
        removed.push_back(std::move(at->second));
        at = objects_.erase(at);
      } else {
        ++at;
      }
    }
  }

  // The objects of a type. Never destroyed, because threads use them until the process ends.
  static Registry& all() {
    static Registry& registry = *new Registry;
    return registry;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const T*, std::shared_ptr<T>> objects_;
};

template <class T>
std::shared_ptr<T> find(const T* handle) {
  return Registry<T>::all().find(handle);
}
