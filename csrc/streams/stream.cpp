#include "streams/stream.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "devices/profile.h"
#include "devices/recording.h"
#include "streams/capture.h"
#include "streams/device_errors.h"
#include "streams/sync_watch.h"

namespace backplane {
namespace {

// Per device, with the default stream.
constexpr c10::StreamId kMaxStreams = 1 + 2 * kStreamsPerPool + kBranchStreams + kMaxExternalStreams;

struct Entry {
  StreamHandle handle;
  int priority;
};

// The streams of one device. Entries are added under the lock, read without it, and never removed. The lock is not held
// while the device is called: the call can run Python, and a thread with the GIL can be waiting for the lock.
struct Streams {
  std::mutex lock;
  std::array<std::atomic<const Entry*>, kMaxStreams> entries{};
  std::atomic<c10::StreamId> size{1}; // id 0, the default stream, always exists
  // Per priority (least, greatest): the ids created so far, and how many have been handed out.
  std::array<std::vector<c10::StreamId>, 2> pools;
  std::array<size_t, 2> handed_out{};
  std::vector<c10::StreamId> branches; // of graphs
  int adopted = 0; // the number of streams around external queues
};

Streams& streams_of(c10::DeviceIndex index) {
  static auto* all = new std::array<Streams, 64>; // never destroyed; pages of unused devices are never touched
  return (*all)[index];
}

thread_local std::array<c10::StreamId, 64> current_ids{};

c10::Stream make(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, index), id);
}

c10::StreamId append(Streams& streams, StreamHandle handle, int priority) {
  const auto id = streams.size.load();
  streams.entries[id].store(new Entry{handle, priority}, std::memory_order_release);
  streams.size.store(id + 1);
  return id;
}

const Entry& entry_of(c10::Stream stream) {
  TORCH_CHECK(stream.device_type() == c10::kPrivateUse1, "expected a stream of a bp device, but got ", stream);
  const auto index = checked_index(stream.device_index());
  Streams& streams = streams_of(index);
  const auto id = stream.id();
  TORCH_CHECK(id >= 0 && id < streams.size.load(), "bp:", static_cast<int>(index), " has no stream with id ", id);
  const Entry* entry = streams.entries[id].load(std::memory_order_acquire);
  if (C10_UNLIKELY(entry == nullptr)) { // the default stream, at its first use
    const auto fresh = new Entry{device(index).create_stream(kLeastPriority), kLeastPriority};
    if (streams.entries[id].compare_exchange_strong(entry, fresh)) {
      entry = fresh;
    } else { // another thread was faster
      device(index).destroy_stream(fresh->handle);
      delete fresh;
    }
  }
  return *entry;
}

template <typename Function>
void notify(const Function& function) {
  if (SyncWatch* watch = SyncWatch::active(); C10_UNLIKELY(watch != nullptr) && !SyncWatch::is_hidden()) {
    function(*watch);
  }
}

} // namespace

c10::Stream default_stream(c10::DeviceIndex index) {
  return make(checked_index(index), 0);
}

c10::Stream current_stream(c10::DeviceIndex index) {
  index = checked_index(index);
  return make(index, current_ids[index]);
}

c10::Stream exchange_current_stream(c10::Stream stream) {
  entry_of(stream); // throws for an unknown stream or another device type
  auto& id = current_ids[stream.device_index()];
  const auto previous = make(stream.device_index(), id);
  id = stream.id();
  return previous;
}

c10::Stream pool_stream(c10::DeviceIndex index, int priority) {
  index = checked_index(index);
  const size_t pool = priority < kLeastPriority ? 1 : 0; // out-of-range priorities are clamped, as in torch.cuda
  Streams& streams = streams_of(index);
  {
    std::lock_guard<std::mutex> guard(streams.lock);
    auto& ids = streams.pools[pool];
    if (ids.size() == kStreamsPerPool) {
      return make(index, ids[streams.handed_out[pool]++ % kStreamsPerPool]);
    }
  }
  // The pool is still growing.
  Device& owner = device(index);
  const int clamped = pool == 1 ? kGreatestPriority : kLeastPriority;
  const StreamHandle handle = owner.create_stream(clamped);
  std::unique_lock<std::mutex> guard(streams.lock);
  auto& ids = streams.pools[pool];
  const size_t slot = streams.handed_out[pool]++ % kStreamsPerPool;
  if (ids.size() < kStreamsPerPool) {
    ids.push_back(append(streams, handle, clamped));
    return make(index, ids.back());
  }
  guard.unlock();
  owner.destroy_stream(handle); // other threads have filled the pool meanwhile
  return make(index, ids[slot]);
}

