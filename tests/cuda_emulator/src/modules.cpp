// Loading of images, kernels and their attributes.

#include "modules.h"

#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "entry.h"
#include "memory.h"

namespace {

// The rows of `emulator_kernels`; see kernel_table.h.
struct TableRow {
  void* function;
  void (*run)(const InterpreterArgument*);
  uint64_t count;
  const uint64_t *bytes, *alignments, *elements;
  long threads;
  const char *parameters, *expression;
};

constexpr char kTextMark[] = "// emulated binary: ";

// The size of an image in the format ELF, whose last part is the table of sections.
size_t elf_bytes(const void* image) {
  const auto* header = static_cast<const Elf64_Ehdr*>(image);
  return header->e_shoff + size_t{header->e_shentsize} * header->e_shnum;
}

bool is_elf(const void* image) {
  return memcmp(image, ELFMAG, SELFMAG) == 0;
}

// The binary in a text that nvrtc.cpp made; empty if there is none.
std::vector<char> binary_of(const char* text) {
  std::vector<char> all;
  const char* at = strstr(text, kTextMark);
  if (at == nullptr) {
    return all;
  }
  unsigned byte = 0;
  for (at += strlen(kTextMark); sscanf(at, "%2x", &byte) == 1; at += 2) {
    all.push_back(static_cast<char>(byte));
  }
  return all;
}

// Returns the exported variables of an image, with their sizes.
std::map<std::string, size_t> variables_of(const char* image) {
  std::map<std::string, size_t> all;
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(image);
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(image + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_DYNSYM) {
      continue;
    }
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(image + sections[i].sh_offset);
    const char* names = image + sections[sections[i].sh_link].sh_offset;
    for (size_t j = 0; j < sections[i].sh_size / sizeof(Elf64_Sym); ++j) {
      const char* name = names + symbols[j].st_name;
      const bool is_own = strncmp(name, "emulator_", strlen("emulator_")) == 0;
      if (ELF64_ST_TYPE(symbols[j].st_info) == STT_OBJECT && symbols[j].st_shndx != SHN_UNDEF && !is_own) {
        all[name] = symbols[j].st_size;
      }
    }
  }
  return all;
}

// Loads a library from memory. Returns null if that is not possible.
void* load_library(const void* image, size_t bytes) {
  // A file with a unique name: dlopen would return a library that is loaded under the same name.
  std::string path = (std::filesystem::temp_directory_path() / "emulated-module-XXXXXX").string();
  const int file = mkstemp(path.data());
  if (file < 0) {
    return nullptr;
  }
  void* library = nullptr;
  if (write(file, image, bytes) == static_cast<ssize_t>(bytes)) {
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (library == nullptr && getenv("CUDA_EMULATOR_REPORT") != nullptr) {
      fprintf(stderr, "CUDA emulator: %s\n", dlerror());
    }
  }
  close(file);
  unlink(path.c_str());
  return library;
}

// The folder of this library, whose name is that of the build.
std::string own_folder() {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&own_folder), &info);
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/'));
}

template <class T>
T* symbol(const Module& module, const char* name) {
  return static_cast<T*>(dlsym(module.library, name));
}

std::shared_ptr<Function> make_function(const std::shared_ptr<Module>& module, const TableRow& row, bool waits) {
  static std::atomic<uint64_t> last{0};
  auto made = std::make_shared<Function>();
  Dl_info info;
  made->name = dladdr(row.function, &info) != 0 && info.dli_sname != nullptr ? info.dli_sname : row.expression;
  made->module = module;
  const auto at = [&](const char* name) { return reinterpret_cast<uint64_t>(symbol<char>(*module, name)); };
  made->kernel = {row.run, waits, ++last, module->begin, at("interpreter_local_begin"), at("interpreter_local_end")};
  uint64_t offset = 0;
  for (uint64_t i = 0; i < row.count; ++i) {
    offset = rounded_up(offset, row.alignments[i]);
    made->parameter_bytes.push_back(row.bytes[i]);
    made->parameter_offsets.push_back(offset);
    made->parameter_elements.push_back(row.elements[i]);
    offset += row.bytes[i];
  }
  std::istringstream names(row.parameters);
  for (std::string one; std::getline(names, one, ',');) {
    made->parameter_names.push_back(one);
  }
  made->parameter_names.resize(row.count);
  made->threads = static_cast<int>(row.threads);
  return made;
}

std::mutex images_mutex;
std::set<std::pair<uint64_t, uint64_t>>& images() { // of all loaded modules
  static auto& all = *new std::set<std::pair<uint64_t, uint64_t>>;
  return all;
}

