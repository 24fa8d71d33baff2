#include "drivers/cuda/nccl.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "drivers/cuda/cuda_calls.h"
#include "drivers/cuda/cuda_launcher.h"

namespace backplane::cuda {
namespace {

using Step = CommunicationStep;

// From nccl.h, whose enums are ints.
constexpr int kInProgress = 7; // ncclResult_t
constexpr int kScalarDevice = 0, kScalarHost = 1; // ncclScalarResidence_t

struct UniqueId { // ncclUniqueId
  char bytes[128];
};

struct Config { // ncclConfig_t of version 2.14. Later versions read `size` bytes, and use their defaults for the others
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = INT_MIN;
  int unused = INT_MIN;
};

// clang-format off
#define BACKPLANE_NCCL_FUNCTIONS(FUNCTION) \
  FUNCTION(int, ncclGetUniqueId, (UniqueId* id)) \
  FUNCTION(int, ncclCommInitRankConfig, (void** communicator, int ranks, UniqueId id, int rank, Config* config)) \
  FUNCTION(int, ncclCommFinalize, (void* communicator)) \
  FUNCTION(int, ncclCommDestroy, (void* communicator)) \
  FUNCTION(int, ncclCommAbort, (void* communicator)) \
  FUNCTION(int, ncclCommGetAsyncError, (void* communicator, int* error)) \
  FUNCTION(const char*, ncclGetErrorString, (int status)) \
  FUNCTION(const char*, ncclGetLastError, (void* communicator)) \
  FUNCTION(int, ncclGroupStart, ()) \
  FUNCTION(int, ncclGroupEnd, ()) \
  FUNCTION(int, ncclRedOpCreatePreMulSum, ( \
    int* operation, void* factor, int dtype, int residence, void* communicator)) \
  FUNCTION(int, ncclRedOpDestroy, (int operation, void* communicator)) \
  FUNCTION(int, ncclAllGather, ( \
    const void* from, void* to, size_t count, int dtype, void* communicator, void* stream)) \
  FUNCTION(int, ncclAllReduce, ( \
    const void* from, void* to, size_t count, int dtype, int operation, void* communicator, void* stream)) \
  FUNCTION(int, ncclBroadcast, ( \
    const void* from, void* to, size_t count, int dtype, int root, void* communicator, void* stream)) \
  FUNCTION(int, ncclReduce, ( \
    const void* from, void* to, size_t count, int dtype, int operation, int root, void* communicator, void* stream)) \
  FUNCTION(int, ncclReduceScatter, ( \
    const void* from, void* to, size_t count, int dtype, int operation, void* communicator, void* stream)) \
  FUNCTION(int, ncclSend, (const void* from, size_t count, int dtype, int peer, void* communicator, void* stream)) \
  FUNCTION(int, ncclRecv, (void* to, size_t count, int dtype, int peer, void* communicator, void* stream))
// clang-format on

struct NcclApi {
#define BACKPLANE_NCCL_MEMBER(result, name, parameters) result(*name) parameters = nullptr;
  BACKPLANE_NCCL_FUNCTIONS(BACKPLANE_NCCL_MEMBER)
#undef BACKPLANE_NCCL_MEMBER
};
NcclApi nccl;

// ncclDataType_t.
int number_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kChar:
      return 0;
    case c10::kByte:
    case c10::kBool:
      return 1;
    case c10::kInt:
      return 2;
    case c10::kLong:
      return 4;
    case c10::kHalf:
      return 6;
    case c10::kFloat:
      return 7;
    case c10::kDouble:
      return 8;
    case c10::kBFloat16:
      return 9;
    default:
      TORCH_CHECK(false, "NCCL has no dtype for ", dtype);
  }
}

// ncclRedOp_t.
int number_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::Sum:
      return 0;
    case Reduction::Product:
      return 1;
    case Reduction::Max:
      return 2;
    case Reduction::Min:
      return 3;
    case Reduction::Average:
      return 4;
    case Reduction::ScaledSum:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "NCCL makes the number of a scaled sum");
}

// A number of a floating-point dtype.
struct Scalar {
  alignas(double) char bytes[sizeof(double)];
};
Scalar scalar_of(double value, c10::ScalarType dtype) {
  Scalar scalar{};
  const auto store = [&](auto number) { std::memcpy(scalar.bytes, &number, sizeof number); };
  switch (dtype) {
    case c10::kHalf:
      store(c10::Half(static_cast<float>(value)));
      break;
    case c10::kBFloat16:
      store(c10::BFloat16(static_cast<float>(value)));
      break;
    case c10::kFloat:
      store(static_cast<float>(value));
      break;
    default:
      store(value);
  }
  return scalar;
}

