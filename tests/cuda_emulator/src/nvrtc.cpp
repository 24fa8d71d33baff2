// libnvrtc: compiles CUDA C++ with the system's C++ compiler to a library for the kernel interpreter. The folder of
// this library has the compiler's command (nvrtc.command, one argument per line) and the prelude (nvrtc.prelude).

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nvrtc_source.h"
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

struct Program {
  std::string source, name;
  std::vector<std::pair<std::string, std::string>> headers; // name, text
  std::vector<std::string> expressions;
  bool is_compiled = false;
  std::string log, binary, text;
  std::map<std::string, std::string> lowered; // by expression
};

namespace {

constexpr int kArchitectures[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

std::string own_folder() {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&own_folder), &info);
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> all;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    all.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return all;
}

bool begins(const std::string& text, const std::string& with) {
  return text.compare(0, with.size(), with) == 0;
}

// --- options ---------------------------------------------------------------------------------------------------------

struct Options {
  int architecture = 75;
  bool is_virtual = true; // compute_75: no binary, only text
  std::vector<std::string> compiler;
};

// Options without effect here; those with a value have it behind «=».
const char* const kIgnored[] = {
    "--fmad=",
    "-fmad=",
    "--use_fast_math",
    "-use_fast_math",
    "--ftz=",
    "-ftz=",
    "--prec-div=",
    "-prec-div=",
    "--prec-sqrt=",
    "-prec-sqrt=",
    "--generate-line-info",
    "-lineinfo",
    "--device-debug",
    "-G",
    "--maxrregcount=",
    "-maxrregcount=",
    "--device-as-default-execution-space",
    "-default-device",
    "--restrict",
    "-restrict",
    "--extra-device-vectorization",
    "-extra-device-vectorization",
    "--relocatable-device-code=",
    "-rdc=",
    "--disable-warnings",
    "-w",
    "--diag-suppress=",
    "-diag-suppress=",
    "--ptxas-options=",
    "-Xptxas=",
    "--dopt=",
    "-dopt=",
    "--split-compile=",
    "-split-compile=",
    "--minimal",
    "-minimal",
    "--no-source-include",
    "-no-source-include",
    "--resource-usage",
    "-res-usage"};

bool is_ignored(const std::string& option) {
  for (const char* one : kIgnored) {
    const bool has_value = one[strlen(one) - 1] == '=';
    if (has_value ? begins(option, one) : option == one) {
      return true;
    }
  }
  return false;
}

bool read_architecture(const std::string& value, Options* options) {
  const bool is_real = begins(value, "sm_"), is_virtual = begins(value, "compute_");
  if (!is_real && !is_virtual) {
    return false;
  }
  const int number = atoi(value.c_str() + value.find('_') + 1); // the letter in sm_90a has no effect
  for (const int one : kArchitectures) {
    if (one == number) {
      options->architecture = number;
      options->is_virtual = is_virtual;
      return true;
    }
  }
  return false;
}

// Returns false, and stores a message, for an option that NVRTC does not have.
bool read_options(int count, const char* const* given, Options* options, std::string* log) {
  for (int i = 0; i < count; ++i) {
    std::string option = given[i];
    const bool takes_next = option == "-I" || option == "-D" || option == "-arch" || option == "--gpu-architecture" ||
        option == "--include-path" || option == "--define-macro" || option == "-std";
    if (takes_next && i + 1 < count) {
      option += (option.size() == 2 ? "" : "=") + std::string(given[++i]);
    }
    const std::string value = option.substr(std::min(option.find('='), option.size() - 1) + 1);
    if (begins(option, "--gpu-architecture=") || begins(option, "-arch=")) {
      if (!read_architecture(value, options)) {
        *log = "nvrtc: error: invalid value for --gpu-architecture (-arch)\n";
        return false;
      }
    } else if (begins(option, "-D") || begins(option, "-U") || begins(option, "-I")) {
      options->compiler.push_back(option);
    } else if (begins(option, "--define-macro=")) {
      options->compiler.push_back("-D" + value);
    } else if (begins(option, "--undefine-macro=")) {
      options->compiler.push_back("-U" + value);
    } else if (begins(option, "--include-path=")) {
      options->compiler.push_back("-I" + value);
    } else if (begins(option, "--std=") || begins(option, "-std=")) {
      options->compiler.push_back("-std=gnu++" + value.substr(3));
    } else if (!is_ignored(option)) {
      *log = "nvrtc: error: unrecognized option " + option + " found\n";
      return false;
    }
  }
  return true;
}

// --- compilation -----------------------------------------------------------------------------------------------------

