// libnvrtc: compiles CUDA C++ with the system's C++ compiler to a library for the kernel interpreter.

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "faults.h"
#include "nvrtc_compiler.h"
#include "processes.h"
#include "registry.h"

#define API extern "C" __attribute__((visibility("default")))

enum nvrtcResult : int {
  NVRTC_SUCCESS = 0,
  NVRTC_ERROR_OUT_OF_MEMORY = 1,
  NVRTC_ERROR_PROGRAM_CREATION_FAILURE = 2,
  NVRTC_ERROR_INVALID_INPUT = 3,
  NVRTC_ERROR_INVALID_PROGRAM = 4,
  NVRTC_ERROR_INVALID_OPTION = 5,
  NVRTC_ERROR_COMPILATION = 6,
  NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION = 8,
  NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION = 9,
  NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID = 10,
  NVRTC_ERROR_INTERNAL_ERROR = 11,
};

// What each function does first: an injected fault ends it.
#define ENTER()                               \
  if (const int fault = fault_of(__func__)) { \
    return static_cast<nvrtcResult>(fault);   \
  }

namespace {

// Loads the library to find the mangled names of the kernels in the expressions.
void find_lowered_names(const std::string& path, Program* program) {
  struct Row {
    void* function;
    void* others[5];
    long threads;
    const char *parameters, *expression;
  };
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  const auto* rows = library == nullptr ? nullptr : static_cast<const Row*>(dlsym(library, "emulator_kernels"));
  for (; rows != nullptr && rows->function != nullptr; ++rows) {
    Dl_info info;
    if (dladdr(rows->function, &info) != 0 && info.dli_sname != nullptr) {
      program->lowered[rows->expression] = info.dli_sname;
    }
  }
  if (library != nullptr) {
    dlclose(library);
  }
}

std::shared_ptr<Program> program_of(Program* handle) {
  return find(handle);
}

// Copies a result, with its final zero if it is a text. `size`: only its size.
nvrtcResult give(const std::string& result, bool is_text, char* to, size_t* size) {
  if (to == nullptr && size == nullptr) {
    return NVRTC_ERROR_INVALID_INPUT;
  }
  const size_t bytes = result.size() + is_text;
  if (size != nullptr) {
    *size = bytes;
  } else {
    memcpy(to, result.c_str(), bytes);
  }
  return NVRTC_SUCCESS;
}

} // namespace

API const char* nvrtcGetErrorString(nvrtcResult result) {
  constexpr const char* names[] = {
      "NVRTC_SUCCESS",
      "NVRTC_ERROR_OUT_OF_MEMORY",
      "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
      "NVRTC_ERROR_INVALID_INPUT",
      "NVRTC_ERROR_INVALID_PROGRAM",
      "NVRTC_ERROR_INVALID_OPTION",
      "NVRTC_ERROR_COMPILATION",
      "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
      "NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
      "NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
      "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
      "NVRTC_ERROR_INTERNAL_ERROR"};
  return result >= 0 && result < static_cast<int>(std::size(names)) ? names[result] : "NVRTC_ERROR unknown";
}

API nvrtcResult nvrtcVersion(int* major, int* minor) {
  ENTER();
  if (major == nullptr || minor == nullptr) {
    return NVRTC_ERROR_INVALID_INPUT;
  }
  *major = 13;
  *minor = 0;
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  ENTER();
  if (count == nullptr) {
    return NVRTC_ERROR_INVALID_INPUT;
  }
  *count = static_cast<int>(std::size(kArchitectures));
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetSupportedArchs(int* all) {
  ENTER();
  if (all == nullptr) {
    return NVRTC_ERROR_INVALID_INPUT;
  }
  std::copy(std::begin(kArchitectures), std::end(kArchitectures), all);
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcCreateProgram(
    Program** made,
    const char* source,
    const char* name,
    int header_count,
    const char* const* headers,
    const char* const* header_names) {
  ENTER();
  const bool has_headers = headers != nullptr && header_names != nullptr;
  if (made == nullptr || source == nullptr || header_count < 0 || (header_count != 0 && !has_headers)) {
    return NVRTC_ERROR_INVALID_INPUT;
  }
  auto program = std::make_shared<Program>();
  program->source = source;
  program->name = name == nullptr || *name == '\0' ? "default_program" : name;
  for (int i = 0; i < header_count; ++i) {
    program->headers.emplace_back(header_names[i], headers[i]);
  }
  *made = Registry<Program>::all().add(program);
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcDestroyProgram(Program** program) {
  ENTER();
  if (program == nullptr || Registry<Program>::all().remove(*program) == nullptr) {
    return NVRTC_ERROR_INVALID_PROGRAM;
  }
  *program = nullptr;
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcAddNameExpression(Program* handle, const char* expression) {
  ENTER();
  const auto program = program_of(handle);
  if (program == nullptr) {
    return NVRTC_ERROR_INVALID_PROGRAM;
  }
  if (expression == nullptr) {
    return NVRTC_ERROR_INVALID_INPUT;
  }
  if (program->is_compiled) {
    return NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION;
  }
  program->expressions.emplace_back(*expression == '&' ? expression + 1 : expression);
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcCompileProgram(Program* handle, int count, const char* const* given) {
  ENTER();
  const auto program = program_of(handle);
  if (program == nullptr) {
    return NVRTC_ERROR_INVALID_PROGRAM;
  }
  if (count < 0 || (count != 0 && given == nullptr)) {
    return NVRTC_ERROR_INVALID_INPUT;
  }
  Options options;
  if (!read_options(count, given, &options, &program->log)) {
    return NVRTC_ERROR_INVALID_OPTION;
  }
  const TemporaryFolder folder;
  const int status = compile(*program, options, folder, &program->log);
  program->is_compiled = true;
  if (status != 0) {
    return NVRTC_ERROR_COMPILATION;
  }
  const std::string binary = content(folder.path("kernel.so"));
  program->binary = options.is_virtual ? "" : binary;
  program->text = text_of(binary, options.architecture);
  if (!program->expressions.empty()) {
    find_lowered_names(folder.path("kernel.so"), program.get());
  }
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetLoweredName(Program* handle, const char* expression, const char** name) {
  ENTER();
  const auto program = program_of(handle);
  if (program == nullptr) {
    return NVRTC_ERROR_INVALID_PROGRAM;
  }
  if (expression == nullptr || name == nullptr) {
    return NVRTC_ERROR_INVALID_INPUT;
  }
  if (!program->is_compiled) {
    return NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION;
  }
  const auto at = program->lowered.find(*expression == '&' ? expression + 1 : expression);
  if (at == program->lowered.end()) {
    return NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID;
  }
  *name = at->second.c_str();
  return NVRTC_SUCCESS;
}

#define RESULT(name, part, is_text)                                                                        \
  API nvrtcResult nvrtcGet##name##Size(Program* handle, size_t* size) {                                    \
    ENTER();                                                                                               \
    const auto program = program_of(handle);                                                               \
    return program == nullptr ? NVRTC_ERROR_INVALID_PROGRAM : give(program->part, is_text, nullptr, size); \
  }                                                                                                        \
  API nvrtcResult nvrtcGet##name(Program* handle, char* to) {                                              \
    ENTER();                                                                                               \
    const auto program = program_of(handle);                                                               \
    return program == nullptr ? NVRTC_ERROR_INVALID_PROGRAM : give(program->part, is_text, to, nullptr);   \
  }
RESULT(PTX, text, true)
RESULT(CUBIN, binary, false)
RESULT(ProgramLog, log, true)
