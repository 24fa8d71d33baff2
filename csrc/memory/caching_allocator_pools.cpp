// Private pools, of torch.bp.MemPool and of graphs.
#include "memory/caching_allocator.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace backplane {

namespace {

std::string name_of(c10::MempoolId_t id) {
  return c10::str("(", id.first, ", ", id.second, ")");
}

} // namespace

c10::MempoolId_t new_pool_id(bool made_by_user) {
  static std::atomic<c10::CaptureId_t> next{1};
  const c10::CaptureId_t number = next++;
  return made_by_user ? c10::MempoolId_t{0, number} : c10::MempoolId_t{number, 0};
}

void DeviceCachingAllocator::create_or_retain_pool(c10::MempoolId_t id) {
  Lock lock(mutex_);
  auto& pool = private_pools_[id];
  if (pool == nullptr) {
    pool = std::make_unique<PrivatePool>(id);
  }
  pool->use_count += 1;
}

void DeviceCachingAllocator::release_pool(c10::MempoolId_t id) {
  Lock lock(mutex_);
  auto entry = private_pools_.find(id);
  TORCH_CHECK(
      entry != private_pools_.end() && entry->second->use_count > 0, "memory pool ", name_of(id),
      " is not in use on bp:", static_cast<int>(index_));
  // The pool can still contain tensors. At 0, its segments can be returned to the device as they become free.
  entry->second->use_count -= 1;
}

void DeviceCachingAllocator::set_pool_options(c10::MempoolId_t id, bool use_on_oom, bool no_split) {
  Lock lock(mutex_);
  auto entry = private_pools_.find(id);
  TORCH_CHECK(entry != private_pools_.end(), "no memory pool ", name_of(id), " on bp:", static_cast<int>(index_));
  entry->second->use_on_oom = use_on_oom;
  entry->second->no_split = no_split;
}

void DeviceCachingAllocator::set_pool_source(c10::MempoolId_t id, MemorySource source) {
  check_takes_any_memory();
  Lock lock(mutex_);
  auto entry = private_pools_.find(id);
  TORCH_CHECK(entry != private_pools_.end(), "no memory pool ", name_of(id), " on bp:", static_cast<int>(index_));
  entry->second->source = source;
}

int DeviceCachingAllocator::pool_use_count(c10::MempoolId_t id) {
  Lock lock(mutex_);
  auto entry = private_pools_.find(id);
  return entry != private_pools_.end() ? entry->second->use_count : 0;
}

void DeviceCachingAllocator::begin_allocate_to_pool(c10::MempoolId_t id, std::function<bool(c10::StreamId)> filter) {
  create_or_retain_pool(id);
  Lock lock(mutex_);
  active_pools_.emplace_back(id, std::move(filter));
}

void DeviceCachingAllocator::end_allocate_to_pool(c10::MempoolId_t id) {
  Lock lock(mutex_);
  auto entry = std::find_if(
      active_pools_.rbegin(), active_pools_.rend(), [&](const auto& active) { return active.first == id; });
  TORCH_CHECK(
      entry != active_pools_.rend(), "memory pool ", name_of(id),
      " is not being allocated to on bp:", static_cast<int>(index_));
  active_pools_.erase(std::next(entry).base());
}

} // namespace backplane
