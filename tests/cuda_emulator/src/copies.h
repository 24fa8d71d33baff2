// Copies and fills, for streams and graphs.

#pragma once

#include <vector>

#include "streams.h"

struct Copy : Operation {
  CUresult execute(Context& context) override;
  int node_type() const override {
    return 1;
  }
  std::shared_ptr<Operation> clone() const override {
    return std::make_shared<Copy>(*this);
  }

  uint64_t to = 0, from = 0;
  uint64_t bytes = 0, rows = 1, planes = 1; // bytes of a row
  uint64_t to_pitch = 0, from_pitch = 0, to_plane = 0, from_plane = 0;
  std::vector<char> staged; // the source, if its host memory can change after the call
  CUDA_MEMCPY3D parameters{}; // of a node
};

struct Fill : Operation {
  explicit Fill(const CUDA_MEMSET_NODE_PARAMS& given) : parameters(given) {}
  CUresult execute(Context& context) override;
  int node_type() const override {
    return 2;
  }
  std::shared_ptr<Operation> clone() const override {
    return std::make_shared<Fill>(*this);
  }

  CUDA_MEMSET_NODE_PARAMS parameters;
};

// Checks the parameters of a node.
CUresult make_copy(const CUDA_MEMCPY3D& given, std::shared_ptr<Copy>* made);
CUresult make_fill(const CUDA_MEMSET_NODE_PARAMS& given, std::shared_ptr<Fill>* made);
