// Modules and their kernels.

#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "contexts.h"
#include "cubins.h"
#include "cuda_api.h"

// The interpreter's structures; see torch_backplane/interpreter/interpreter.h.
struct InterpreterArgument {
  char* memory;
  uint64_t offset;
  void* data;
  uint64_t bytes;
};
struct InterpreterKernel {
  void (*run)(const InterpreterArgument*);
  uint64_t has_barriers, number, image_begin, local_begin, local_end;
};

struct Function {
  std::string name;
  std::weak_ptr<Module> module;
  InterpreterKernel kernel{};
  HostKernel host = nullptr; // takes the place of `kernel` in binaries of NVIDIA's compiler
  std::vector<uint64_t> parameter_bytes, parameter_offsets;
  std::vector<uint64_t> parameter_elements; // bytes of what each points to; 0 for those that are no pointers
  std::vector<std::string> parameter_names; // empty if they are not known
  int threads = 1024; // most threads of a block
  int static_shared = 0; // bytes of a block
  std::atomic<int> dynamic_shared{48 << 10}; // bytes; the most that a launch can have, with the static ones
};

struct Module {
  ~Module();

  std::weak_ptr<Context> context; // null for a library's
  void* library = nullptr; // from dlopen; null for binaries of NVIDIA's compiler
  uint64_t begin = 0, end = 0; // of the image in memory
  char* dynamic_shared = nullptr;
  std::vector<std::shared_ptr<Function>> functions;
  std::map<std::string, size_t> variables; // sizes
};

// Returns the address of a variable of a module.
uint64_t address_of(const Module& module, const std::string& variable);

struct Library {
  std::shared_ptr<Module> module;
};

// Loads an image: a library made by the emulator's compiler, its text form, or a binary of NVIDIA's compiler
// (cubins.h).
CUresult load_image(const void* image, const std::shared_ptr<Context>& context, std::shared_ptr<Module>* made);

// Whether a range is in the variables of a module.
bool is_module_memory(uint64_t begin, uint64_t bytes);
