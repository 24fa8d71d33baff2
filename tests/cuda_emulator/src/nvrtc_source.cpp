// Finds the kernels and the dynamic shared memory in a source. NVIDIA's compiler knows both; C++ compilers do not.

#include "nvrtc_source.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <utility>

namespace {

// Returns the source with spaces in place of comments, strings and preprocessor directives.
std::string code_only(const std::string& source) {
  std::string code = source;
  const auto blank = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end && i < code.size(); ++i) {
      code[i] = code[i] == '\n' ? '\n' : ' ';
    }
    return end;
  };
  bool line_begins = true;
  for (size_t i = 0; i < source.size();) {
    if (source.compare(i, 2, "//") == 0) {
      i = blank(i, std::min(source.find('\n', i), source.size()));
    } else if (source.compare(i, 2, "/*") == 0) {
      const size_t end = source.find("*/", i + 2);
      i = blank(i, end == std::string::npos ? source.size() : end + 2);
    } else if (source.compare(i, 3, "\"C\"") == 0) { // of extern "C"
      i = blank(i, i + 3);
    } else if (source[i] == '"') {
      size_t end = i + 1;
      while (end < source.size() && source[end] != '"' && source[end] != '\n') {
        end += source[end] == '\\' ? 2 : 1;
      }
      i = blank(i, end + 1);
    } else if (line_begins && source[i] == '#') {
      size_t end = source.find('\n', i);
      while (end != std::string::npos && source[end - 1] == '\\') {
        end = source.find('\n', end + 1);
      }
      i = blank(i, std::min(end, source.size()));
    } else {
      line_begins = source[i] == '\n' || (line_begins && std::isspace(static_cast<unsigned char>(source[i])) != 0);
      ++i;
    }
  }
  return code;
}

bool is_word(char one) {
  return std::isalnum(static_cast<unsigned char>(one)) != 0 || one == '_';
}

// Reads words and brackets of a code.
class Reader {
 public:
  Reader(const std::string& code, size_t at) : code_(code), at_(at) {}

  size_t place() const {
    return at_;
  }
  std::string word() {
    skip();
    const size_t begin = at_;
    while (at_ < code_.size() && is_word(code_[at_])) {
      ++at_;
    }
    return code_.substr(begin, at_ - begin);
  }
  bool is_next(char one) {
    skip();
    return at_ < code_.size() && code_[at_] == one;
  }
  // Text in parentheses, with them.
  std::string bracket() {
    const size_t begin = at_;
    int depth = 0;
    for (; at_ < code_.size(); ++at_) {
      depth += code_[at_] == '(' ? 1 : code_[at_] == ')' ? -1 : 0;
      if (depth == 0) {
        ++at_;
        break;
      }
    }
    return code_.substr(begin, at_ - begin);
  }

 private:
  void skip() {
    while (at_ < code_.size() && std::isspace(static_cast<unsigned char>(code_[at_])) != 0) {
      ++at_;
    }
  }

  const std::string& code_;
  size_t at_;
};

// Whether the code ends with a word.
bool ends_with(const std::string& code, size_t end, const std::string& word) {
  return end >= word.size() && code.compare(end - word.size(), word.size(), word) == 0;
}

size_t without_spaces(const std::string& code, size_t end) {
  while (end > 0 && std::isspace(static_cast<unsigned char>(code[end - 1])) != 0) {
    --end;
  }
  return end;
}

// Whether a declaration whose words begin before `at` is a template.
bool is_template(const std::string& code, size_t at) {
  for (bool again = true; again;) {
    again = false;
    at = without_spaces(code, at);
    for (const char* word : {"static", "inline", "extern", "__forceinline__"}) {
      if (ends_with(code, at, word)) {
        at -= strlen(word);
        again = true;
      }
    }
  }
  return at > 0 && code[at - 1] == '>';
}

