// A collective of bp tensors: the tensors, their stand-ins in host memory, and what the engine does with these.
//
// The engine is a c10d backend for CPU tensors, such as ProcessGroupGloo. If the host can access the device's memory,
// stand-ins share it. Otherwise they are in pinned memory: tensors that are read are copied there before the engine
// starts, and results are copied back when it has finished.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <string>
#include <vector>

namespace backplane {

// Throws ValueError for a tensor that is not on bp, or not dense.
void check_tensor(const at::Tensor& tensor);

// Throws ValueError if there are not as many outputs as inputs.
void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const char* name);

std::vector<at::Tensor> flattened(const at::Tensor& tensor);
std::vector<at::Tensor> flattened(const std::vector<at::Tensor>& tensors);
std::vector<at::Tensor> flattened(const std::vector<std::vector<at::Tensor>>& lists);

enum class Access : uint8_t { Read, Write, ReadWrite };

struct StagedTensor {
  at::Tensor device;
  at::Tensor host;
  Access access;

  bool shares_memory() const {
    return host.data_ptr() == device.data_ptr();
  }
};

// What the engine does in one call. Large collectives have several parts, so that copies of one overlap with the
// communication of another.
class CollectivePart {
 public:
  // Returns the stand-in. Checks the tensor.
  at::Tensor stage(const at::Tensor& tensor, Access access);
  std::vector<at::Tensor> stage(const std::vector<at::Tensor>& tensors, Access access);
  std::vector<std::vector<at::Tensor>> stage(const std::vector<std::vector<at::Tensor>>& lists, Access access);

  // The bytes that a rank sends if the ranks form a ring.
  int64_t bytes_sent(c10d::OpType type, int ranks) const;

  std::vector<StagedTensor> tensors;
  std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend& engine)> start;
  std::function<void()> finish; // changes the stand-ins when the engine has finished; can be empty
};

struct Collective {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::string name; // of the function in torch.distributed
  std::vector<CollectivePart> parts;
  std::vector<at::Tensor> outputs; // what Work::result() returns
  std::vector<at::Tensor> inputs; // for profiles; empty: the outputs

  int64_t bytes() const; // of all tensors
  // The devices of the tensors, without duplicates.
  std::vector<c10::DeviceIndex> devices() const;
};

// A view as bytes with the same first dimension, if the engine does not know the dtype. For engines that only move it.
at::Tensor movable(const at::Tensor& host);
std::vector<at::Tensor> movable(const std::vector<at::Tensor>& hosts);
std::vector<std::vector<at::Tensor>> movable(const std::vector<std::vector<at::Tensor>>& lists);

// A view with one dimension, in the order of memory, of a dense tensor.
at::Tensor flat(const at::Tensor& host);
std::vector<at::Tensor> flat(const std::vector<at::Tensor>& hosts);

} // namespace backplane
