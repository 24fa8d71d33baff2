// Options of NVRTC, and the compilation. The folder of this library has the compiler's command (nvrtc.command, one
// argument per line) and the prelude (nvrtc.prelude).

#include "nvrtc_compiler.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "nvrtc_source.h"

namespace {

std::string own_folder() {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&own_folder), &info);
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
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

// Options without effect here, without the dashes before them; those with a value have it behind «=».
const char* const kIgnored[] = {
    "fmad=",
    "use_fast_math",
    "ftz=",
    "prec-div=",
    "prec-sqrt=",
    "generate-line-info",
    "lineinfo",
    "device-debug",
    "G",
    "maxrregcount=",
    "device-as-default-execution-space",
    "default-device",
    "restrict",
    "extra-device-vectorization",
    "relocatable-device-code=",
    "rdc=",
    "disable-warnings",
    "w",
    "diag-suppress=",
    "ptxas-options=",
    "Xptxas=",
    "dopt=",
    "split-compile=",
    "minimal",
    "no-source-include",
    "resource-usage",
    "res-usage",
};

bool is_ignored(const std::string& option) {
  const size_t begin = option.find_first_not_of('-');
  const std::string name = begin == 0 || begin == std::string::npos ? "" : option.substr(begin);
  for (const char* one : kIgnored) {
    const bool has_value = one[strlen(one) - 1] == '=';
    if (has_value ? begins(name, one) : name == one) {
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

} // namespace

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

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
      // The emulator's own source needs C++17.
      options->compiler.push_back(
          "-std=gnu++" + std::max(value.substr(std::min<size_t>(3, value.size())), std::string("17")));
    } else if (!is_ignored(option)) {
      *log = "nvrtc: error: unrecognized option " + option + " found\n";
      return false;
    }
  }
  return true;
}

int compile(const Program& program, const Options& options, const TemporaryFolder& folder, std::string* log) {
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
  // Behind the emulator's own options, which have another -std.
  const auto before = std::find(command.begin(), command.end(), folder.path("kernel.cu"));
  std::vector<std::string> own = options.compiler;
  own.push_back("-I" + folder.path("include"));
  command.insert(before, own.begin(), own.end());
  std::string output;
  const int status = run_command(command, &output);
  *log = status == 0 ? "" : messages(output);
  return status;
}

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