std::string description(const char* function, int status, void* communicator) {
  if (status < 0) {
    return c10::str(function, " failed, because the device's context cannot be current: CUDA error ", -status);
  }
  const char* last = communicator == nullptr ? "" : nccl.ncclGetLastError(communicator);
  return c10::str(
      function, " answered ", status, " (", nccl.ncclGetErrorString(status), ")",
      last == nullptr || *last == '\0' ? "" : ": ", last == nullptr ? "" : last);
}

// Made with blocking = 0: no call waits for other ranks, so that a lost rank cannot block a thread. A call whose status
// is «in progress» is continued by a thread of NCCL, and settle() waits for it.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(size_t index, const std::string& id, int rank, int size) : index_(index) {
    UniqueId unique;
    TORCH_CHECK(id.size() == sizeof unique.bytes, "NCCL's identifier of a group has ", id.size(), " bytes, not 128");
    std::memcpy(unique.bytes, id.data(), sizeof unique.bytes);
    Config config;
    config.blocking = 0;
    const int status =
        in_context([&] { return nccl.ncclCommInitRankConfig(&communicator_, size, unique, rank, &config); });
    if (status != 0 && status != kInProgress) {
      const std::string why = description("ncclCommInitRankConfig", status, nullptr);
      abort();
      TORCH_CHECK(false, why);
    }
  }

  ~NcclCommunicator() override {
    abort();
  }

  void enqueue(c10::ArrayRef<CommunicationStep> steps, uintptr_t queue, Deadline deadline) override {
    if (!has_joined_) {
      settle("ncclCommInitRankConfig", deadline);
      has_joined_ = true;
    }
    std::vector<int> made; // operations
    const char* function = "";
    {
      const std::lock_guard<std::mutex> guard(lock_);
      check_open();
      const int status = in_context([&] { return submit(steps, reinterpret_cast<void*>(queue), &made, &function); });
      TORCH_CHECK(status == 0 || status == kInProgress, description(function, status, communicator_));
    }
    settle(function, deadline);
    const std::lock_guard<std::mutex> guard(lock_);
    for (const int operation : made) {
      check_open();
      static_cast<void>(nccl.ncclRedOpDestroy(operation, communicator_));
    }
  }

  std::string failure() override {
    const std::lock_guard<std::mutex> guard(lock_);
    if (communicator_ == nullptr) {
      return {};
    }
    const int status = state();
    return status == 0 || status == kInProgress ? "" : description("ncclCommGetAsyncError", status, communicator_);
  }

  void abort() noexcept override {
    const std::lock_guard<std::mutex> guard(lock_);
    if (communicator_ != nullptr) {
      static_cast<void>(in_context([&] { return nccl.ncclCommAbort(communicator_); }));
      communicator_ = nullptr;
    }
  }

  void finish(Deadline deadline) override {
    call("ncclCommFinalize", [&] { return nccl.ncclCommFinalize(communicator_); });
    settle("ncclCommFinalize", deadline);
    call("ncclCommDestroy", [&] { return nccl.ncclCommDestroy(communicator_); });
    const std::lock_guard<std::mutex> guard(lock_);
    communicator_ = nullptr;
  }

 private:
  template <typename Function>
  int in_context(const Function& function) const {
    return call_in_context(index_, function);
  }

  void check_open() const {
    TORCH_CHECK(communicator_ != nullptr, "the communicator was aborted");
  }

  template <typename Function>
  void call(const char* name, const Function& function) {
    const std::lock_guard<std::mutex> guard(lock_);
    check_open();
    const int status = in_context(function);
    TORCH_CHECK(status == 0 || status == kInProgress, description(name, status, communicator_));
  }

  // The state of the communicator. The caller holds the lock.
  int state() {
    int error = 0;
    const int status = in_context([&] { return nccl.ncclCommGetAsyncError(communicator_, &error); });
    return status != 0 ? status : error;
  }

  // Waits until the call of a function is complete.
  void settle(const char* function, Deadline deadline) {
    constexpr auto kFirstPause = std::chrono::microseconds(5), kLastPause = std::chrono::microseconds(1000);
    for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLastPause)) {
      {
        const std::lock_guard<std::mutex> guard(lock_);
        check_open();
        const int status = state();
        if (status == 0) {
          return;
        }
        TORCH_CHECK(status == kInProgress, description(function, status, communicator_));
      }
      TORCH_CHECK(
          std::chrono::steady_clock::now() < deadline, function,
          " did not complete within the timeout: a rank is late or lost");
      std::this_thread::sleep_for(pause);
    }
  }

  struct Numbers { // of a step
    int dtype;
    int operation;
  };

  // Makes the operations, and submits the steps as one group. Returns a status, and stores the function that returned
  // it.
  int submit(c10::ArrayRef<CommunicationStep> steps, void* queue, std::vector<int>* made, const char** function) {
    std::vector<Numbers> numbers;
    for (const auto& step : steps) {
      auto& [dtype, operation] = numbers.emplace_back(Numbers{number_of(step.dtype), 0});
      if (step.reduction != Reduction::ScaledSum) {
        operation = number_of(step.reduction);
        continue;
      }
      *function = "ncclRedOpCreatePreMulSum";
      if (const int status = make_operation(step, dtype, &operation)) {
        return status;
      }
      made->push_back(operation);
    }
    *function = "ncclGroupStart";
    int status = nccl.ncclGroupStart();
    if (status != 0) {
      return status;
    }
    for (size_t i = 0; i < steps.size() && (status == 0 || status == kInProgress); ++i) {
      status = add(steps[i], numbers[i], queue, function);
    }
    const int ended = nccl.ncclGroupEnd();
    if (status == 0 || status == kInProgress) {
      status = ended;
      *function = steps.size() == 1 ? *function : "ncclGroupEnd";
    }
    return status;
  }

  int make_operation(const CommunicationStep& step, int dtype, int* operation) {
    if (step.factor_memory != nullptr) {
      return nccl.ncclRedOpCreatePreMulSum(
          operation, const_cast<void*>(step.factor_memory), dtype, kScalarDevice, communicator_);
    }
    Scalar factor = scalar_of(step.factor, step.dtype);
    return nccl.ncclRedOpCreatePreMulSum(operation, factor.bytes, dtype, kScalarHost, communicator_);
  }

  int add(const CommunicationStep& step, const Numbers& numbers, void* queue, const char** function) {
    const auto [dtype, operation] = numbers;
    switch (step.kind) {
      case Step::Kind::AllGather:
        *function = "ncclAllGather";
        return nccl.ncclAllGather(step.from, step.to, step.count, dtype, communicator_, queue);
      case Step::Kind::AllReduce:
        *function = "ncclAllReduce";
        return nccl.ncclAllReduce(step.from, step.to, step.count, dtype, operation, communicator_, queue);
      case Step::Kind::Broadcast:
        *function = "ncclBroadcast";
        return nccl.ncclBroadcast(step.from, step.to, step.count, dtype, step.peer, communicator_, queue);
      case Step::Kind::Receive:
        *function = "ncclRecv";
        return nccl.ncclRecv(step.to, step.count, dtype, step.peer, communicator_, queue);
      case Step::Kind::Reduce:
        *function = "ncclReduce";
        return nccl.ncclReduce(step.from, step.to, step.count, dtype, operation, step.peer, communicator_, queue);
      case Step::Kind::ReduceScatter:
        *function = "ncclReduceScatter";
        return nccl.ncclReduceScatter(step.from, step.to, step.count, dtype, operation, communicator_, queue);
      case Step::Kind::Send:
        *function = "ncclSend";
        return nccl.ncclSend(step.from, step.count, dtype, step.peer, communicator_, queue);
    }
    TORCH_INTERNAL_ASSERT(false);
  }

  const size_t index_;
  std::atomic<bool> has_joined_{false};
  std::mutex lock_; // held during calls of NCCL, none of which waits
  void* communicator_ = nullptr; // null after abort() and finish()
};

