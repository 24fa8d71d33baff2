// Blocks that several streams use. They become free when every stream has passed the point of the free.
#include "memory/caching_allocator.h"

#include "devices/driver_call.h"

#include <Python.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "streams/capture.h"

namespace backplane {

namespace {

// Returns of_stream(), which calls the stream's device. Returns true if the device is lost, and false while the stream
// is being captured.
template <typename Function>
bool stream_or_lost(c10::Stream stream, const Function& of_stream) {
  if (Capture::of(stream) != nullptr) {
    return false;
  }
  const Device& owner = device(stream.device_index());
  try {
    return owner.is_lost() || of_stream();
  } catch (const std::exception&) {
    if (!owner.is_lost()) {
      throw;
    }
    return true;
  }
}

} // namespace

// Called with the lock held; releases it while events are recorded. The block waits for the stream itself if there is
// no event: because recording it failed, the stream is being captured, or this thread is inside a driver call, which
// must not be reentered (driver_call.h).
void DeviceCachingAllocator::free_after_streams(Lock& lock, Block* block, const Context& context) {
  std::vector<c10::Stream> streams = std::move(block->stream_uses);
  block->stream_uses.clear();
  block->events = static_cast<int>(streams.size()); // keeps other threads from using the block meanwhile
  if (device_.needs_gil() && !Py_IsInitialized()) {
    return; // the process is exiting: the block will not be reused
  }
  std::exception_ptr failure;
  for (c10::Stream stream : streams) {
    PendingFree pending{
        nullptr, block, ++pending_number_, /*without_event=*/inside_driver_call() || Capture::of(stream) != nullptr};
    if (!pending.without_event) {
      auto& spare = spare_events_[stream.device_index()];
      if (!spare.empty()) {
        pending.event = spare.back();
        spare.pop_back();
      }
      try {
        pending.event = outside(lock, [&] { return record_event_unless_lost(pending.event, stream); });
      } catch (const std::exception&) {
        failure = std::current_exception();
        if (pending.event != nullptr) {
          spare_events_[stream.device_index()].push_back(std::exchange(pending.event, nullptr));
        }
        pending.without_event = true;
      }
    }
    pending_[{stream.device_index(), stream.id()}].push_back(pending);
  }
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
}

// Frees blocks whose events have completed, in the order of each stream.
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
      const bool past = outside(lock, [&] {
        return front.without_event ? stream_or_lost(stream, [&] { return query_stream(stream); })
                                   : is_past(front.event);
      });
      if (!past) {
        break;
      }
      complete(lock, stream, front.number, context);
    }
  }
}

void DeviceCachingAllocator::synchronize_events(Lock& lock, const Context& context) {
  stats_.num_sync_all_streams += 1;
  const auto stream_of = [](const auto& entry) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, entry.first.first), entry.first.second);
  };
  while (true) {
    const auto first = std::find_if(pending_.begin(), pending_.end(), [&](const auto& entry) {
      return Capture::of(stream_of(entry)) == nullptr; // nothing can wait for a stream that is being captured
    });
    if (first == pending_.end()) {
      return;
    }
    const c10::Stream stream = stream_of(*first);
    PendingFree front = first->second.front();
    outside(lock, [&] {
      if (!front.without_event) {
        wait_until_past(front.event);
        return;
      }
      stream_or_lost(stream, [&] {
        // Not synchronize_stream, which throws the errors of kernels: those are for the program's synchronizations.
        backplane::device(stream.device_index()).synchronize_stream(stream_handle(stream));
        return true;
      });
    });
    complete(lock, stream, front.number, context);
  }
}

// Completes the first pending free of the stream if it still has this number. While the lock was released, another
// thread may have completed it and reused its event.
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