struct Kernel {
  std::string name;
  std::string bounds; // arguments of __launch_bounds__, in parentheses
  std::string parameters; // names, with commas between them
  bool is_template;
};

// Returns the names of parameters, with commas between them: a,b of (const float* a, Pair<int, int> b).
std::string names_in(const std::string& parameters) {
  std::string all, last;
  int depth = 0;
  for (size_t i = 1; i + 1 < parameters.size(); ++i) {
    const char one = parameters[i];
    depth += one == '(' || one == '<' || one == '[' ? 1 : one == ')' || one == '>' || one == ']' ? -1 : 0;
    if (depth != 0) {
      continue;
    }
    if (one == ',') {
      all += last + ",";
      last.clear();
    } else if (is_word(one)) {
      last = is_word(parameters[i - 1]) ? last + one : std::string(1, one);
    }
  }
  return all + last;
}

std::vector<Kernel> kernels_of(const std::string& code) {
  constexpr char mark[] = "__global__";
  std::vector<Kernel> all;
  for (size_t at = code.find(mark); at != std::string::npos; at = code.find(mark, at + 1)) {
    Kernel kernel{"", "()", "", is_template(code, at)};
    Reader reader(code, at + strlen(mark));
    for (std::string word = reader.word(); !word.empty(); word = reader.word()) {
      if (word == "__launch_bounds__" && reader.is_next('(')) {
        kernel.bounds = reader.bracket();
      } else {
        kernel.name = word;
      }
      if (reader.is_next('(') && word != "__launch_bounds__") {
        kernel.parameters = names_in(reader.bracket());
        break;
      }
    }
    // A declaration and its definition are one kernel.
    bool known = kernel.name.empty() || kernel.name == "void";
    for (const Kernel& other : all) {
      known = known || other.name == kernel.name;
    }
    if (!known) {
      all.push_back(kernel);
    }
  }
  return all;
}

// Returns the names of the parameters of the kernel in an expression such as put<float>.
std::string parameters_of(const std::vector<Kernel>& kernels, const std::string& expression) {
  const std::string name = expression.substr(0, expression.find('<'));
  for (const Kernel& one : kernels) {
    if (ends_with(name, name.size(), one.name)) {
      return one.parameters;
    }
  }
  return "";
}

// Replaces «extern __shared__ float name[];» by a declaration with the linker's name of the dynamic shared memory.
std::string with_dynamic_shared(const std::string& source, std::string code) {
  constexpr char mark[] = "__shared__";
  std::string made = source;
  for (size_t at = code.rfind(mark); at != std::string::npos && at != 0; at = code.rfind(mark, at - 1)) {
    const size_t before = without_spaces(code, at), end = code.find(';', at);
    if (ends_with(code, before, "extern") && end != std::string::npos) {
      made.insert(end, " __asm__(\"emulator_dynamic_shared\")");
      made.replace(at, strlen(mark), "__attribute__((visibility(\"default\")))");
    }
  }
  return made;
}

} // namespace

std::string compiled_source(
    const std::string& source, const std::string& name, const std::vector<std::string>& expressions, int architecture) {
  const std::string code = code_only(source);
  std::string made = "#define __CUDA_ARCH__ " + std::to_string(architecture * 10) + "\n";
  made += "#line 1 \"" + name + "\"\n" + with_dynamic_shared(source, code) + "\n";
  made += "#define EMULATOR_ARCHITECTURE " + std::to_string(architecture) + "\n#define EMULATOR_KERNELS(of)";
  const std::vector<Kernel> kernels = kernels_of(code);
  for (const Kernel& one : kernels) {
    made += one.is_template ? "" : " of(" + one.bounds + ", \"" + one.parameters + "\", " + one.name + ")";
  }
  for (const std::string& one : expressions) {
    made += " of((), \"" + parameters_of(kernels, one) + "\", " + one + ")";
  }
  return made + "\n#include \"kernel_table.h\"\n";
}
