// Blocks that several streams use: they become free when every stream has passed the point of the free.
#include "caching_allocator.h"

#include <Python.h>
#include <c10/util/Exception.h>

namespace backplane {

// Called with the lock held; gives it up while events are recorded.
void DeviceCachingAllocator::free_after_streams(Lock& lock, Block* block, const Context& context) {
  std::vector<c10::Stream> streams = std::move(block->stream_uses);
  block->stream_uses.clear();
  block->events = static_cast<int>(streams.size()); // keeps others from taking it meanwhile
  if (device_.needs_gil() && !Py_IsInitialized()) {
    return; // the process is ending: nothing will ask for this block again
  }
  for (c10::Stream stream : streams) {
    Event* event = nullptr;
    auto& spare = spare_events_[stream.device_index()];
    if (!spare.empty()) {
      event = spare.back();
      spare.pop_back();
    }
    event = outside(lock, [&] { return record_event_unless_lost(event, stream); });
    pending_[{stream.device_index(), stream.id()}].push_back({event, block, ++pending_number_});
  }
}

// Frees blocks whose events have been reached, in the order of each stream.
void DeviceCachingAllocator::process_events(Lock& lock, const Context& context) {
  std::vector<std::pair<c10::DeviceIndex, c10::StreamId>> streams;
  for (const auto& entry : pending_) {
    streams.push_back(entry.first);
  }
  for (auto [device, id] : streams) {
    c10::Stream stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, device), id);
    while (true) {
      auto queue = pending_.find({device, id});
      if (queue == pending_.end()) {
        break;
      }
      PendingFree front = queue->second.front();
      if (!outside(lock, [&] { return is_past(front.event); })) {
        break;
      }
      complete(lock, stream, front.number, context);
    }
  }
}

void DeviceCachingAllocator::synchronize_events(Lock& lock, const Context& context) {
  stats_.num_sync_all_streams += 1;
  while (!pending_.empty()) {
    auto [device, id] = pending_.begin()->first;
    PendingFree front = pending_.begin()->second.front();
    outside(lock, [&] { wait_until_past(front.event); });
    complete(lock, c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, device), id), front.number, context);
  }
}

// The stream has passed its first pending free, if that still has this number: while the lock was released another
// thread may have noticed too, and the event may have been recorded anew.
void DeviceCachingAllocator::complete(Lock& lock, c10::Stream stream, uint64_t number, const Context& context) {
  auto queue = pending_.find({stream.device_index(), stream.id()});
  if (queue == pending_.end() || queue->second.front().number != number) {
    return;
  }
  PendingFree done = queue->second.front();
  queue->second.pop_front();
  if (queue->second.empty()) {
    pending_.erase(queue);
  }
  if (done.event != nullptr) {
    spare_events_[stream.device_index()].push_back(done.event);
  }
  if (--done.block->events == 0) {
    if (Segment* unused = make_free(done.block, context)) {
      give_back(lock, {unused});
    }
  }
}

} // namespace backplane