CUresult load_binary(const void* image, size_t bytes, bool is_text, const std::shared_ptr<Module>& module) {
  module->library = load_library(image, bytes);
  REQUIRE(module->library != nullptr, is_text ? CUDA_ERROR_INVALID_PTX : CUDA_ERROR_INVALID_IMAGE);
  // A cache can have images of another build of the emulator.
  const char* build = symbol<const char>(*module, "emulator_build");
  const bool is_own = build != nullptr && own_folder().find(build) != std::string::npos;
  REQUIRE(is_own, is_text ? CUDA_ERROR_INVALID_PTX : CUDA_ERROR_INVALID_IMAGE);
  const int* architecture = symbol<const int>(*module, "emulator_architecture");
  const auto* rows = symbol<const TableRow>(*module, "emulator_kernels");
  char* const* bounds = symbol<char* const>(*module, "emulator_image");
  REQUIRE(architecture != nullptr && rows != nullptr && bounds != nullptr, CUDA_ERROR_INVALID_IMAGE);
  // A binary is for devices of the same major version, a text for all later ones.
  const bool fits = *architecture <= capability() && (is_text || *architecture / 10 == capability() / 10);
  REQUIRE(fits, is_text ? CUDA_ERROR_INVALID_PTX : CUDA_ERROR_NO_BINARY_FOR_GPU);
  module->begin = reinterpret_cast<uint64_t>(bounds[0]);
  module->end = reinterpret_cast<uint64_t>(bounds[1]);
  module->dynamic_shared = symbol<char>(*module, "emulator_dynamic_shared");
  module->variables = variables_of(static_cast<const char*>(image));
  const char *begin = static_cast<const char*>(image), *end = begin + bytes;
  const auto calls = [&](const std::string& name) { return std::search(begin, end, name.begin(), name.end()) != end; };
  const bool waits = calls("interpreter_barrier") || calls("interpreter_shuffle");
  for (; rows->function != nullptr; ++rows) {
    module->functions.push_back(make_function(module, *rows, waits));
  }
  if (module->functions.size() == 1) { // of several kernels, it is not known which variable is whose
    Function& only = *module->functions[0];
    only.static_shared = static_cast<int>(only.kernel.local_end - only.kernel.local_begin);
  }
  std::lock_guard lock(images_mutex);
  images().emplace(module->begin, module->end);
  return CUDA_SUCCESS;
}

std::shared_ptr<Function> function_of(const Module& module, const char* name) {
  for (const auto& one : module.functions) {
    if (one->name == name) {
      return one;
    }
  }
  return nullptr;
}

CUresult find_variable(const Module& module, CUdeviceptr* at, size_t* bytes, const char* name) {
  const auto known = module.variables.find(name);
  REQUIRE(known != module.variables.end(), CUDA_ERROR_NOT_FOUND);
  if (at != nullptr) {
    *at = address_of(module, name);
  }
  if (bytes != nullptr) {
    *bytes = known->second;
  }
  return CUDA_SUCCESS;
}

} // namespace

uint64_t address_of(const Module& module, const std::string& variable) {
  return reinterpret_cast<uint64_t>(symbol<char>(module, variable.c_str()));
}

Module::~Module() {
  if (library != nullptr) {
    std::lock_guard lock(images_mutex);
    images().erase({begin, end});
    dlclose(library);
  }
}

bool is_module_memory(uint64_t begin, uint64_t bytes) {
  std::lock_guard lock(images_mutex);
  auto at = images().upper_bound({begin, UINT64_MAX});
  if (at == images().begin()) {
    return false;
  }
  --at;
  return begin >= at->first && begin + bytes <= at->second;
}

CUresult load_image(const void* image, const std::shared_ptr<Context>& context, std::shared_ptr<Module>* made) {
  REQUIRE(image != nullptr, CUDA_ERROR_INVALID_VALUE);
  auto module = std::make_shared<Module>();
  module->context = context;
  if (is_elf(image) && is_cubin(image)) {
    RETURN_ERROR(load_cubin(image, module));
  } else if (is_elf(image)) {
    RETURN_ERROR(load_binary(image, elf_bytes(image), false, module));
  } else {
    const std::vector<char> binary = binary_of(static_cast<const char*>(image));
    const bool is_text = strstr(static_cast<const char*>(image), ".version") != nullptr;
    REQUIRE(!binary.empty(), is_text ? CUDA_ERROR_INVALID_PTX : CUDA_ERROR_INVALID_IMAGE);
    RETURN_ERROR(load_binary(binary.data(), binary.size(), true, module));
  }
  for (const auto& one : module->functions) {
    Registry<Function>::all().add(one);
  }
  *made = module;
  return CUDA_SUCCESS;
}

namespace {

// Kernels of the module become invalid handles. Its memory is freed when no launch uses it.
void unload(const Module& module) {
  for (const auto& one : module.functions) {
    Registry<Function>::all().remove(one.get());
  }
}

// The error log of cuModuleLoadDataEx: options 5 (its buffer) and 6 (its size).
void write_log(CUresult error, unsigned count, const int* options, void** values) {
  char* buffer = nullptr;
  size_t size = 0;
  for (unsigned i = 0; i < count; ++i) {
    buffer = options[i] == 5 ? static_cast<char*>(values[i]) : buffer;
    size = options[i] == 6 ? reinterpret_cast<size_t>(values[i]) : size;
  }
  if (buffer != nullptr && size != 0) {
    snprintf(buffer, size, "%s", error == CUDA_SUCCESS ? "" : "the image cannot be loaded on this device");
  }
}

CUresult load_module(CUmodule* made, const void* image, const std::shared_ptr<Context>& context) {
  REQUIRE(made != nullptr, CUDA_ERROR_INVALID_VALUE);
  std::shared_ptr<Module> module;
  RETURN_ERROR(load_image(image, context, &module));
  *made = Registry<Module>::all().add(module);
  return CUDA_SUCCESS;
}

} // namespace

