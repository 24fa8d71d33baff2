// The source that the C++ compiler gets for a CUDA C++ program.

#pragma once

#include <string>
#include <vector>

// Returns the program with the name `name` in messages, and the table of its kernels behind it (kernel_table.h). The
// table has the kernels that are no templates, and the name expressions.
std::string compiled_source(
    const std::string& source, const std::string& name, const std::vector<std::string>& expressions, int architecture);
