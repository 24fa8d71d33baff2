// Differences between the supported PyTorch releases (2.11 to 2.15).
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

// torch 2.13 removed named tensors. Earlier releases use this name unqualified in autocast's operator lists.
#if __has_include(<ATen/core/Dimname.h>)
using at::DimnameList;
#endif

// torch 2.12 added large_segment_size_mb.
template <typename Config>
size_t large_segment_size() {
  if constexpr (requires { Config::large_segment_size(); }) {
    return Config::large_segment_size();
  } else {
    return size_t{20} << 20;
  }
}

// torch 2.13 added reserved bytes by private pool.
template <typename Stats, typename Visit>
void with_private_pool_stats(Stats& stats, Visit&& visit) {
  if constexpr (requires { stats.reserved_bytes_by_private_pools; }) {
    visit(stats.reserved_bytes_by_private_pools);
  }
}

// torch 2.13 added the count of requests that are rejected before the device is called.
template <typename Stats>
int64_t num_oom_rejections(const Stats& stats) {
  if constexpr (requires { stats.num_oom_rejections; }) {
    return stats.num_oom_rejections;
  } else {
    return 0;
  }
}

// torch 2.12 added the type of coalesced calls of reduce_scatter_tensor.
template <typename OpType>
constexpr OpType reduce_scatter_tensor_coalesced() {
  if constexpr (requires { OpType::REDUCE_SCATTER_TENSOR_COALESCED; }) {
    return OpType::REDUCE_SCATTER_TENSOR_COALESCED;
  } else {
    return OpType::COALESCED;
  }
}

// Autograd nodes are held by c10::intrusive_ptr since torch 2.13, by std::shared_ptr before. `Pointer` is that type.
template <typename Pointer, typename Node, typename... Arguments>
Pointer make_node(Arguments&&... arguments) {
  if constexpr (requires { typename Pointer::weak_type; }) {
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
  }
}

} // namespace backplane::compat