c10::Stream branch_stream(c10::DeviceIndex index, int number) {
  index = checked_index(index);
  TORCH_INTERNAL_ASSERT(number >= 0 && number < kBranchStreams);
  Streams& streams = streams_of(index);
  for (;;) {
    {
      std::lock_guard<std::mutex> guard(streams.lock);
      if (streams.branches.size() > static_cast<size_t>(number)) {
        return make(index, streams.branches[number]);
      }
    }
    const StreamHandle handle = device(index).create_stream(kLeastPriority);
    std::unique_lock<std::mutex> guard(streams.lock);
    if (streams.branches.size() < kBranchStreams) {
      streams.branches.push_back(append(streams, handle, kLeastPriority));
    } else {
      guard.unlock();
      device(index).destroy_stream(handle); // other threads have created all branch streams
    }
  }
}

std::optional<c10::Stream> stream_of(c10::DeviceIndex index, StreamHandle handle) {
  index = checked_index(index);
  Streams& streams = streams_of(index);
  for (c10::StreamId id = 0; id < streams.size.load(); ++id) {
    const Entry* entry = streams.entries[id].load(std::memory_order_acquire);
    if (entry != nullptr && entry->handle == handle) {
      return make(index, id);
    }
  }
  return std::nullopt;
}

std::optional<c10::Stream> external_stream(c10::DeviceIndex index, void* number) {
  index = checked_index(index);
  if (const auto found = stream_of(index, number)) {
    return found;
  }
  Device& owner = device(index);
  if (!owner.can_adopt_streams()) {
    return std::nullopt;
  }
  const StreamHandle handle = owner.adopt_stream(reinterpret_cast<uintptr_t>(number));
  if (const auto found = stream_of(index, handle)) {
    return found;
  }
  Streams& streams = streams_of(index);
  std::unique_lock<std::mutex> guard(streams.lock);
  if (streams.adopted < kMaxExternalStreams) {
    ++streams.adopted;
    return make(index, append(streams, handle, kLeastPriority));
  }
  guard.unlock();
  owner.destroy_stream(handle);
  TORCH_CHECK(
      false, "bp:", static_cast<int>(index), " has ", kMaxExternalStreams,
      " external streams, which is the maximum: reuse existing ones");
}

uintptr_t native_handle(c10::Stream stream) {
  const StreamHandle handle = stream_handle(stream);
  const GilReleased released; // the call can wait for kernel builds
  return device(stream.device_index()).native_handle(handle);
}

StreamHandle stream_handle(c10::Stream stream) {
  if (const auto capture = Capture::of(stream); C10_UNLIKELY(capture != nullptr)) {
    capture->refuse("it submits work that cannot be replayed");
  }
  return entry_of(stream).handle;
}

StreamHandle stream_identity(c10::Stream stream) {
  return entry_of(stream).handle;
}

int stream_priority(c10::Stream stream) {
  return entry_of(stream).priority;
}

bool query_stream(c10::Stream stream) {
  if (const auto capture = Capture::of(stream); C10_UNLIKELY(capture != nullptr)) {
    capture->refuse("it queries the stream that is being captured");
  }
  Device& owner = device(stream.device_index());
  DeviceCall call(owner);
  const bool done = owner.query_stream(stream_handle(stream));
  if (done) {
    notify([&](SyncWatch& watch) { watch.host_passed(stream); });
  }
  return done;
}

void synchronize_stream(c10::Stream stream) {
  note_not_replayable("it uses streams or events");
  if (const auto capture = Capture::of(stream); C10_UNLIKELY(capture != nullptr)) {
    capture->refuse("it waits for the stream that is being captured");
  }
  Device& owner = device(stream.device_index());
  ErrorCheck check(stream);
  {
    DeviceCall call(owner);
    const ProfiledRange profiled(Activity::Kind::Waiting, "bpStreamSynchronize");
    owner.synchronize_stream(stream_handle(stream));
  }
  notify([&](SyncWatch& watch) { watch.host_passed(stream); });
  check.finish();
}

void synchronize_device(c10::DeviceIndex index) {
  note_not_replayable("it uses streams or events");
  index = checked_index(index);
  if (const auto capture = Capture::forbidding(index); C10_UNLIKELY(capture != nullptr)) {
    capture->refuse("it waits for the device while a graph is being captured on one of its streams");
  }
  Device& owner = device(index);
  Streams& streams = streams_of(index);
  {
    DeviceCall call(owner);
    const ProfiledRange profiled(Activity::Kind::Waiting, "bpDeviceSynchronize");
    for (c10::StreamId id = 0; id < streams.size.load(); ++id) {
      if (const Entry* entry = streams.entries[id].load(std::memory_order_acquire)) {
        owner.synchronize_stream(entry->handle);
      }
    }
  }
  notify([&](SyncWatch& watch) { watch.host_passed(index); });
  throw_reported_errors(index);
}

// --- events ----------------------------------------------------------------------------------------------------------