// Compiles to a library. Returns the exit status of the compiler, and stores its output.
int compile(const Program& program, const Options& options, const TemporaryFolder& folder, std::string* output) {
  for (const auto& [name, text] : program.headers) {
    folder.write("include/" + name, text);
  }
  folder.write(
      "kernel.cu",
      content(own_folder() + "nvrtc.prelude") +
          compiled_source(program.source, program.name, program.expressions, options.architecture));
  std::vector<std::string> command = lines(content(own_folder() + "nvrtc.command"));
  for (std::string& one : command) {
    one = one == "SOURCE" ? folder.path("kernel.cu") : one == "RESULT" ? folder.path("kernel.so") : one;
  }
  command.insert(command.begin() + 1, options.compiler.begin(), options.compiler.end());
  command.insert(command.begin() + 1, "-I" + folder.path("include"));
  return run_command(command, output);
}

// Returns the compiler's messages in the form of NVRTC: «name(3): error: …» for «name:3:5: error: …».
std::string messages(const std::string& output) {
  std::string all;
  size_t errors = 0;
  for (const std::string& line : lines(output)) {
    for (const char* kind : {": error: ", ": fatal error: "}) {
      const size_t at = line.find(kind);
      if (at != std::string::npos) {
        std::vector<std::string> parts{""};
        for (const char one : line.substr(0, at)) {
          if (one == ':') {
            parts.emplace_back();
          } else {
            parts.back().push_back(one);
          }
        }
        const std::string place = parts.size() >= 3 ? parts[0] + "(" + parts[1] + ")" : line.substr(0, at);
        all += place + ": error: " + line.substr(at + strlen(kind)) + "\n";
        ++errors;
      }
    }
    if (line.find("undefined reference") != std::string::npos) {
      all += "ptxas fatal   : Unresolved extern function: " + line + "\n";
    }
  }
  return all.empty() ? output : all + "\n" + std::to_string(errors) + " error(s) detected in the compilation.\n";
}

// The text form of a binary. Real PTX has the kernels' code; this has the whole binary in a comment.
std::string text_of(const std::string& binary, int architecture) {
  std::string text = ".version 8.5\n.target sm_" + std::to_string(architecture) + "\n.address_size 64\n\n";
  text += "// emulated binary: ";
  constexpr char digits[] = "0123456789abcdef";
  for (const char one : binary) {
    text += digits[static_cast<unsigned char>(one) >> 4];
    text += digits[one & 15];
  }
  return text + "\n";
}

// Loads the library to find the mangled names of the kernels in the expressions.
void find_lowered_names(const std::string& path, Program* program) {
  struct Row {
    void* function;
    void* others[4];
    long threads;
    const char* expression;
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
  if (major == nullptr || minor == nullptr) {
    return NVRTC_ERROR_INVALID_INPUT;
  }
  *major = 13;
  *minor = 0;
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  if (count == nullptr) {
    return NVRTC_ERROR_INVALID_INPUT;
  }
  *count = static_cast<int>(std::size(kArchitectures));
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetSupportedArchs(int* all) {
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
  if (program == nullptr || Registry<Program>::all().remove(*program) == nullptr) {
    return NVRTC_ERROR_INVALID_PROGRAM;
  }
  *program = nullptr;
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcAddNameExpression(Program* handle, const char* expression) {
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
  std::string output;
  const int status = compile(*program, options, folder, &output);
  program->is_compiled = true;
  program->log = status == 0 ? "" : messages(output);
  if (status != 0) {
    return NVRTC_ERROR_COMPILATION;
  }
  const std::string binary = content(folder.path("kernel.so"));
  program->binary = options.is_virtual ? "" : binary;
  program->text = text_of(binary, options.architecture);
  find_lowered_names(folder.path("kernel.so"), program.get());
  return NVRTC_SUCCESS;
}

API nvrtcResult nvrtcGetLoweredName(Program* handle, const char* expression, const char** name) {
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
    const auto program = program_of(handle);                                                               \
    return program == nullptr ? NVRTC_ERROR_INVALID_PROGRAM : give(program->part, is_text, nullptr, size); \
  }                                                                                                        \
  API nvrtcResult nvrtcGet##name(Program* handle, char* to) {                                              \
    const auto program = program_of(handle);                                                               \
    return program == nullptr ? NVRTC_ERROR_INVALID_PROGRAM : give(program->part, is_text, to, nullptr);   \
  }
RESULT(PTX, text, true)
RESULT(CUBIN, binary, false)
RESULT(ProgramLog, log, true)
