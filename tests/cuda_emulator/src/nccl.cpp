// libnccl: communication between processes of one machine, as host functions of the stream.
//
// Each pair of ranks has a Unix socket. Every rank sends what another one needs, and computes reductions itself. As in
// NVIDIA's library, a collective whose ranks do not all take part waits until it is aborted. Communicators are as with
// blocking = 0: calls are continued by threads, and the communicator must not be used meanwhile.

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "device_library.h"
#include "numbers.h"
#include "registry.h"

extern "C" CUresult cuCtxGetDevice(int*);
extern "C" CUresult cuCtxSetCurrent(CUcontext);
extern "C" CUresult cuDeviceGetPCIBusId(char*, int, int);

enum Status : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

struct UniqueId {
  char bytes[128];
};

struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

namespace {

// --- communicators ---------------------------------------------------------------------------------------------------

struct Factor { // of an operation made by ncclRedOpCreatePreMulSum
  int dtype;
  const void* memory; // null: `value` is the factor
  double value;
};

struct Communicator {
  int rank = 0, size = 0;
  CUcontext context = nullptr;
  std::string id, bus;
  std::vector<int> sockets; // by rank
  std::atomic<int> state{kInProgress};
  std::atomic<bool> is_aborted{false};
  std::mutex mutex; // protects the following
  std::condition_variable changed;
  int running = 0; // threads and host functions
  std::map<int, Factor> operations;
  std::string error;

  void fail(int status, const std::string& why) {
    {
      const std::lock_guard lock(mutex);
      if (error.empty()) {
        error = why;
      }
    }
    state = status;
  }
};

using Pointer = std::shared_ptr<Communicator>;

// Counts a thread or host function, for which ncclCommAbort and ncclCommDestroy wait.
class Running {
 public:
  explicit Running(Pointer of) : of_(std::move(of)) {
    const std::lock_guard lock(of_->mutex);
    ++of_->running;
  }
  ~Running() {
    const std::lock_guard lock(of_->mutex);
    --of_->running;
    of_->changed.notify_all();
  }
  Running(const Running&) = delete;

 private:
  const Pointer of_;
};

void wait_until_idle(Communicator& one) {
  std::unique_lock lock(one.mutex);
  one.changed.wait(lock, [&] { return one.running == 0; });
}

template <class Function>
void in_thread(const Pointer& one, Function function) {
  auto running = std::make_shared<Running>(one);
  std::thread([one, running, function] {
    cuCtxSetCurrent(one->context);
    function();
  }).detach();
}

// --- sockets ---------------------------------------------------------------------------------------------------------

struct Address {
  sockaddr_un value{};
  socklen_t bytes = 0;
};

// A name without a file.
Address address_of(const std::string& id, int rank) {
  Address made;
  made.value.sun_family = AF_UNIX;
  const std::string name = "emulated-nccl-" + id + "-" + std::to_string(rank);
  memcpy(made.value.sun_path + 1, name.data(), name.size());
  made.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return made;
}

struct Greeting {
  int rank;
  char bus[32];
};

Greeting greeting_of(const Communicator& one) {
  Greeting made{one.rank, {}};
  snprintf(made.bus, sizeof made.bus, "%s", one.bus.c_str());
  return made;
}

// Sends to and receives from a new peer. Returns false if it has gone.
bool greet(const Communicator& one, int socket, Greeting* peer) {
  const Greeting own = greeting_of(one);
  return send(socket, &own, sizeof own, MSG_NOSIGNAL) == sizeof own &&
      recv(socket, peer, sizeof *peer, MSG_WAITALL) == sizeof *peer;
}

void pause_shortly() {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Connects to all ranks: to those below this one, which listen.
void connect_all(Communicator& one) {
  const Address own = address_of(one.id, one.rank);
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener, reinterpret_cast<const sockaddr*>(&own.value), own.bytes) != 0 || listen(listener, 64) != 0) {
    one.fail(kInvalidUsage, "the rank is already in the group");
  }
  std::map<int, std::string> buses{{one.rank, one.bus}};
  const auto add = [&](int socket) {
    Greeting peer{};
    if (!greet(one, socket, &peer)) {
      one.fail(kRemoteError, "a rank has gone");
      return;
    }
    one.sockets[peer.rank] = socket;
    for (const auto& [rank, bus] : buses) {
      if (bus == peer.bus) {
        one.fail(
            kInvalidUsage,
            "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " + std::to_string(peer.rank) +
                " both on CUDA device " + bus);
      }
    }
    buses.emplace(peer.rank, peer.bus);
  };
  for (int rank = 0; rank < one.rank && one.state == kInProgress;) {
    const Address other = address_of(one.id, rank);
    const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(made, reinterpret_cast<const sockaddr*>(&other.value), other.bytes) == 0) {
      add(made);
      ++rank;
      continue;
    }
    close(made);
    if (one.is_aborted) {
      break;
    }
    pause_shortly();
  }
  for (int count = one.size - one.rank - 1; count > 0 && one.state == kInProgress && !one.is_aborted;) {
    pollfd waiting{listener, POLLIN, 0};
    if (poll(&waiting, 1, 10) == 1) {
      add(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
      --count;
    }
  }
  close(listener);
  int expected = kInProgress;
  one.state.compare_exchange_strong(expected, kSuccess);
}

