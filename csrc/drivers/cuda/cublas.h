// cuBLAS's matrix products and triangular systems, as routines of the families matmul and triangular_solve
// (torch_backplane.drivers.libraries).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace backplane::cuda {

// The names of the functions of cuBLAS that cublas_routines() needs.
std::vector<std::string> cublas_functions();

// Returns the address of the routine for each family and dtype name, for a device of make_launcher(). The routines
// return a cublasStatus_t, or a CUresult as a negative number. `functions`: the addresses of cublas_functions(), the
// same in every call, because they are kept in a global variable. Throws ValueError if a function is missing.
std::map<std::string, std::map<std::string, uintptr_t>> cublas_routines(
    const std::map<std::string, uintptr_t>& functions, size_t index);

// Makes cuBLAS ready for a device of cublas_routines(), if it is not. Returns the status of a routine.
int cublas_prepare(size_t index);

} // namespace backplane::cuda
