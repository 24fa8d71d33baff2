// Launches: checks of the parameters, and the execution in the kernel interpreter.

#include "launch.h"

#include <cstdlib>
#include <cstring>

#include "capture.h"
#include "entry.h"
#include "functions.h"
#include "kernel_launch.h"
#include "kernel_memory.h"
#include "memory.h"

extern "C" int interpreter_launch(
    void*,
    const InterpreterKernel*,
    const uint64_t* items,
    const uint64_t* group,
    const InterpreterArgument*,
    uint64_t);

namespace {

bool reports() {
  static const bool value = getenv("CUDA_EMULATOR_REPORT") != nullptr;
  return value;
}

bool runs_kernels() {
  static const bool value = [] {
    const char* setting = getenv("CUDA_EMULATOR_RUN");
    return setting == nullptr || strcmp(setting, "0") != 0;
  }();
  return value;
}

// The arguments as one buffer: CU_LAUNCH_PARAM_BUFFER_POINTER (1) and _SIZE (2) in `extra`.
CUresult take_buffer(void** extra, KernelLaunch& launch) {
  const void* buffer = nullptr;
  size_t bytes = 0;
  for (; *extra != nullptr; extra += 2) {
    const auto key = reinterpret_cast<uintptr_t>(*extra);
    REQUIRE(key == 1 || key == 2, CUDA_ERROR_INVALID_VALUE);
    key == 1 ? void(buffer = extra[1]) : void(bytes = *static_cast<size_t*>(extra[1]));
  }
  REQUIRE(bytes >= launch.parameters.size(), CUDA_ERROR_INVALID_VALUE);
  REQUIRE(buffer != nullptr || launch.parameters.empty(), CUDA_ERROR_INVALID_VALUE);
  if (!launch.parameters.empty()) {
    memcpy(launch.parameters.data(), buffer, launch.parameters.size());
  }
  return CUDA_SUCCESS;
}

CUresult take_arguments(const CUDA_KERNEL_NODE_PARAMS& given, KernelLaunch& launch) {
  const Function& function = *launch.function;
  const size_t count = function.parameter_bytes.size();
  launch.parameters.resize(count == 0 ? 0 : function.parameter_offsets.back() + function.parameter_bytes.back());
  if (given.extra != nullptr) {
    REQUIRE(given.kernelParams == nullptr, CUDA_ERROR_INVALID_VALUE);
    return take_buffer(given.extra, launch);
  }
  REQUIRE(count == 0 || given.kernelParams != nullptr, CUDA_ERROR_INVALID_VALUE);
  for (size_t i = 0; i < count; ++i) {
    REQUIRE(given.kernelParams[i] != nullptr, CUDA_ERROR_INVALID_VALUE);
    memcpy(
        launch.parameters.data() + function.parameter_offsets[i], given.kernelParams[i], function.parameter_bytes[i]);
  }
  return CUDA_SUCCESS;
}

} // namespace