// --- steps -----------------------------------------------------------------------------------------------------------

enum class Kind { AllGather, AllReduce, Broadcast, Receive, Reduce, ReduceScatter, Send };

struct Step {
  Kind kind;
  const char* from;
  char* to;
  size_t count;
  int dtype, operation, peer;
};

// Before each message: the ranks must agree on it.
struct Header {
  uint32_t kind, dtype;
  uint64_t bytes;
};

struct Outgoing {
  Header header;
  const char* data;
};
struct Incoming {
  Header header;
  char* data;
};
struct Traffic { // with one rank
  std::vector<Outgoing> out;
  std::vector<Incoming> in;
};

// Sends and receives all of it, at the same time. Returns false if the communicator was aborted.
class Exchange {
 public:
  Exchange(Communicator& of, std::vector<Traffic>& traffic)
      : of_(of), traffic_(traffic), sent_(of.size), read_(of.size) {}

  bool run() {
    copy_own();
    while (!of_.is_aborted) {
      std::vector<pollfd> waiting;
      for (int rank = 0; rank < of_.size; ++rank) {
        const short wanted = (sent_[rank].message < traffic_[rank].out.size() ? POLLOUT : 0) |
            (read_[rank].message < traffic_[rank].in.size() ? POLLIN : 0);
        if (rank != of_.rank && wanted != 0) {
          waiting.push_back({of_.sockets[rank], wanted, 0});
        }
      }
      if (waiting.empty()) {
        return true;
      }
      if (of_.state != kSuccess && of_.state != kInProgress) {
        pause_shortly(); // as a kernel whose peer is lost
        continue;
      }
      poll(waiting.data(), waiting.size(), 10);
      for (int rank = 0; rank < of_.size; ++rank) {
        if (rank != of_.rank) {
          move(rank);
        }
      }
    }
    return false;
  }

 private:
  struct Position {
    size_t message = 0, byte = 0; // bytes of the header come first
    Header header{};
  };

  void copy_own() {
    const Traffic& own = traffic_[of_.rank];
    if (own.out.size() != own.in.size()) {
      of_.fail(kInvalidUsage, "sends to the own rank without as many receives");
      return;
    }
    for (size_t i = 0; i < own.out.size(); ++i) {
      memmove(own.in[i].data, own.out[i].data, own.in[i].header.bytes);
    }
  }

  void move(int rank) {
    const Traffic& traffic = traffic_[rank];
    const int socket = of_.sockets[rank];
    Position& sent = sent_[rank];
    while (sent.message < traffic.out.size()) {
      const Outgoing& one = traffic.out[sent.message];
      const bool in_header = sent.byte < sizeof(Header);
      const char* at =
          in_header ? reinterpret_cast<const char*>(&one.header) + sent.byte : one.data + (sent.byte - sizeof(Header));
      const size_t bytes = (in_header ? 0 : one.header.bytes) + sizeof(Header) - sent.byte;
      if (!advance(send(socket, at, bytes, MSG_DONTWAIT | MSG_NOSIGNAL), sent, one.header.bytes)) {
        break;
      }
    }
    Position& read = read_[rank];
    while (read.message < traffic.in.size()) {
      const Incoming& one = traffic.in[read.message];
      const bool in_header = read.byte < sizeof(Header);
      char* at =
          in_header ? reinterpret_cast<char*>(&read.header) + read.byte : one.data + (read.byte - sizeof(Header));
      const size_t bytes = (in_header ? 0 : one.header.bytes) + sizeof(Header) - read.byte;
      const ssize_t moved = recv(socket, at, bytes, MSG_DONTWAIT);
      if (moved == 0) {
        of_.fail(kRemoteError, "rank " + std::to_string(rank) + " has closed the connection");
        return;
      }
      const bool completes_header = in_header && moved == static_cast<ssize_t>(bytes);
      if (completes_header && memcmp(&read.header, &one.header, sizeof(Header)) != 0) {
        of_.fail(
            kInternalError,
            "rank " + std::to_string(rank) + " sends " + std::to_string(read.header.bytes) + " bytes of dtype " +
                std::to_string(read.header.dtype) + " in call " + std::to_string(read.header.kind) + ", but " +
                std::to_string(one.header.bytes) + " bytes of dtype " + std::to_string(one.header.dtype) + " in call " +
                std::to_string(one.header.kind) + " are expected");
        return;
      }
      if (!advance(moved, read, one.header.bytes)) {
        break;
      }
    }
  }

