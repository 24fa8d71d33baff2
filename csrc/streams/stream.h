// Streams and events of all devices. c10::Stream is only a pair (device, id); a table maps it to the driver's queue.
//
// Stream ids: 0 is the device's default stream; 1… are entries of the device's table in order of creation. Streams of
// pools and of graph branches are created on first use, streams around external queues when they are adopted. All exist
// until the process ends, as in torch.cuda.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <optional>

#include "devices/device.h"

namespace backplane {

constexpr int kStreamsPerPool = 32;
constexpr int kBranchStreams = 7;
constexpr int kMaxExternalStreams = 256; // per device
// Priorities as in torch.cuda: lower numbers run first.
constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -1;

c10::Stream default_stream(c10::DeviceIndex index);
c10::Stream current_stream(c10::DeviceIndex index);
// Makes the stream current for its device in this thread and returns the previous one. Throws for other device types.
c10::Stream exchange_current_stream(c10::Stream stream);
// The next stream of the device's pool, round robin.
c10::Stream pool_stream(c10::DeviceIndex index, int priority);
// A stream for branches of graphs, with a number from 0 to kBranchStreams - 1. Nothing else submits work to it.
c10::Stream branch_stream(c10::DeviceIndex index, int number);
// The stream of a queue that the runtime knows. nullopt: `handle` is unknown and must not be dereferenced.
std::optional<c10::Stream> stream_of(c10::DeviceIndex index, StreamHandle handle);

// The stream around a queue: one that the runtime knows, or a queue of the hardware API, which the device adopts and
// its owner keeps alive. nullopt: the runtime does not know the queue, and the device cannot adopt streams.
std::optional<c10::Stream> external_stream(c10::DeviceIndex index, void* number);
// The hardware API's handle of the queue. From then on other code can submit work that the runtime does not see.
uintptr_t native_handle(c10::Stream stream);

// The queue, to submit work. Throws for an unknown id, and if the stream is being captured (capture.h): code whose work
// can be captured checks Capture::of() first.
StreamHandle stream_handle(c10::Stream stream);
// The same handle, only to identify the queue: no work may be submitted to it.
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
  std::shared_ptr<const CapturedPoint> captured; // of the latest recording, if it was captured
};
Event* record_event(Event* event, c10::Stream stream, bool timing); // creates an event if given nullptr
void block_stream(const Event* event, c10::Stream stream);
bool query_event(const Event* event);
void synchronize_event(const Event* event);
// Like query_event and synchronize_event, to free memory: all events of a lost device count as completed.
bool is_past(const Event* event);
void wait_until_past(const Event* event);
// Like record_event, without timing. On a lost device it returns `event` unchanged, which can be nullptr.
Event* record_event_unless_lost(Event* event, c10::Stream stream);
double elapsed_ms(const Event* start, const Event* end);
void destroy_event(Event* event) noexcept;

} // namespace backplane
