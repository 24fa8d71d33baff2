#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <vector>

namespace backplane {

// Where results are wanted that PyTorch's CPU kernels return in memory of their own; nothing where one is not.
using Places = std::vector<std::optional<at::Tensor>>;

// From its making to its end, what kernels ask for in this thread may be one of the places, so that results are computed there,
// and need not be copied: a gradient of a convolution or what a recurrent layer saves has megabytes, and fresh memory for it is
// cleared by the system, page by page. A place is given once, to who asks for as many elements of its dtype, contiguous; a place
// of bytes also to who asks for fewer. Kernels may use it for something else than the result that it is for: `deliver` looks.
class Offer {
 public:
  explicit Offer(const Places& places);
  ~Offer();
  Offer(const Offer&) = delete;
  Offer& operator=(const Offer&) = delete;

  // The memory, if there is a place for it.
  std::optional<at::Tensor> take(at::IntArrayRef sizes, at::ScalarType dtype);

 private:
  std::vector<at::Tensor> places_;
  Offer* before_;
  c10::impl::IncludeDispatchKeyGuard asked_;
};

// Copies results to their places, as far as they are not there.
void deliver(const Places& places, std::vector<at::Tensor> results);

} // namespace backplane
