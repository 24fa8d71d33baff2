// Differences between the supported PyTorch releases (2.11 to 2.15), all in one place.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <memory>
#include <utility>

#if __has_include(<ATen/core/Dimname.h>)
#include <ATen/core/Dimname.h>
#endif

namespace backplane::compat {

// Named tensors went with torch 2.13. Before, the lists of autocast's operators name this without its namespace.
#if __has_include(<ATen/core/Dimname.h>)
using at::DimnameList;
#endif

// large_segment_size_mb came with torch 2.12.
template <typename Config>
size_t large_segment_size() {
  if constexpr (requires { Config::large_segment_size(); }) {
    return Config::large_segment_size();
  } else {
    return size_t{20} << 20;
  }
}

// Reserved bytes by private pool came with torch 2.12.
template <typename Stats, typename Visit>
void with_private_pool_stats(Stats& stats, Visit&& visit) {
  if constexpr (requires { stats.reserved_bytes_by_private_pools; }) {
    visit(stats.reserved_bytes_by_private_pools);
  }
}

// Rejections before the device is asked came with torch 2.13.
template <typename Stats>
int64_t num_oom_rejections(const Stats& stats) {
  if constexpr (requires { stats.num_oom_rejections; }) {
    return stats.num_oom_rejections;
  } else {
    return 0;
  }
}

// Nodes of the autograd graph are held by intrusive_ptr since torch 2.13, by shared_ptr before. `Pointer` is what holds one.
template <typename Pointer, typename Node, typename... Arguments>
Pointer make_node(Arguments&&... arguments) {
  if constexpr (requires { typename Pointer::weak_type; }) {
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
  }
}

} // namespace backplane::compat
