// What a rank does in a collective of a communication library (devices/communicator.h), from tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <string>
#include <vector>

#include "devices/communicator.h"

namespace backplane {

struct Communication {
  using Kind = CommunicationStep::Kind;

  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::string name; // of the function in torch.distributed
  std::vector<at::Tensor> outputs; // what Work::result() returns
  std::vector<at::Tensor> inputs; // for profiles; empty: the outputs
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout; // of the call, if it has its own
  std::vector<CommunicationStep> steps;
  std::vector<at::Tensor> tensors; // of the steps
  int64_t bytes = 0; // of all tensors
  bool blocks_host = false; // Work::wait() makes the host wait, not the stream

  // Adds a step that moves data. An undefined tensor: this rank sends, or receives, nothing. Adds no step for tensors
  // without elements. Throws ValueError for a tensor that is not dense, and if they are on several devices.
  void move(Kind kind, const at::Tensor& from, const at::Tensor& to, int peer = -1);
  // Adds a step that reduces, likewise. Throws ValueError or TypeError for a reduction that NCCL does not have.
  void reduce(Kind kind, const at::Tensor& from, const at::Tensor& to, const c10d::ReduceOp& operation, int peer = -1);
  // Adds the steps of another one.
  void append(Communication other);

 private:
  void keep(const at::Tensor& from, const at::Tensor& to);
};

} // namespace backplane