API cuModuleLoadData(CUmodule* made, const void* image) {
  ENTER_CONTEXT();
  return load_module(made, image, context);
}

API cuModuleLoadDataEx(CUmodule* made, const void* image, unsigned count, int* options, void** values) {
  ENTER_CONTEXT();
  REQUIRE(count == 0 || (options != nullptr && values != nullptr), CUDA_ERROR_INVALID_VALUE);
  const CUresult error = load_module(made, image, context);
  write_log(error, count, options, values);
  return error;
}

API cuModuleLoad(CUmodule* made, const char* path) {
  ENTER_CONTEXT();
  REQUIRE(path != nullptr, CUDA_ERROR_INVALID_VALUE);
  std::ifstream file(path, std::ios::binary);
  REQUIRE(file.good(), CUDA_ERROR_FILE_NOT_FOUND);
  std::vector<char> image{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  image.resize(image.size() + 64); // the end of a text, and room for a header
  return load_module(made, image.data(), context);
}

API cuModuleUnload(CUmodule handle) {
  ENTER_CONTEXT();
  const auto module = Registry<Module>::all().remove(handle);
  REQUIRE(module != nullptr, CUDA_ERROR_INVALID_HANDLE);
  unload(*module);
  return CUDA_SUCCESS;
}

API cuModuleGetFunction(CUfunction* made, CUmodule handle, const char* name) {
  ENTER_CONTEXT();
  REQUIRE(made != nullptr && name != nullptr, CUDA_ERROR_INVALID_VALUE);
  const auto module = find(handle);
  REQUIRE(module != nullptr, CUDA_ERROR_INVALID_HANDLE);
  const auto function = function_of(*module, name);
  REQUIRE(function != nullptr, CUDA_ERROR_NOT_FOUND);
  *made = function.get();
  return CUDA_SUCCESS;
}

API cuModuleGetFunctionCount(unsigned* count, CUmodule handle) {
  ENTER_CONTEXT();
  const auto module = find(handle);
  REQUIRE(module != nullptr, CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(count != nullptr, CUDA_ERROR_INVALID_VALUE);
  *count = static_cast<unsigned>(module->functions.size());
  return CUDA_SUCCESS;
}

API cuModuleGetGlobal_v2(CUdeviceptr* at, size_t* bytes, CUmodule handle, const char* name) {
  ENTER_CONTEXT();
  REQUIRE(name != nullptr, CUDA_ERROR_INVALID_VALUE);
  const auto module = find(handle);
  REQUIRE(module != nullptr, CUDA_ERROR_INVALID_HANDLE);
  return find_variable(*module, at, bytes, name);
}

// --- libraries: modules of no context --------------------------------------------------------------------------------

API cuLibraryLoadData(CUlibrary* made, const void* image, int*, void**, unsigned, int*, void**, unsigned) {
  ENTER_UNLESS_FAILED();
  REQUIRE(made != nullptr, CUDA_ERROR_INVALID_VALUE);
  auto library = std::make_shared<Library>();
  RETURN_ERROR(load_image(image, nullptr, &library->module));
  *made = Registry<Library>::all().add(library);
  return CUDA_SUCCESS;
}

API cuLibraryUnload(CUlibrary handle) {
  ENTER_UNLESS_FAILED();
  const auto library = Registry<Library>::all().remove(handle);
  REQUIRE(library != nullptr, CUDA_ERROR_INVALID_HANDLE);
  unload(*library->module);
  return CUDA_SUCCESS;
}

API cuLibraryGetKernel(CUkernel* made, CUlibrary handle, const char* name) {
  ENTER_UNLESS_FAILED();
  REQUIRE(made != nullptr && name != nullptr, CUDA_ERROR_INVALID_VALUE);
  const auto library = find(handle);
  REQUIRE(library != nullptr, CUDA_ERROR_INVALID_HANDLE);
  const auto function = function_of(*library->module, name);
  REQUIRE(function != nullptr, CUDA_ERROR_NOT_FOUND);
  *made = function.get();
  return CUDA_SUCCESS;
}

API cuLibraryGetGlobal(CUdeviceptr* at, size_t* bytes, CUlibrary handle, const char* name) {
  ENTER_CONTEXT();
  REQUIRE(name != nullptr, CUDA_ERROR_INVALID_VALUE);
  const auto library = find(handle);
  REQUIRE(library != nullptr, CUDA_ERROR_INVALID_HANDLE);
  return find_variable(*library->module, at, bytes, name);
}

API cuKernelGetFunction(CUfunction* made, CUkernel handle) {
  ENTER_CONTEXT();
  REQUIRE(made != nullptr, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(find(handle) != nullptr, CUDA_ERROR_INVALID_HANDLE);
  *made = handle;
  return CUDA_SUCCESS;
}
