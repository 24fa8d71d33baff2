// The error of a collective: what has failed, on which rank of which group, and why.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace backplane {

// A rank of a process group.
struct Member {
  int rank;
  int size;
  std::string group;
};

struct CollectiveId {
  Member member;
  std::string name; // of the function in torch.distributed
  int64_t bytes; // of all tensors
  uint64_t number; // in the group
};

// The text of an exception, without a C++ backtrace.
std::string text_of(const std::exception_ptr& error);

// A DistBackendError that names the collective, its rank and group, and the reason.
std::exception_ptr failure_of(const CollectiveId& collective, const std::string& reason);

} // namespace backplane
