// Operations from the parameters of nodes.

#pragma once

#include "streams.h"

struct Nothing {};
struct Recorded {
  CUevent event;
};
struct Awaited {
  CUevent event;
};
struct Child {
  CUgraph graph;
};

// Checks the parameters, and makes an operation.
CUresult make_operation(const CUDA_KERNEL_NODE_PARAMS& given, std::shared_ptr<Operation>* made);
CUresult make_operation(const CUDA_MEMCPY3D& given, std::shared_ptr<Operation>* made);
CUresult make_operation(const CUDA_MEMSET_NODE_PARAMS& given, std::shared_ptr<Operation>* made);
CUresult make_operation(const CUDA_HOST_NODE_PARAMS& given, std::shared_ptr<Operation>* made);
CUresult make_operation(const Nothing& given, std::shared_ptr<Operation>* made);
CUresult make_operation(const Recorded& given, std::shared_ptr<Operation>* made);
CUresult make_operation(const Awaited& given, std::shared_ptr<Operation>* made);
CUresult make_operation(const Child& given, std::shared_ptr<Operation>* made);
