// Launches of kernels, for streams and graphs.

#pragma once

#include <vector>

#include "modules.h"
#include "streams.h"

struct KernelLaunch : Operation {
  CUresult execute(Context& context) override;
  int node_type() const override {
    return 0;
  }
  std::shared_ptr<Operation> clone() const override {
    return std::make_shared<KernelLaunch>(*this);
  }

  std::shared_ptr<Function> function;
  std::shared_ptr<Module> module; // stays loaded until the launch is done
  unsigned grid[3], block[3], shared;
  std::vector<char> parameters; // at the function's offsets
  std::vector<std::pair<uint64_t, uint64_t>> blocks; // see known_blocks
  std::vector<void*> pointers; // to the parameters, for cuGraphKernelNodeGetParams
};

// Checks the parameters, and copies the arguments.
CUresult make_launch(const CUDA_KERNEL_NODE_PARAMS& given, std::shared_ptr<KernelLaunch>* made);
