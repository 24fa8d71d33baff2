// cuBLASLt's matrix products, as routines of the families matmul and linear (torch_backplane.drivers.libraries).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace backplane::cuda::lt {

// The names of the functions of cuBLASLt that routines() needs.
std::vector<std::string> functions();

// Returns the address of the routine for each family and dtype name, for a device of make_launcher(). The routines
// return a cublasStatus_t, or a CUresult as a negative number. `functions`: the addresses of functions(), the
// same in every call, because they are kept in a global variable. `workspace`: the bytes that an algorithm can have.
// Throws ValueError if a function is missing.
std::map<std::string, std::map<std::string, uintptr_t>> routines(
    const std::map<std::string, uintptr_t>& functions, size_t index, size_t workspace);

struct AlgorithmsFound {
  int status = 0; // of the routine, such as 15 (CUBLAS_STATUS_NOT_SUPPORTED) if there is no algorithm
  size_t count = 0; // of algorithms, the fastest first as cuBLASLt expects
  size_t workspace = 0; // bytes of the one that the integer «form» selects
};

// Finds the algorithms of a product on a device of routines(). `integers`: those of the family, in its order.
// Throws ValueError if there is no such dtype or family, or if the number of integers is another one.
AlgorithmsFound algorithms(
    size_t index, const std::string& family, const std::string& dtype, const std::vector<int64_t>& integers);

} // namespace backplane::cuda::lt
