// Binaries of NVIDIA's compiler: their kernels, with the sizes of parameters, and the host functions that stand for
// them.

#include "cubins.h"

#include <elf.h>

#include <cstring>
#include <string>

#include "entry.h"
#include "modules.h"

namespace {

constexpr int kCuda = 190; // EM_CUDA
constexpr char kText[] = ".text.", kInfo[] = ".nv.info.", kShared[] = ".nv.shared.";
// Attributes of a kernel, in `.nv.info`: threads of a block, the most threads, a parameter.
constexpr int kThreads = 0x10, kMostThreads = 0x05, kParameter = 0x17;
constexpr int kSized = 4; // the format of an attribute whose value follows

std::mutex host_kernels_mutex;
std::map<std::string, HostKernel>& host_kernels() {
  static auto& all = *new std::map<std::string, HostKernel>;
  return all;
}

HostKernel host_kernel(const std::string& name) {
  std::lock_guard lock(host_kernels_mutex);
  const auto at = host_kernels().find(name);
  return at == host_kernels().end() ? nullptr : at->second;
}

struct Section {
  const char* data;
  uint64_t bytes;
};

std::map<std::string, Section> sections_of(const char* image) {
  std::map<std::string, Section> all;
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(image);
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(image + header->e_shoff);
  const char* names = image + sections[header->e_shstrndx].sh_offset;
  for (int i = 0; i < header->e_shnum; ++i) {
    all[names + sections[i].sh_name] = {image + sections[i].sh_offset, sections[i].sh_size};
  }
  return all;
}

int architecture_of(const char* image) {
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(image);
  return static_cast<int>(header->e_ident[EI_ABIVERSION] >= 8 ? header->e_flags >> 8 & 255 : header->e_flags & 255);
}

// Reads what `.nv.info.KERNEL` says: records of a format, an attribute, and a value or its size.
void read_attributes(const Section& info, Function& function) {
  std::map<unsigned, std::pair<uint64_t, uint64_t>> parameters; // offset and size
  for (uint64_t at = 0; at + 4 <= info.bytes;) {
    const auto format = static_cast<unsigned char>(info.data[at]),
               attribute = static_cast<unsigned char>(info.data[at + 1]);
    uint16_t size = 0;
    memcpy(&size, info.data + at + 2, sizeof size);
    const char* value = info.data + at + 4;
    at += 4 + (format == kSized ? size : 0);
    if (format != kSized) {
      continue;
    }
    if (attribute == kParameter) {
      uint16_t ordinal = 0, offset = 0;
      uint32_t bits = 0;
      memcpy(&ordinal, value + 4, sizeof ordinal);
      memcpy(&offset, value + 6, sizeof offset);
      memcpy(&bits, value + 8, sizeof bits);
      parameters[ordinal] = {offset, bits >> 18};
    } else if (attribute == kThreads || attribute == kMostThreads) {
      uint32_t threads[3];
      memcpy(threads, value, sizeof threads);
      function.threads = static_cast<int>(threads[0] * threads[1] * threads[2]);
    }
  }
  for (const auto& [ordinal, place] : parameters) {
    function.parameter_offsets.push_back(place.first);
    function.parameter_bytes.push_back(place.second);
  }
  function.parameter_elements.resize(parameters.size());
  function.parameter_names.resize(parameters.size());
}

} // namespace

bool is_cubin(const void* image) {
  return static_cast<const Elf64_Ehdr*>(image)->e_machine == kCuda;
}

CUresult load_cubin(const void* image, const std::shared_ptr<Module>& module) {
  const auto* bytes = static_cast<const char*>(image);
  const int architecture = architecture_of(bytes);
  const bool fits = architecture <= capability() && architecture / 10 == capability() / 10;
  REQUIRE(fits, CUDA_ERROR_NO_BINARY_FOR_GPU);
  const auto sections = sections_of(bytes);
  for (const auto& [section, text] : sections) {
    if (section.rfind(kText, 0) != 0) {
      continue;
    }
    auto made = std::make_shared<Function>();
    made->name = section.substr(strlen(kText));
    made->module = module;
    made->host = host_kernel(made->name);
    REQUIRE(made->host != nullptr, CUDA_ERROR_INVALID_IMAGE);
    if (const auto at = sections.find(kInfo + made->name); at != sections.end()) {
      read_attributes(at->second, *made);
    }
    if (const auto at = sections.find(kShared + made->name); at != sections.end()) {
      made->static_shared = static_cast<int>(at->second.bytes);
    }
    module->functions.push_back(made);
  }
  return CUDA_SUCCESS;
}

// Defines what launches of a kernel compute, in binaries that are loaded from now on.
extern "C" __attribute__((visibility("default"))) void emulator_define_kernel(const char* name, HostKernel function) {
  std::lock_guard lock(host_kernels_mutex);
  host_kernels()[name] = function;
}
