// Handles of memory and events for other processes. Both are in files in memory, which a process with the same user
// opens by the number of the process and of the file.

#include "interprocess.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "entry.h"
#include "memory.h"
#include "streams.h"

namespace {

struct Shared { // the content of a handle
  uint64_t mark;
  int32_t process, file;
  uint64_t inode; // of the file
  uint64_t offset; // in bytes
  uint64_t bytes;
  int32_t device;
};
constexpr uint64_t kMemoryMark = 0x79726f6d656d7563, kEventMark = 0x746e6576657563;

uint64_t inode_of(int file) {
  struct stat facts{};
  return fstat(file, &facts) == 0 ? facts.st_ino : 0;
}

void store(CUipcHandle* handle, const Shared& shared) {
  static_assert(sizeof shared <= sizeof handle->reserved);
  *handle = {};
  memcpy(handle->reserved, &shared, sizeof shared);
}

// A file of another process; -1 if it is not there.
class OtherFile {
 public:
  explicit OtherFile(const Shared& shared) {
    const std::string path = "/proc/" + std::to_string(shared.process) + "/fd/" + std::to_string(shared.file);
    file_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
    is_same_ = file_ >= 0 && inode_of(file_) == shared.inode;
  }
  ~OtherFile() {
    if (file_ >= 0) {
      close(file_);
    }
  }
  OtherFile(const OtherFile&) = delete;
  int file() const {
    return is_same_ ? file_ : -1;
  }

 private:
  int file_ = -1;
  bool is_same_ = false;
};

// --- memory ----------------------------------------------------------------------------------------------------------

struct Imported {
  Shared shared;
  unsigned references;
};
std::map<uint64_t, Imported>& imported() { // by address; protected by Memory::mutex
  static auto& all = *new std::map<uint64_t, Imported>;
  return all;
}

bool is_same(const Shared& a, const Shared& b) {
  return a.process == b.process && a.inode == b.inode && a.offset == b.offset;
}

} // namespace

API cuIpcGetMemHandle(CUipcHandle* handle, CUdeviceptr address) {
  ENTER_CONTEXT();
  REQUIRE(handle != nullptr, CUDA_ERROR_INVALID_VALUE);
  Memory& memory = Memory::the();
  Allocation found;
  REQUIRE(memory.find(address, &found) && found.kind == MemoryKind::kDevice, CUDA_ERROR_INVALID_VALUE);
  const int file = memory.file(found.device);
  store(handle, {kMemoryMark, getpid(), file, inode_of(file), found.offset, found.bytes, found.device->ordinal});
  return CUDA_SUCCESS;
}

API cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcHandle handle, unsigned flags) {
  ENTER_CONTEXT();
  REQUIRE(address != nullptr && flags == 1, CUDA_ERROR_INVALID_VALUE);
  Shared shared;
  memcpy(&shared, handle.reserved, sizeof shared);
  REQUIRE(shared.mark == kMemoryMark, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(shared.process != getpid(), CUDA_ERROR_INVALID_CONTEXT);
  Memory& memory = Memory::the();
  std::lock_guard lock(memory.mutex);
  for (auto& [begin, one] : imported()) {
    if (is_same(one.shared, shared)) {
      ++one.references;
      *address = begin;
      return CUDA_SUCCESS;
    }
  }
  const OtherFile other(shared);
  REQUIRE(other.file() >= 0, CUDA_ERROR_INVALID_VALUE);
  const uint64_t begin = memory.reserve(shared.bytes);
  const auto owner = static_cast<uint8_t>(1 << shared.device);
  REQUIRE(begin != 0 && memory.map(begin, shared.bytes, other.file(), shared.offset, owner), CUDA_ERROR_OUT_OF_MEMORY);
  memory.add({begin, shared.bytes, MemoryKind::kImported, context->device, context, 0, 0, 0});
  imported()[begin] = {shared, 1};
  *address = begin;
  return CUDA_SUCCESS;
}

API cuIpcCloseMemHandle(CUdeviceptr address) {
  ENTER_CONTEXT();
  Memory& memory = Memory::the();
  Allocation found;
  REQUIRE(memory.find(address, &found) && found.kind == MemoryKind::kImported, CUDA_ERROR_INVALID_VALUE);
  wait_for_all(*context);
  std::lock_guard lock(memory.mutex);
  const auto at = imported().find(found.begin);
  REQUIRE(at != imported().end(), CUDA_ERROR_INVALID_VALUE);
  if (--at->second.references == 0) {
    imported().erase(at);
    memory.remove(found.begin, MemoryKind::kImported, &found);
    memory.unmap(found.begin, found.bytes);
    memory.unreserve(found.begin, found.bytes);
  }
  return CUDA_SUCCESS;
}

// --- events ----------------------------------------------------------------------------------------------------------

namespace {

constexpr size_t kEventBytes = 64, kEvents = 16384;

SharedEvent* map_events(int file) {
  void* at = mmap(nullptr, kEventBytes * kEvents, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return at == MAP_FAILED ? nullptr : static_cast<SharedEvent*>(at);
}

SharedEvent* slot(SharedEvent* events, size_t number) {
  return reinterpret_cast<SharedEvent*>(reinterpret_cast<char*>(events) + kEventBytes * number);
}

// The events that this process has made.
struct OwnEvents {
  OwnEvents() : file(memfd_create("emulated CUDA events", MFD_CLOEXEC)) {
    if (file >= 0 && ftruncate(file, kEventBytes * kEvents) == 0) {
      events = map_events(file);
    }
    for (size_t i = kEvents; events != nullptr && i > 0; --i) {
      free.push_back(i - 1);
    }
  }

  int file;
  SharedEvent* events = nullptr;
  std::mutex mutex;
  std::vector<size_t> free;
};

OwnEvents& own_events() {
  static OwnEvents& all = *new OwnEvents;
  return all;
}

} // namespace

std::shared_ptr<SharedEvent> make_shared_event() {
  OwnEvents& own = own_events();
  std::lock_guard lock(own.mutex);
  if (own.free.empty()) {
    return nullptr;
  }
  const size_t number = own.free.back();
  own.free.pop_back();
  return {new (slot(own.events, number)) SharedEvent, [&own, number](SharedEvent*) {
            std::lock_guard own_lock(own.mutex);
            own.free.insert(own.free.begin(), number); // used again as late as possible: other processes can have it
          }};
}

API cuIpcGetEventHandle(CUipcHandle* handle, CUevent given) {
  ENTER_CONTEXT();
  const auto event = find(given);
  REQUIRE(event != nullptr, CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(handle != nullptr && event->shared != nullptr, CUDA_ERROR_INVALID_VALUE);
  OwnEvents& own = own_events();
  const auto offset = reinterpret_cast<uint64_t>(event->shared.get()) - reinterpret_cast<uint64_t>(own.events);
  REQUIRE(offset < kEventBytes * kEvents, CUDA_ERROR_INVALID_VALUE); // else it is another process's
  store(handle, {kEventMark, getpid(), own.file, inode_of(own.file), offset, kEventBytes, 0});
  return CUDA_SUCCESS;
}

API cuIpcOpenEventHandle(CUevent* made, CUipcHandle handle) {
  ENTER_CONTEXT();
  REQUIRE(made != nullptr, CUDA_ERROR_INVALID_VALUE);
  Shared shared;
  memcpy(&shared, handle.reserved, sizeof shared);
  REQUIRE(shared.mark == kEventMark, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(shared.process != getpid(), CUDA_ERROR_INVALID_CONTEXT);
  const OtherFile other(shared);
  REQUIRE(other.file() >= 0, CUDA_ERROR_INVALID_VALUE);
  SharedEvent* events = map_events(other.file());
  REQUIRE(events != nullptr, CUDA_ERROR_OUT_OF_MEMORY);
  auto event = std::make_shared<Event>();
  event->context = context;
  event->flags = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  event->shared = {
      slot(events, shared.offset / kEventBytes), [events](SharedEvent*) { munmap(events, kEventBytes * kEvents); }};
  *made = Registry<Event>::all().add(event);
  return CUDA_SUCCESS;
}
