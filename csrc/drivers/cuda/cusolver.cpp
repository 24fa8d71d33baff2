#include "drivers/cuda/cusolver.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <memory>

#include "drivers/cuda/cuda_calls.h"
#include "drivers/cuda/cuda_launcher.h"
#include "drivers/cuda/handle_pool.h"

namespace backplane::cuda {
namespace {

// From cusolver_common.h, cublas_api.h and library_types.h, whose enums are ints.
constexpr int kUnsupported = 9, kInvalidWorkspace = 31; // cusolverStatus_t
constexpr int kLowerTriangle = 0, kUpperTriangle = 1; // cublasFillMode_t
constexpr int kWithoutVectors = 0, kWithVectors = 1; // cusolverEigMode_t

// clang-format off
#define BACKPLANE_CUSOLVER_FUNCTIONS(FUNCTION) \
  FUNCTION(cusolverDnCreate, (void** handle)) \
  FUNCTION(cusolverDnDestroy, (void* handle)) \
  FUNCTION(cusolverDnCreateParams, (void** params)) \
  FUNCTION(cusolverDnSetStream, (void* handle, void* stream)) \
  FUNCTION(cusolverDnXpotrf_bufferSize, ( \
    void* handle, void* params, int fill, int64_t n, int a_type, const void* a, int64_t a_columns, int compute, \
    size_t* on_device, size_t* on_host)) \
  FUNCTION(cusolverDnXpotrf, ( \
    void* handle, void* params, int fill, int64_t n, int a_type, void* a, int64_t a_columns, int compute, \
    void* on_device, size_t device_bytes, void* on_host, size_t host_bytes, int* info)) \
  FUNCTION(cusolverDnXgetrf_bufferSize, ( \
    void* handle, void* params, int64_t m, int64_t n, int a_type, const void* a, int64_t a_columns, int compute, \
    size_t* on_device, size_t* on_host)) \
  FUNCTION(cusolverDnXgetrf, ( \
    void* handle, void* params, int64_t m, int64_t n, int a_type, void* a, int64_t a_columns, int64_t* pivots, \
    int compute, void* on_device, size_t device_bytes, void* on_host, size_t host_bytes, int* info)) \
  FUNCTION(cusolverDnXgetrs, ( \
    void* handle, void* params, int operation, int64_t n, int64_t columns, int a_type, const void* a, \
    int64_t a_columns, const int64_t* pivots, int b_type, void* b, int64_t b_columns, int* info)) \
  FUNCTION(cusolverDnXsyevd_bufferSize, ( \
    void* handle, void* params, int vectors, int fill, int64_t n, int a_type, const void* a, int64_t a_columns, \
    int values_type, const void* values, int compute, size_t* on_device, size_t* on_host)) \
  FUNCTION(cusolverDnXsyevd, ( \
    void* handle, void* params, int vectors, int fill, int64_t n, int a_type, void* a, int64_t a_columns, \
    int values_type, void* values, int compute, void* on_device, size_t device_bytes, void* on_host, \
    size_t host_bytes, int* info))
// clang-format on

struct CusolverApi {
#define BACKPLANE_CUSOLVER_MEMBER(name, parameters) int(*name) parameters = nullptr;
  BACKPLANE_CUSOLVER_FUNCTIONS(BACKPLANE_CUSOLVER_MEMBER)
#undef BACKPLANE_CUSOLVER_MEMBER
};
CusolverApi cusolver;

struct NumberType {
  const char* name; // PyTorch's
  int type, real; // cudaDataType, of the numbers and of their parts
  int64_t bytes, real_bytes;
};
constexpr std::array<NumberType, 4> kNumberTypes{{
    {"float32", 0, 0, 4, 4},
    {"float64", 1, 1, 8, 8},
    {"complex64", 4, 0, 8, 4},
    {"complex128", 5, 1, 16, 8},
}};

struct Solver {
  void* handle;
  void* params;
};

// What a call needs, and what it gets.
struct Workspace {
  void* on_device = nullptr;
  size_t device_bytes = 0;
  void* on_host = nullptr;
  size_t host_bytes = 0;
};

// The arguments of one matrix of a batch.
struct Matrix {
  const NumberType& type;
  const int64_t* integers;
  const CArgument* memory;
  int64_t number; // in the batch

