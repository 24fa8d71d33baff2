// cuDNN's convolutions and attention, as routines of these families (torch_backplane.drivers.libraries).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace backplane::cuda {

// The names of the functions of cuDNN that cudnn_routines() needs.
std::vector<std::string> cudnn_functions();

// Returns the address of the routine of a family for each dtype name, for a device of make_launcher(). The routines
// return a cudnnStatus_t, or a CUresult as a negative number. `functions`: the addresses of cudnn_functions(), the same
// in every call, because they are kept in a global variable. Throws ValueError if a function is missing, or there is no
// such family.
std::map<std::string, uintptr_t> cudnn_routines(
    const std::map<std::string, uintptr_t>& functions, const std::string& family, size_t index);

// Returns the status of a routine, which tells whether cuDNN has an engine for the call, and the bytes of device memory
// that it needs as a workspace. `integers`: those of the family, in its order. Throws ValueError if there is no such
// routine.
std::pair<int, size_t> cudnn_workspace(
    size_t index, const std::string& family, const std::string& dtype, const std::vector<int64_t>& integers);

} // namespace backplane::cuda
