// cuSOLVER's decompositions and solvers, as routines of the families cholesky, lu, lu_solve and eigh
// (torch_backplane.drivers.libraries).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace backplane::cuda {

// The names of the functions of cuSOLVER that cusolver_routines() needs.
std::vector<std::string> cusolver_functions();

// Returns the address of the routine for each family and dtype name, for a device of make_launcher(). The routines
// return a cusolverStatus_t, or a CUresult as a negative number. `functions`: the addresses of cusolver_functions(),
// the same in every call, because they are kept in a global variable. Throws ValueError if a function is missing.
std::map<std::string, std::map<std::string, uintptr_t>> cusolver_routines(
    const std::map<std::string, uintptr_t>& functions, size_t index);

// Returns the status of a routine and the bytes of device memory that it needs as a workspace.
// `integers`: those of the family, in its order. Throws ValueError if there is no such routine.
std::pair<int, size_t> cusolver_workspace(
    size_t index, const std::string& family, const std::string& dtype, const std::vector<int64_t>& integers);

} // namespace backplane::cuda