  // The memory of the argument `which`, which has `bytes` for each matrix.
  template <typename T = void>
  T* at(int which, int64_t bytes) const {
    return reinterpret_cast<T*>(static_cast<char*>(memory[which].memory) + number * bytes);
  }
};

// The routine of a family: docs/driver-contract.md names its arguments.
struct Routine {
  const char* family;
  int memory, integers; // how many there are
  int batch; // which integer it is
  // Stores the bytes of workspace for one matrix. Returns a status, as `compute` does.
  int (*query)(const Solver& solver, const NumberType& type, const int64_t* integers, Workspace* workspace);
  int (*compute)(const Solver& solver, const Matrix& matrix, const Workspace& workspace);
};

int fill_of(int64_t upper) {
  return upper != 0 ? kUpperTriangle : kLowerTriangle;
}
int vectors_of(int64_t vectors) {
  return vectors != 0 ? kWithVectors : kWithoutVectors;
}

constexpr std::array<Routine, 4> kRoutines{{
    {"cholesky", 2, 3, 1,
     [](const Solver& solver, const NumberType& type, const int64_t* integers, Workspace* workspace) {
       const int64_t n = integers[2];
       return cusolver.cusolverDnXpotrf_bufferSize(
           solver.handle, solver.params, fill_of(integers[0]), n, type.type, nullptr, n, type.type,
           &workspace->device_bytes, &workspace->host_bytes);
     },
     [](const Solver& solver, const Matrix& of, const Workspace& workspace) {
       const int64_t n = of.integers[2];
       return cusolver.cusolverDnXpotrf(
           solver.handle, solver.params, fill_of(of.integers[0]), n, of.type.type, of.at(0, n * n * of.type.bytes), n,
           of.type.type, workspace.on_device, workspace.device_bytes, workspace.on_host, workspace.host_bytes,
           of.at<int>(1, sizeof(int)));
     }},
    {"lu", 3, 3, 0,
     [](const Solver& solver, const NumberType& type, const int64_t* integers, Workspace* workspace) {
       return cusolver.cusolverDnXgetrf_bufferSize(
           solver.handle, solver.params, integers[1], integers[2], type.type, nullptr, integers[1], type.type,
           &workspace->device_bytes, &workspace->host_bytes);
     },
     [](const Solver& solver, const Matrix& of, const Workspace& workspace) {
       const int64_t rows = of.integers[1], columns = of.integers[2];
       return cusolver.cusolverDnXgetrf(
           solver.handle, solver.params, rows, columns, of.type.type, of.at(0, rows * columns * of.type.bytes), rows,
           of.at<int64_t>(1, std::min(rows, columns) * static_cast<int64_t>(sizeof(int64_t))), of.type.type,
           workspace.on_device, workspace.device_bytes, workspace.on_host, workspace.host_bytes,
           of.at<int>(2, sizeof(int)));
     }},
    {"lu_solve", 3, 4, 1,
     [](const Solver&, const NumberType&, const int64_t*, Workspace* workspace) {
       workspace->device_bytes = sizeof(int); // only for whether an argument is invalid
       return 0;
     },
     [](const Solver& solver, const Matrix& of, const Workspace& workspace) {
       const auto operation = static_cast<int>(of.integers[0]);
       const int64_t n = of.integers[2], columns = of.integers[3];
       return cusolver.cusolverDnXgetrs(
           solver.handle, solver.params, operation, n, columns, of.type.type, of.at(1, n * n * of.type.bytes), n,
           of.at<int64_t>(2, n * static_cast<int64_t>(sizeof(int64_t))), of.type.type,
           of.at(0, n * columns * of.type.bytes), n, static_cast<int*>(workspace.on_device));
     }},
    {"eigh", 3, 4, 2,
     [](const Solver& solver, const NumberType& type, const int64_t* integers, Workspace* workspace) {
       const int64_t n = integers[3];
       return cusolver.cusolverDnXsyevd_bufferSize(
           solver.handle, solver.params, vectors_of(integers[0]), fill_of(integers[1]), n, type.type, nullptr, n,
           type.real, nullptr, type.type, &workspace->device_bytes, &workspace->host_bytes);
     },
     [](const Solver& solver, const Matrix& of, const Workspace& workspace) {
       const int64_t n = of.integers[3];
       return cusolver.cusolverDnXsyevd(
           solver.handle, solver.params, vectors_of(of.integers[0]), fill_of(of.integers[1]), n, of.type.type,
           of.at(0, n * n * of.type.bytes), n, of.type.real, of.at(1, n * of.type.real_bytes), of.type.type,
           workspace.on_device, workspace.device_bytes, workspace.on_host, workspace.host_bytes,
           of.at<int>(2, sizeof(int)));
     }},
}};

int make_solver(Solver* solver) {
  if (const int status = cusolver.cusolverDnCreate(&solver->handle)) {
    return status;
  }
  const int status = cusolver.cusolverDnCreateParams(&solver->params);
  if (status != 0) {
    static_cast<void>(cusolver.cusolverDnDestroy(solver->handle));
  }
  return status;
}

// Calls `use` with a handle, while the device's context is current.
int with_solver(size_t index, c10::function_ref<int(const Solver&)> use) {
  static auto& all = *new HandlePools<Solver>; // never destroyed: cuSOLVER can be unloaded before
  return call_in_context(index, [&] { return all.at(index).with(&make_solver, use); });
}

// cuSOLVER decomposes one matrix at a time, so a batch is a loop.
int run(size_t index, const NumberType& type, const Routine& routine, void* queue, const CArgument* arguments) {
  std::array<int64_t, 4> integers{};
  for (int i = 0; i < routine.integers; ++i) {
    integers[i] = *static_cast<const int64_t*>(arguments[routine.memory + i].data);
  }
  const CArgument* const given = arguments + routine.memory + routine.integers; // the workspace
  return with_solver(index, [&](const Solver& solver) {
    Workspace workspace;
    int status = routine.query(solver, type, integers.data(), &workspace);
    status = status != 0 ? status : cusolver.cusolverDnSetStream(solver.handle, queue);
    if (status == 0 && *static_cast<const int64_t*>(given[1].data) < static_cast<int64_t>(workspace.device_bytes)) {
      status = kInvalidWorkspace;
    }
    if (status == 0 && workspace.host_bytes != 0) { // what is computed on the host is no part of a graph
      int capture = 0;
      status = -api.cuStreamGetCaptureInfo_v2(queue, &capture, nullptr, nullptr, nullptr, nullptr);
      status = status == 0 && capture != kCaptureNone ? kUnsupported : status;
    }
    if (status != 0) {
      return status;
    }
    const std::unique_ptr<char[]> on_host(new char[workspace.host_bytes]); // only used during the call
    workspace.on_device = given[0].memory;
    workspace.on_host = workspace.host_bytes == 0 ? nullptr : on_host.get();
    for (int64_t i = 0; i < integers.at(routine.batch) && status == 0; ++i) {
      status = routine.compute(solver, Matrix{type, integers.data(), arguments, i}, workspace);
    }
    return status;
  });
}

// A routine has no argument for the device and the dtype, so each combination has a separate function.
constexpr size_t kTypes = kNumberTypes.size(), kOfFamily = kMostDevices * kTypes;

template <size_t family, size_t index, size_t type>
int routine_of(void* queue, const CArgument* arguments, uint64_t) {
  return run(index, kNumberTypes[type], kRoutines[family], queue, arguments);
}

template <size_t... all>
constexpr std::array<LibraryRoutine, sizeof...(all)> each_routine(std::index_sequence<all...>) {
  return {&routine_of<all / kOfFamily, all % kOfFamily / kTypes, all % kTypes>...};
}
constexpr auto kAll = each_routine(std::make_index_sequence<kRoutines.size() * kOfFamily>());

} // namespace

std::vector<std::string> cusolver_functions() {
#define BACKPLANE_CUSOLVER_NAME(name, parameters) #name,
  return {BACKPLANE_CUSOLVER_FUNCTIONS(BACKPLANE_CUSOLVER_NAME)};
#undef BACKPLANE_CUSOLVER_NAME
}

std::map<std::string, std::map<std::string, uintptr_t>> cusolver_routines(
    const std::map<std::string, uintptr_t>& functions, size_t index) {
#define BACKPLANE_CUSOLVER_LOAD(name, parameters) \
  cusolver.name = reinterpret_cast<decltype(cusolver.name)>(function_of(functions, "cuSOLVER", #name));
  BACKPLANE_CUSOLVER_FUNCTIONS(BACKPLANE_CUSOLVER_LOAD)
#undef BACKPLANE_CUSOLVER_LOAD
  std::map<std::string, std::map<std::string, uintptr_t>> found;
  for (size_t family = 0; family < kRoutines.size(); ++family) {
    for (size_t type = 0; type < kTypes; ++type) {
      const LibraryRoutine routine = kAll.at(family * kOfFamily + index * kTypes + type);
      found[kRoutines[family].family][kNumberTypes[type].name] = reinterpret_cast<uintptr_t>(routine);
    }
  }
  return found;
}

std::pair<int, size_t> cusolver_workspace(
    size_t index, const std::string& family, const std::string& dtype, const std::vector<int64_t>& integers) {
  const auto routine =
      std::find_if(kRoutines.begin(), kRoutines.end(), [&family](const auto& one) { return one.family == family; });
  const auto type =
      std::find_if(kNumberTypes.begin(), kNumberTypes.end(), [&dtype](const auto& one) { return one.name == dtype; });
  TORCH_CHECK_VALUE(
      routine != kRoutines.end() && type != kNumberTypes.end() &&
          integers.size() == static_cast<size_t>(routine->integers),
      "cuSOLVER has no ", family, " in ", dtype, " with ", integers.size(), " integers");
  Workspace workspace;
  const int status = with_solver(
      index, [&](const Solver& solver) { return routine->query(solver, *type, integers.data(), &workspace); });
  return {status, workspace.device_bytes};
}

} // namespace backplane::cuda