  // Returns false if the socket takes or has no more now.
  bool advance(ssize_t moved, Position& position, size_t bytes) {
    if (moved < 0) {
      if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
        of_.fail(kRemoteError, "a connection failed");
      }
      return false;
    }
    position.byte += static_cast<size_t>(moved);
    if (position.byte == sizeof(Header) + bytes) {
      position = {position.message + 1, 0, {}};
    }
    return true;
  }

  Communicator& of_;
  std::vector<Traffic>& traffic_;
  std::vector<Position> sent_, read_;
};

constexpr int kSum = 0, kProduct = 1, kMax = 2, kMin = 3, kAverage = 4, kOperations = 5;

template <class T>
T combined(T a, T b, int operation) {
  switch (operation) {
    case kProduct:
      return a * b;
    case kMax:
      return std::max(a, b);
    case kMin:
      return std::min(a, b);
    default:
      return a + b;
  }
}

// `Wide`: the type of partial results.
template <class T, class Wide>
void reduce(char* to, const std::vector<const char*>& from, size_t count, int operation) {
  for (size_t i = 0; i < count; ++i) {
    Wide result = Wide(reinterpret_cast<const T*>(from[0])[i]);
    for (size_t rank = 1; rank < from.size(); ++rank) {
      result = combined<Wide>(result, Wide(reinterpret_cast<const T*>(from[rank])[i]), operation);
    }
    if (operation == kAverage) {
      result = result / static_cast<Wide>(from.size());
    }
    if constexpr (std::is_same_v<Wide, double>) {
      reinterpret_cast<T*>(to)[i] = rounded<T>(result);
    } else {
      reinterpret_cast<T*>(to)[i] = static_cast<T>(result);
    }
  }
}

template <class T>
void scale(char* to, const char* from, size_t count, double factor) {
  for (size_t i = 0; i < count; ++i) {
    reinterpret_cast<T*>(to)[i] = rounded<T>(double(reinterpret_cast<const T*>(from)[i]) * factor);
  }
}

template <class T>
double number(const void* at) {
  return double(*static_cast<const T*>(at));
}

struct Dtype {
  size_t bytes;
  void (*reduce)(char*, const std::vector<const char*>&, size_t, int);
  void (*scale)(char*, const char*, size_t, double);
  double (*number)(const void*);
};
const Dtype dtypes[] = {
    // by ncclDataType_t
    {1, &reduce<int8_t, int64_t>, nullptr, nullptr},
    {1, &reduce<uint8_t, uint64_t>, nullptr, nullptr},
    {4, &reduce<int32_t, int64_t>, nullptr, nullptr},
    {4, &reduce<uint32_t, uint64_t>, nullptr, nullptr},
    {8, &reduce<int64_t, int64_t>, nullptr, nullptr},
    {8, &reduce<uint64_t, uint64_t>, nullptr, nullptr},
    {2, &reduce<_Float16, double>, &scale<_Float16>, &number<_Float16>},
    {4, &reduce<float, double>, &scale<float>, &number<float>},
    {8, &reduce<double, double>, &scale<double>, &number<double>},
    {2, &reduce<BFloat16, double>, &scale<BFloat16>, &number<BFloat16>},
};
constexpr int kDtypes = 10;

// Runs steps in the thread of the stream.
class Runner {
 public:
  Runner(Communicator& of, std::map<int, Factor> operations) : of_(of), operations_(std::move(operations)) {}

