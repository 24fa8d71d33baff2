// CUDA_EMULATOR_CHECKS: the memory that a launch can access.

#include "kernel_memory.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "memory.h"

namespace {

// The requested memory that contains an address; `fixed` has no effect. The kernel sanitizer of Backplane has the same
// structure (torch_backplane/sanitizer/observer.h).
struct Extent {
  uint64_t begin, bytes, fixed;
};
using Resolve = int (*)(uint64_t address, Extent* extent);

std::atomic<Resolve> resolve{nullptr};

uint64_t pointer_of(const KernelLaunch& launch, size_t parameter) {
  uint64_t value = 0;
  if (launch.function->parameter_elements[parameter] != 0) {
    memcpy(&value, launch.parameters.data() + launch.function->parameter_offsets[parameter], sizeof value);
  }
  return value;
}

using Block = std::pair<uint64_t, uint64_t>;

bool overlap(const KernelRange& range, const Block& block) {
  return range.begin < block.second && block.first < range.end;
}

// Whether a launch can access only the known blocks of an allocation: all its pointers to it are to them.
bool is_divided(const KernelLaunch& launch, const KernelRange& allocation) {
  const std::vector<Block>& blocks = launch.blocks;
  if (std::none_of(blocks.begin(), blocks.end(), [&](const Block& one) { return overlap(allocation, one); })) {
    return false;
  }
  for (size_t i = 0; i < launch.function->parameter_bytes.size(); ++i) {
    const uint64_t pointer = pointer_of(launch, i);
    const auto has_pointer = [&](const Block& one) { return pointer >= one.first && pointer <= one.second; };
    const bool is_here = pointer >= allocation.begin && pointer < allocation.end;
    if (is_here && std::none_of(blocks.begin(), blocks.end(), has_pointer)) {
      return false;
    }
  }
  return true;
}

} // namespace

// Sets the function that finds the block of an address. It is called when a kernel is launched or captured.
extern "C" __attribute__((visibility("default"))) void emulator_resolve_bounds(Resolve function) {
  resolve = function;
}

bool checks_kernels() {
  static const bool value = getenv("CUDA_EMULATOR_CHECKS") != nullptr;
  return value;
}

bool continues_after_findings() {
  static const bool value = checks_kernels() && strcmp(getenv("CUDA_EMULATOR_CHECKS"), "report") == 0;
  return value;
}

std::vector<std::pair<uint64_t, uint64_t>> known_blocks(const KernelLaunch& launch) {
  std::vector<std::pair<uint64_t, uint64_t>> all;
  const Resolve ask = resolve;
  for (size_t i = 0; ask != nullptr && i < launch.function->parameter_bytes.size(); ++i) {
    const uint64_t pointer = pointer_of(launch, i);
    Extent extent{};
    if (pointer != 0 && ask(pointer, &extent) != 0) {
      all.emplace_back(extent.begin, extent.begin + extent.bytes);
    }
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

std::vector<KernelRange> memory_of(const KernelLaunch& launch) {
  std::vector<KernelRange> all;
  for (const auto& [begin, end] : Memory::the().ranges()) {
    const KernelRange whole{begin, end, begin, 1, nullptr};
    if (!is_divided(launch, whole)) {
      all.push_back(whole);
    }
  }
  const size_t count = all.size();
  for (const auto& block : launch.blocks) {
    const auto end = all.begin() + static_cast<std::ptrdiff_t>(count);
    if (std::none_of(all.begin(), end, [&](const KernelRange& one) { return overlap(one, block); })) {
      all.push_back({block.first, block.second, block.first, 1, nullptr});
    }
  }
  for (size_t i = 0; i < launch.function->parameter_bytes.size(); ++i) {
    const uint64_t pointer = pointer_of(launch, i);
    for (KernelRange& one : all) {
      if (one.name == nullptr && pointer >= one.begin && pointer < one.end) {
        one.name = launch.function->parameter_names[i].c_str();
        one.pointer = pointer;
        one.element = launch.function->parameter_elements[i];
      }
    }
  }
  for (const auto& [name, bytes] : launch.module->variables) {
    const uint64_t begin = address_of(*launch.module, name);
    all.push_back({begin, begin + bytes, begin, 1, name.c_str()});
  }
  std::sort(all.begin(), all.end(), [](const KernelRange& a, const KernelRange& b) { return a.begin < b.begin; });
  return all;
}
