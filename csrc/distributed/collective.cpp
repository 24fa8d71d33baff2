#include "distributed/collective.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "devices/device.h"

namespace backplane {
namespace {

// The dtypes of ProcessGroupGloo, MPI and UCC.
bool is_known_to_engines(c10::ScalarType dtype) {
  constexpr c10::ScalarType kKnown[] = {c10::kFloat, c10::kDouble, c10::kHalf, c10::kBFloat16, c10::kChar,
                                        c10::kByte,  c10::kBool,   c10::kInt,  c10::kLong};
  return std::find(std::begin(kKnown), std::end(kKnown), dtype) != std::end(kKnown);
}

template <typename Function, typename Element>
auto each(const std::vector<Element>& elements, const Function& function) {
  std::vector<decltype(function(elements.front()))> results;
  results.reserve(elements.size());
  for (const auto& element : elements) {
    results.push_back(function(element));
  }
  return results;
}

} // namespace

void check_tensor(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.device().is_privateuseone(), "the backplane backend takes bp tensors, but got one on ", tensor.device());
  TORCH_CHECK_VALUE(
      tensor.layout() == c10::kStrided, "the backplane backend takes strided tensors, not ", tensor.layout());
  TORCH_CHECK_VALUE(
      tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous, but got strides ", tensor.strides(),
      " for sizes ", tensor.sizes());
}

void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const char* name) {
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size(), name, " got ", outputs.size(), " outputs for ", inputs.size(), " inputs");
}

std::vector<at::Tensor> flattened(const at::Tensor& tensor) {
  return {tensor};
}

std::vector<at::Tensor> flattened(const std::vector<at::Tensor>& tensors) {
  return tensors;
}

std::vector<at::Tensor> flattened(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<at::Tensor> all;
  for (const auto& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

at::Tensor CollectivePart::stage(const at::Tensor& tensor, Access access) {
  check_tensor(tensor);
  const at::Tensor original = tensor.detach();
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kCPU);
  const bool shares = device(tensor.device().index()).properties().host_accessible();
  at::Tensor host = shares ? at::from_blob(original.data_ptr(), original.sizes(), original.strides(), options)
                           : at::empty_strided(original.sizes(), original.strides(), options.pinned_memory(true));
  tensors.push_back({original, host, access});
  return host;
}

std::vector<at::Tensor> CollectivePart::stage(const std::vector<at::Tensor>& given, Access access) {
  return each(given, [&](const at::Tensor& tensor) { return stage(tensor, access); });
}

std::vector<std::vector<at::Tensor>> CollectivePart::stage(
    const std::vector<std::vector<at::Tensor>>& lists, Access access) {
  return each(lists, [&](const std::vector<at::Tensor>& list) { return stage(list, access); });
}

int64_t CollectivePart::bytes_sent(c10d::OpType type, int ranks) const {
  int64_t read = 0;
  int64_t written = 0;
  for (const auto& one : tensors) {
    read += one.access == Access::Write ? 0 : static_cast<int64_t>(one.device.nbytes());
    written += one.access == Access::Read ? 0 : static_cast<int64_t>(one.device.nbytes());
  }
  const int64_t bytes = std::max(read, written);
  switch (type) {
    case c10d::OpType::BROADCAST:
    case c10d::OpType::REDUCE:
    case c10d::OpType::SEND:
    case c10d::OpType::RECV:
    case c10d::OpType::RECVANYSOURCE:
      return bytes;
    case c10d::OpType::ALLREDUCE: // reduce-scatter, then all-gather
    case c10d::OpType::ALLREDUCE_COALESCED:
      return 2 * bytes * (ranks - 1) / ranks;
    default:
      return bytes * (ranks - 1) / ranks;
  }
}

int64_t Collective::bytes() const {
  int64_t total = 0;
  for (const auto& part : parts) {
    for (const auto& one : part.tensors) {
      total += static_cast<int64_t>(one.device.nbytes());
    }
  }
  return total;
}

std::vector<c10::DeviceIndex> Collective::devices() const {
  std::vector<c10::DeviceIndex> found;
  for (const auto& part : parts) {
    for (const auto& one : part.tensors) {
      const auto index = one.device.device().index();
      if (std::find(found.begin(), found.end(), index) == found.end()) {
        found.push_back(index);
      }
    }
  }
  return found;
}

at::Tensor movable(const at::Tensor& host) {
  if (is_known_to_engines(host.scalar_type())) {
    return host;
  }
  const int64_t rows = host.dim() == 0 ? 1 : host.size(0);
  return host.as_strided({rows, rows == 0 ? 0 : host.numel() / rows}, {rows == 0 ? 1 : host.numel() / rows, 1})
      .view(c10::kByte);
}

std::vector<at::Tensor> movable(const std::vector<at::Tensor>& hosts) {
  return each(hosts, [](const at::Tensor& host) { return movable(host); });
}

std::vector<std::vector<at::Tensor>> movable(const std::vector<std::vector<at::Tensor>>& lists) {
  return each(lists, [](const std::vector<at::Tensor>& list) { return movable(list); });
}

at::Tensor flat(const at::Tensor& host) {
  return host.as_strided({host.numel()}, {1});
}

std::vector<at::Tensor> flat(const std::vector<at::Tensor>& hosts) {
  return each(hosts, [](const at::Tensor& host) { return flat(host); });
}

} // namespace backplane