  void run(const std::vector<Step>& steps) {
    std::vector<Traffic> pairs(of_.size);
    for (const Step& step : steps) {
      if (step.kind == Kind::Send) {
        pairs[step.peer].out.push_back({header(step, Kind::Send, bytes_of(step)), step.from});
      } else if (step.kind == Kind::Receive) {
        pairs[step.peer].in.push_back({header(step, Kind::Send, bytes_of(step)), step.to});
      }
    }
    if (!Exchange(of_, pairs).run()) {
      return;
    }
    for (const Step& step : steps) {
      if (step.kind != Kind::Send && step.kind != Kind::Receive && !collect(step)) {
        return;
      }
    }
  }

 private:
  static size_t bytes_of(const Step& step) {
    return step.count * dtypes[step.dtype].bytes;
  }

  static Header header(const Step& step, Kind kind, size_t bytes) {
    return {static_cast<uint32_t>(kind), static_cast<uint32_t>(step.dtype), bytes};
  }

  bool collect(const Step& step) {
    const size_t bytes = bytes_of(step);
    std::vector<Traffic> traffic(of_.size);
    const auto sends = [&](int rank, const char* data) {
      traffic[rank].out.push_back({header(step, step.kind, bytes), data});
    };
    const auto receives = [&](int rank, char* data) {
      traffic[rank].in.push_back({header(step, step.kind, bytes), data});
    };
    std::vector<std::vector<char>> received(of_.size);
    const auto receives_operand = [&](int rank) {
      received[rank].resize(bytes);
      receives(rank, received[rank].data());
    };
    std::vector<char> scaled;
    const char* from = operand(step, &scaled);
    const bool is_root = step.peer == of_.rank;
    for (int rank = 0; rank < of_.size; ++rank) {
      const auto place = static_cast<size_t>(rank) * bytes;
      switch (step.kind) {
        case Kind::AllGather:
          sends(rank, from);
          receives(rank, step.to + place);
          break;
        case Kind::AllReduce:
          sends(rank, from);
          receives_operand(rank);
          break;
        case Kind::Broadcast:
          if (is_root) {
            sends(rank, from);
          }
          if (rank == step.peer) {
            receives(rank, step.to);
          }
          break;
        case Kind::Reduce:
          if (rank == step.peer) {
            sends(rank, from);
          }
          if (is_root) {
            receives_operand(rank);
          }
          break;
        default: // ReduceScatter
          sends(rank, from + place);
          receives_operand(rank);
      }
    }
    if (!Exchange(of_, traffic).run()) {
      return false;
    }
    if (step.kind != Kind::AllGather && step.kind != Kind::Broadcast && (step.kind != Kind::Reduce || is_root)) {
      std::vector<const char*> operands;
      for (const auto& one : received) {
        operands.push_back(one.data());
      }
      dtypes[step.dtype].reduce(step.to, operands, step.count, step.operation);
    }
    return true;
  }

  // What this rank sends: scaled if the operation has a factor.
  const char* operand(const Step& step, std::vector<char>* scaled) const {
    const auto found = operations_.find(step.operation);
    if (found == operations_.end()) {
      return step.from;
    }
    const Dtype& dtype = dtypes[step.dtype];
    const Factor& factor = found->second;
    const size_t count = step.count * static_cast<size_t>(step.kind == Kind::ReduceScatter ? of_.size : 1);
    scaled->resize(count * dtype.bytes);
    dtype.scale(
        scaled->data(), step.from, count, factor.memory == nullptr ? factor.value : dtype.number(factor.memory));
    return scaled->data();
  }

  Communicator& of_;
  const std::map<int, Factor> operations_;
};

// --- groups ----------------------------------------------------------------------------------------------------------

struct Group {
  struct Part {
    CUstream stream;
    std::vector<Step> steps;
  };

  int depth = 0;
  int error = kSuccess;
  std::map<Pointer, Part> parts;
};
thread_local Group group;

int end_group() {
  if (--group.depth > 0) {
    return kSuccess;
  }
  const Group ended = std::exchange(group, Group());
  if (ended.error != kSuccess) {
    return ended.error;
  }
  for (const auto& [one, part] : ended.parts) {
    one->state = kInProgress;
    std::map<int, Factor> operations;
    {
      const std::lock_guard lock(one->mutex);
      operations = one->operations;
    }
    in_thread(one, [one = one, part = part, operations] {
      auto running = std::make_shared<Running>(one);
      const auto work = [one, steps = part.steps, operations, running] { Runner(*one, operations).run(steps); };
      if (submit(part.stream, work) != CUDA_SUCCESS) {
        one->fail(kUnhandledCudaError, "cuLaunchHostFunc failed");
        return;
      }
      int expected = kInProgress;
      one->state.compare_exchange_strong(expected, kSuccess);
    });
  }
  return ended.parts.empty() ? kSuccess : kInProgress;
}

