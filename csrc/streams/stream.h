// Streams and events of all devices. c10::Stream is only a number (device, id); this table maps it to the driver's queue.
//
// Stream ids: 0 is the device's default stream; 1… are entries of the device's table in order of creation. Those of
// pools and of graphs are created on first use, those of others' queues when they are adopted; all live as long as the process,
// as torch.cuda's do.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <optional>

#include "devices/device.h"

namespace backplane {

constexpr int kStreamsPerPool = 32;
constexpr int kBranchStreams = 7;
constexpr int kMostExternalStreams = 256; // per device
// Priorities as in torch.cuda: lower numbers run first.
constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -1;

c10::Stream default_stream(c10::DeviceIndex index);
c10::Stream current_stream(c10::DeviceIndex index);
// Sets the current stream of the stream's device in this thread and returns the one before. Throws for a foreign stream.
c10::Stream exchange_current_stream(c10::Stream stream);
// The next stream of the device's pool, round robin.
c10::Stream pool_stream(c10::DeviceIndex index, int priority);
// One of those that graphs give their branches to, 0 to kBranchStreams - 1: nobody else has work for them.
c10::Stream branch_stream(c10::DeviceIndex index, int number);
// The stream that one of our queues belongs to. Another handle must not be followed.
std::optional<c10::Stream> stream_of(c10::DeviceIndex index, StreamHandle handle);

// The stream around a queue: one of ours, or one of the hardware API's that the device adopts, and that is kept alive elsewhere.
// nullopt: the device adopts none, and none of ours has this number.
std::optional<c10::Stream> external_stream(c10::DeviceIndex index, void* number);
// The hardware API's handle of the queue, which may be given work past the runtime from then on.
uintptr_t native_handle(c10::Stream stream);

// The queue, to give it work. Throws for an unknown id, and where the stream is being captured (capture.h): whoever has work
// that can be captured asks for that first.
StreamHandle stream_handle(c10::Stream stream);
// The same, to tell queues apart: nothing may be given to it.
StreamHandle stream_identity(c10::Stream stream);
int stream_priority(c10::Stream stream);
bool query_stream(c10::Stream stream);
void synchronize_stream(c10::Stream stream);
void synchronize_device(c10::DeviceIndex index); // every stream of the device that was ever used

struct CapturedPoint;

// An event as c10::Event holds it (behind void*): created at first record, on the stream's device.
struct Event {
  c10::DeviceIndex device;
  EventHandle handle;
  bool timing;
  std::shared_ptr<const CapturedPoint> captured; // where it was recorded last on a stream that was being captured
};
Event* record_event(Event* event, c10::Stream stream, bool timing); // makes one when given nullptr
void block_stream(const Event* event, c10::Stream stream);
bool query_event(const Event* event);
void synchronize_event(const Event* event);
// For those who only want to know when memory is free: the same, and a lost device is past all its events.
bool is_past(const Event* event);
void wait_until_past(const Event* event);
// As record_event, without timing. On a lost device it returns `event` as it is, which may be nullptr.
Event* record_event_unless_lost(Event* event, c10::Stream stream);
double elapsed_ms(const Event* start, const Event* end);
void destroy_event(Event* event) noexcept;

} // namespace backplane
