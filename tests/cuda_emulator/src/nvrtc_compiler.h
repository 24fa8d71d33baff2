// Options of NVRTC, and the compilation with the system's C++ compiler.

#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "processes.h"

struct Program {
  std::string source, name;
  std::vector<std::pair<std::string, std::string>> headers; // name, text
  std::vector<std::string> expressions;
  bool is_compiled = false;
  std::string log, binary, text;
  std::map<std::string, std::string> lowered; // by expression
};

inline constexpr int kArchitectures[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

struct Options {
  int architecture = 75;
  bool is_virtual = true; // compute_75: no binary, only text
  std::vector<std::string> compiler;
};

// Reads options. Returns false, and stores a message, for an option that NVRTC does not have.
bool read_options(int count, const char* const* given, Options* options, std::string* log);

// Compiles a program to the library kernel.so in the folder. Returns the exit status of the compiler, and stores its
// messages in the form of NVRTC: «name(3): error: …».
int compile(const Program& program, const Options& options, const TemporaryFolder& folder, std::string* log);

// Returns the text form of a binary. Real PTX has the kernels' code; this has the whole binary in a comment.
std::string text_of(const std::string& binary, int architecture);

std::string content(const std::string& path);