// Finds a communicator for a call, which must be ready.
int find(Communicator* given, Pointer* found) {
  *found = Registry<Communicator>::all().find(given);
  REQUIRE(*found != nullptr, kInvalidArgument);
  REQUIRE((*found)->context == current_context(), kInvalidUsage);
  const int state = (*found)->state;
  return state == kInProgress ? kInvalidArgument : state;
}

int check(const Communicator& one, const Step& step) {
  REQUIRE(step.dtype >= 0 && step.dtype < kDtypes && step.peer >= -1 && step.peer < one.size, kInvalidArgument);
  const size_t bytes = step.count * dtypes[step.dtype].bytes;
  const auto size = static_cast<size_t>(one.size);
  const auto is_valid = [](const char* memory, size_t needed) {
    return needed == 0 || is_device_memory(memory, needed);
  };
  const bool is_root = step.peer == one.rank;
  const bool reads = step.kind != Kind::Receive && (step.kind != Kind::Broadcast || is_root);
  const bool writes = step.kind != Kind::Send && (step.kind != Kind::Reduce || is_root);
  REQUIRE(!reads || is_valid(step.from, step.kind == Kind::ReduceScatter ? bytes * size : bytes), kInvalidArgument);
  REQUIRE(!writes || is_valid(step.to, step.kind == Kind::AllGather ? bytes * size : bytes), kInvalidArgument);
  return kSuccess;
}

int add(Communicator* given, CUstream stream, const Step& step) {
  Pointer one;
  int status = find(given, &one);
  status = status == kSuccess ? check(*one, step) : status;
  if (status == kSuccess && step.operation >= kOperations) {
    const std::lock_guard lock(one->mutex);
    const auto found = one->operations.find(step.operation);
    status = found != one->operations.end() && found->second.dtype == step.dtype ? kSuccess : kInvalidArgument;
  }
  ++group.depth;
  if (status == kSuccess) {
    group.parts[one].stream = stream;
    group.parts[one].steps.push_back(step);
  } else {
    group.error = status;
  }
  const int ended = end_group();
  return status != kSuccess ? status : ended;
}

} // namespace

API ncclGetVersion(int* version) {
  ENTER();
  const char* setting = getenv("CUDA_EMULATOR_NCCL_VERSION");
  *version = setting == nullptr ? 22900 : atoi(setting);
  return kSuccess;
}

API ncclGetUniqueId(UniqueId* id) {
  ENTER();
  std::random_device random;
  memset(id->bytes, 0, sizeof id->bytes);
  snprintf(id->bytes, sizeof id->bytes, "%08x%08x", random(), random());
  return kSuccess;
}

API ncclCommInitRankConfig(Communicator** made, int size, UniqueId id, int rank, Config* config) {
  ENTER();
  REQUIRE(made != nullptr && config != nullptr && config->magic == 0xcafebeef, kInvalidArgument);
  REQUIRE(config->size >= sizeof(Config) && config->version >= 21400, kInvalidArgument);
  REQUIRE(config->blocking == 0, kInvalidUsage); // others are not emulated
  REQUIRE(size > 0 && rank >= 0 && rank < size, kInvalidArgument);
  auto one = std::make_shared<Communicator>();
  one->rank = rank;
  one->size = size;
  one->id = id.bytes;
  one->sockets.assign(static_cast<size_t>(size), -1);
  one->context = current_context();
  int device = -1;
  char bus[32] = {};
  REQUIRE(cuCtxGetDevice(&device) == CUDA_SUCCESS, kUnhandledCudaError);
  REQUIRE(cuDeviceGetPCIBusId(bus, sizeof bus, device) == CUDA_SUCCESS, kUnhandledCudaError);
  one->bus = bus;
  *made = Registry<Communicator>::all().add(one);
  in_thread(one, [one] { connect_all(*one); });
  return kInProgress;
}

API ncclCommGetAsyncError(Communicator* given, int* error) {
  ENTER();
  const Pointer one = Registry<Communicator>::all().find(given);
  REQUIRE(one != nullptr && error != nullptr, kInvalidArgument);
  *error = one->state;
  return kSuccess;
}

API ncclCommFinalize(Communicator* given) {
  ENTER();
  Pointer one;
  const int status = find(given, &one);
  REQUIRE(status == kSuccess, status);
  one->state = kInProgress;
  std::thread([one] {
    wait_until_idle(*one);
    one->state = kSuccess;
  }).detach();
  return kInProgress;
}