class Nccl final : public CommunicationLibrary {
 public:
  Nccl(size_t index, std::string name, std::string place)
      : CommunicationLibrary(std::move(name), std::move(place)), index_(index) {}

  std::string make_id() override {
    UniqueId id;
    const int status = call_in_context(index_, [&] { return nccl.ncclGetUniqueId(&id); });
    TORCH_CHECK(status == 0, description("ncclGetUniqueId", status, nullptr));
    return {id.bytes, sizeof id.bytes};
  }

  std::unique_ptr<Communicator> join(const std::string& id, int rank, int size) override {
    return std::make_unique<NcclCommunicator>(index_, id, rank, size);
  }

 private:
  const size_t index_;
};

} // namespace

std::vector<std::string> nccl_functions() {
#define BACKPLANE_NCCL_NAME(result, name, parameters) #name,
  return {BACKPLANE_NCCL_FUNCTIONS(BACKPLANE_NCCL_NAME)};
#undef BACKPLANE_NCCL_NAME
}

std::shared_ptr<CommunicationLibrary> nccl_library(
    const std::map<std::string, uintptr_t>& functions, size_t index, std::string name, std::string place) {
#define BACKPLANE_NCCL_LOAD(result, name, parameters) \
  nccl.name = reinterpret_cast<decltype(nccl.name)>(function_of(functions, "NCCL", #name));
  BACKPLANE_NCCL_FUNCTIONS(BACKPLANE_NCCL_LOAD)
#undef BACKPLANE_NCCL_LOAD
  return std::make_shared<Nccl>(index, std::move(name), std::move(place));
}

} // namespace backplane::cuda