Event* record_event(Event* event, c10::Stream stream, bool timing) {
  note_not_replayable("it uses streams or events");
  Device& owner = device(stream.device_index());
  const auto capture = Capture::of(stream);
  std::unique_ptr<Event, void (*)(Event*)> fresh(nullptr, [](Event* unused) { destroy_event(unused); });
  if (event == nullptr) {
    fresh.reset(new Event{stream.device_index(), owner.create_event(timing), timing, nullptr});
    event = fresh.get();
  }
  TORCH_CHECK(
      event->device == stream.device_index(), "Event device ", static_cast<int>(event->device),
      " does not match recording stream's device ", static_cast<int>(stream.device_index()), ".");
  if (C10_UNLIKELY(capture != nullptr)) {
    event->captured = capture->point(stream);
  } else {
    owner.submit(EventRecord{event->handle}, stream_handle(stream));
    if (event->captured != nullptr) { // no write otherwise: other threads can already query an allocator's event
      event->captured = nullptr;
    }
  }
  notify([&](SyncWatch& watch) { watch.recorded(event, stream); });
  static_cast<void>(fresh.release());
  return event;
}

void block_stream(const Event* event, c10::Stream stream) {
  note_not_replayable("it uses streams or events");
  if (event == nullptr) {
    return;
  }
  if (C10_UNLIKELY(event->captured != nullptr)) {
    Capture::wait(*event->captured, stream);
    notify([&](SyncWatch& watch) { watch.waits(stream, event); });
    return;
  }
  if (const auto capture = Capture::of(stream); C10_UNLIKELY(capture != nullptr)) {
    capture->refuse("it makes the captured stream wait for an event that was recorded outside of the capture");
  }
  const StreamHandle handle = stream_handle(stream);
  Device& owner = device(event->device);
  if (event->device == stream.device_index()) {
    owner.submit(EventWait{event->handle}, handle);
  } else if (!device(stream.device_index()).wait_for_peer(owner, event->handle, handle)) {
    owner.synchronize_event(event->handle);
  }
  notify([&](SyncWatch& watch) { watch.waits(stream, event); });
}

namespace {

// The host cannot wait for captured work: it has not been submitted to the device.
void check_not_captured(const Event& event) {
  if (C10_UNLIKELY(event.captured != nullptr)) {
    Capture::refuse(*event.captured, "it queries or waits for an event of the capture on the host");
  }
}

} // namespace

bool query_event(const Event* event) {
  if (event == nullptr) {
    return true;
  }
  check_not_captured(*event);
  Device& owner = device(event->device);
  const bool reached = owner.query_event(event->handle);
  if (reached) {
    notify([&](SyncWatch& watch) { watch.host_passed(event); });
  }
  return reached;
}

void synchronize_event(const Event* event) {
  if (event != nullptr) {
    check_not_captured(*event);
    Device& owner = device(event->device);
    const ProfiledRange profiled(Activity::Kind::Waiting, "bpEventSynchronize");
    owner.synchronize_event(event->handle);
    notify([&](SyncWatch& watch) { watch.host_passed(event); });
  }
}

namespace {

// Returns function(), or `otherwise` if the device is lost before or during the call.
template <typename Function, typename Result>
Result unless_lost(const Device& device, const Function& function, Result otherwise) {
  try {
    return device.is_lost() ? otherwise : function();
  } catch (const std::exception&) {
    if (!device.is_lost()) {
      throw;
    }
    return otherwise;
  }
}

} // namespace

bool is_past(const Event* event) {
  return event == nullptr || unless_lost(device(event->device), [&] { return query_event(event); }, true);
}

void wait_until_past(const Event* event) {
  if (event != nullptr) {
    unless_lost(
        device(event->device),
        [&] {
          synchronize_event(event);
          return true;
        },
        true);
  }
}

Event* record_event_unless_lost(Event* event, c10::Stream stream) {
  return unless_lost(
      device(stream.device_index()), [&] { return record_event(event, stream, /*timing=*/false); }, event);
}

double elapsed_ms(const Event* start, const Event* end) {
  TORCH_CHECK(start != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
  TORCH_CHECK(start->timing && end->timing, "Both events must be created with argument 'enable_timing=True'.");
  TORCH_CHECK(
      start->device == end->device, "Event device_index ", static_cast<int>(start->device),
      " does not match other's device_index ", static_cast<int>(end->device), ".");
  check_not_captured(*start);
  check_not_captured(*end);
  Device& owner = device(start->device);
  TORCH_CHECK(
      owner.query_event(start->handle) && owner.query_event(end->handle),
      "Both events must be completed before calculating elapsed time.");
  return owner.elapsed_ms(start->handle, end->handle);
}

void destroy_event(Event* event) noexcept {
  if (event == nullptr) {
    return;
  }
  if (!in_bad_fork()) {
    try {
      notify([&](SyncWatch& watch) { watch.destroyed(event); });
      Device& owner = device(event->device);
      owner.destroy_event(event->handle);
    } catch (const std::exception&) {
      // A destructor cannot throw; the driver reports its error state at its next call.
    }
  }
  delete event;
}

} // namespace backplane