static void remove(const Pointer& one) {
  wait_until_idle(*one);
  Registry<Communicator>::all().remove(one.get());
  for (const int socket : one->sockets) {
    if (socket >= 0) {
      close(socket);
    }
  }
}

API ncclCommDestroy(Communicator* given) {
  ENTER();
  Pointer one;
  const int status = find(given, &one);
  REQUIRE(status == kSuccess, status);
  remove(one);
  return kSuccess;
}

API ncclCommAbort(Communicator* given) {
  ENTER();
  const Pointer one = Registry<Communicator>::all().find(given);
  REQUIRE(one != nullptr, kInvalidArgument);
  one->is_aborted = true;
  remove(one);
  return kSuccess;
}

extern "C" __attribute__((visibility("default"))) const char* ncclGetErrorString(int status) {
  switch (status) {
    case kSuccess:
      return "no error";
    case kUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case kInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case kInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case kRemoteError:
      return "remote process exited or there was a network error";
    case kInProgress:
      return "NCCL operation in progress";
    default:
      return "internal error - please report this issue to the NCCL developers";
  }
}

extern "C" __attribute__((visibility("default"))) const char* ncclGetLastError(Communicator* given) {
  thread_local std::string text;
  const Pointer one = Registry<Communicator>::all().find(given);
  if (one == nullptr) {
    return "";
  }
  const std::lock_guard lock(one->mutex);
  text = one->error;
  return text.c_str();
}

API ncclGroupStart() {
  ENTER();
  ++group.depth;
  return kSuccess;
}

API ncclGroupEnd() {
  ENTER();
  REQUIRE(group.depth > 0, kInvalidUsage);
  return end_group();
}

API ncclRedOpCreatePreMulSum(int* operation, void* factor, int dtype, int residence, Communicator* given) {
  ENTER();
  Pointer one;
  const int status = find(given, &one);
  REQUIRE(status == kSuccess, status);
  REQUIRE(dtype >= 0 && dtype < kDtypes && dtypes[dtype].scale != nullptr, kInvalidArgument);
  Factor made{dtype, nullptr, 0};
  if (residence == 0) {
    REQUIRE(is_device_memory(factor, dtypes[dtype].bytes), kInvalidArgument);
    made.memory = factor;
  } else {
    made.value = dtypes[dtype].number(factor);
  }
  const std::lock_guard lock(one->mutex);
  *operation = kOperations;
  while (one->operations.count(*operation) != 0) {
    ++*operation;
  }
  one->operations.emplace(*operation, made);
  return kSuccess;
}

API ncclRedOpDestroy(int operation, Communicator* given) {
  ENTER();
  Pointer one;
  const int status = find(given, &one);
  REQUIRE(status == kSuccess, status);
  const std::lock_guard lock(one->mutex);
  return one->operations.erase(operation) == 1 ? kSuccess : kInvalidArgument;
}

API ncclAllGather(const char* from, char* to, size_t count, int dtype, Communicator* one, CUstream stream) {
  ENTER();
  return add(one, stream, {Kind::AllGather, from, to, count, dtype, kSum, -1});
}

API ncclAllReduce(
    const char* from, char* to, size_t count, int dtype, int operation, Communicator* one, CUstream stream) {
  ENTER();
  return add(one, stream, {Kind::AllReduce, from, to, count, dtype, operation, -1});
}

API ncclBroadcast(const char* from, char* to, size_t count, int dtype, int root, Communicator* one, CUstream stream) {
  ENTER();
  return add(one, stream, {Kind::Broadcast, from, to, count, dtype, kSum, root});
}

API ncclReduce(
    const char* from, char* to, size_t count, int dtype, int operation, int root, Communicator* one, CUstream stream) {
  ENTER();
  return add(one, stream, {Kind::Reduce, from, to, count, dtype, operation, root});
}

API ncclReduceScatter(
    const char* from, char* to, size_t count, int dtype, int operation, Communicator* one, CUstream stream) {
  ENTER();
  return add(one, stream, {Kind::ReduceScatter, from, to, count, dtype, operation, -1});
}

API ncclSend(const char* from, size_t count, int dtype, int peer, Communicator* one, CUstream stream) {
  ENTER();
  return add(one, stream, {Kind::Send, from, nullptr, count, dtype, kSum, peer});
}

API ncclRecv(char* to, size_t count, int dtype, int peer, Communicator* one, CUstream stream) {
  ENTER();
  return add(one, stream, {Kind::Receive, nullptr, to, count, dtype, kSum, peer});
}