CUresult make_launch(const CUDA_KERNEL_NODE_PARAMS& given, std::shared_ptr<KernelLaunch>* made) {
  auto launch = std::make_shared<KernelLaunch>();
  launch->function = find(given.func != nullptr ? given.func : given.kern);
  REQUIRE(launch->function != nullptr, CUDA_ERROR_INVALID_HANDLE);
  launch->module = launch->function->module.lock();
  REQUIRE(launch->module != nullptr, CUDA_ERROR_INVALID_HANDLE);
  const uint64_t grid[] = {given.gridDimX, given.gridDimY, given.gridDimZ};
  const uint64_t block[] = {given.blockDimX, given.blockDimY, given.blockDimZ};
  constexpr uint64_t most_grid[] = {2147483647, 65535, 65535}, most_block[] = {1024, 1024, 64};
  for (int d = 0; d < 3; ++d) {
    REQUIRE(grid[d] != 0 && grid[d] <= most_grid[d], CUDA_ERROR_INVALID_VALUE);
    REQUIRE(block[d] != 0 && block[d] <= most_block[d], CUDA_ERROR_INVALID_VALUE);
    launch->grid[d] = static_cast<unsigned>(grid[d]);
    launch->block[d] = static_cast<unsigned>(block[d]);
  }
  const uint64_t threads = block[0] * block[1] * block[2];
  REQUIRE(threads <= kMostThreads, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(threads <= static_cast<uint64_t>(launch->function->threads), CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  REQUIRE(given.sharedMemBytes <= static_cast<unsigned>(launch->function->dynamic_shared), CUDA_ERROR_INVALID_VALUE);
  launch->shared = given.sharedMemBytes;
  RETURN_ERROR(take_arguments(given, *launch));
  if (checks_kernels()) {
    launch->blocks = known_blocks(*launch);
  }
  *made = launch;
  return CUDA_SUCCESS;
}

CUresult KernelLaunch::execute(Context& context) {
  RETURN_ERROR(injected_fault("(kernel)"));
  if (function->host != nullptr) {
    const unsigned sizes[] = {grid[0], grid[1], grid[2], block[0], block[1], block[2], shared};
    return static_cast<CUresult>(function->host(sizes, parameters.data(), parameters.size()));
  }
  std::vector<InterpreterArgument> arguments;
  for (size_t i = 0; i < function->parameter_bytes.size(); ++i) {
    arguments.push_back({nullptr, 0, parameters.data() + function->parameter_offsets[i], function->parameter_bytes[i]});
  }
  Memory& memory = Memory::the();
  std::vector<std::pair<uint64_t, uint64_t>> ranges = memory.registered();
  const auto dynamic = reinterpret_cast<uint64_t>(module->dynamic_shared);
  ranges.emplace_back(dynamic, dynamic + shared);
  ranges.emplace_back(dynamic + kDynamicBytes, module->end);
  const unsigned own = 1u << context.device->ordinal;
  KernelLaunchFacts facts{};
  facts.name = function->name.c_str();
  facts.arena = reinterpret_cast<uint64_t>(memory.arena());
  facts.arena_bytes = kArenaBytes;
  facts.image = module->begin;
  facts.image_bytes = dynamic - module->begin;
  facts.dynamic = dynamic;
  facts.dynamic_bytes = shared;
  facts.owners = memory.owners();
  facts.mask = static_cast<uint8_t>(own | context.peers | kHostOwner);
  facts.reports = reports();
  facts.ranges = ranges.data();
  facts.range_count = ranges.size();
  std::vector<KernelRange> known;
  std::vector<std::pair<uint64_t, uint64_t>> freed;
  if (checks_kernels()) {
    known = memory_of(*this);
    freed = memory.retired();
    facts.checks = true;
    facts.continues = continues_after_findings();
    facts.memory = known.data();
    facts.memory_count = known.size();
    facts.freed = freed.data();
    facts.freed_count = freed.size();
  }
  arguments.push_back({nullptr, 0, &facts, sizeof facts});
  uint64_t items[3], group[3];
  for (int d = 0; d < 3; ++d) {
    group[d] = block[d];
    items[d] = uint64_t{grid[d]} * block[d];
  }
  return static_cast<CUresult>(
      interpreter_launch(nullptr, &function->kernel, items, group, arguments.data(), arguments.size()));
}

namespace {

// All blocks of a cooperative launch must be on the device at the same time.
CUresult check_cooperative(const CUDA_KERNEL_NODE_PARAMS& given) {
  const auto function = find(given.func);
  REQUIRE(function != nullptr, CUDA_ERROR_INVALID_HANDLE);
  const uint64_t threads = uint64_t{given.blockDimX} * given.blockDimY * given.blockDimZ;
  REQUIRE(threads != 0 && threads <= kMostThreads, CUDA_ERROR_INVALID_VALUE);
  int blocks = 0;
  RETURN_ERROR(occupancy(&blocks, *function, static_cast<int>(threads), given.sharedMemBytes));
  const uint64_t most = static_cast<uint64_t>(blocks) * static_cast<uint64_t>(multiprocessors());
  const bool fits = uint64_t{given.gridDimX} * given.gridDimY * given.gridDimZ <= most;
  return fits ? CUDA_SUCCESS : CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
}

CUresult launch_on(const std::shared_ptr<Context>& context, CUstream handle, const CUDA_KERNEL_NODE_PARAMS& given) {
  if (!runs_kernels()) {
    return CUDA_SUCCESS;
  }
  const auto stream = stream_of(context, handle);
  REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE);
  std::shared_ptr<KernelLaunch> launch;
  RETURN_ERROR(make_launch(given, &launch));
  const auto of = launch->module->context.lock();
  REQUIRE(of == nullptr || of == stream->context.lock(), CUDA_ERROR_INVALID_HANDLE);
  return submit(stream, launch);
}

} // namespace

API cuLaunchKernel(
    CUfunction function,
    unsigned grid_x,
    unsigned grid_y,
    unsigned grid_z,
    unsigned block_x,
    unsigned block_y,
    unsigned block_z,
    unsigned shared,
    CUstream stream,
    void** arguments,
    void** extra) {
  ENTER_CONTEXT();
  return launch_on(
      context, stream,
      {function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, arguments, extra, nullptr, nullptr});
}

namespace {

constexpr int kCooperative = 2, kCluster = 4; // of CUlaunchAttributeID
constexpr unsigned kMostBlocksOfCluster = 8;

// Blocks run one after another. So clusters and grids that do not synchronize work.
CUresult check(const CUlaunchAttribute& one, const CUDA_KERNEL_NODE_PARAMS& given) {
  if (one.id == kCooperative && one.value.cooperative != 0) {
    return check_cooperative(given);
  }
  const auto& cluster = one.value.cluster;
  if (one.id != kCluster || (cluster.x == 1 && cluster.y == 1 && cluster.z == 1)) {
    return CUDA_SUCCESS;
  }
  REQUIRE(capability() >= 90, CUDA_ERROR_NOT_SUPPORTED);
  REQUIRE(cluster.x != 0 && cluster.y != 0 && cluster.z != 0, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(uint64_t{cluster.x} * cluster.y * cluster.z <= kMostBlocksOfCluster, CUDA_ERROR_INVALID_VALUE);
  const bool fits =
      given.gridDimX % cluster.x == 0 && given.gridDimY % cluster.y == 0 && given.gridDimZ % cluster.z == 0;
  return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

} // namespace

API cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra) {
  ENTER_CONTEXT();
  REQUIRE(config != nullptr && (config->numAttrs == 0 || config->attrs != nullptr), CUDA_ERROR_INVALID_VALUE);
  const CUDA_KERNEL_NODE_PARAMS given{function,          config->gridDimX,
                                      config->gridDimY,  config->gridDimZ,
                                      config->blockDimX, config->blockDimY,
                                      config->blockDimZ, config->sharedMemBytes,
                                      arguments,         extra,
                                      nullptr,           nullptr};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    RETURN_ERROR(check(config->attrs[i], given));
  }
  return launch_on(context, config->hStream, given);
}

API cuLaunchCooperativeKernel(
    CUfunction function,
    unsigned grid_x,
    unsigned grid_y,
    unsigned grid_z,
    unsigned block_x,
    unsigned block_y,
    unsigned block_z,
    unsigned shared,
    CUstream stream,
    void** arguments) {
  ENTER_CONTEXT();
  const CUDA_KERNEL_NODE_PARAMS given{function, grid_x, grid_y,    grid_z,  block_x, block_y,
                                      block_z,  shared, arguments, nullptr, nullptr, nullptr};
  RETURN_ERROR(check_cooperative(given));
  return launch_on(context, stream, given);
}
