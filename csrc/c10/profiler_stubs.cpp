// PyTorch's profiler for devices without a tracer: records events before and after each operator.
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>

#include "devices/device.h"
#include "streams/stream.h"

namespace backplane {
namespace {

using torch::profiler::impl::ProfilerStubs;
using torch::profiler::impl::ProfilerVoidEventStub;

class Stubs final : public ProfilerStubs {
 public:
  // Does not call record_event(), which would mark a plan that is being recorded as not replayable.
  void record(c10::DeviceIndex* index, ProfilerVoidEventStub* event, int64_t* cpu_ns) const override {
    const c10::Stream stream = current_stream(current_device());
    Device& owner = device(stream.device_index());
    const StreamHandle handle = stream_handle(stream);
    if (index != nullptr) {
      *index = stream.device_index();
    }
    {
      DeviceCall call(owner);
      *event = std::shared_ptr<Event>(
          new Event{stream.device_index(), owner.create_event(/*timing=*/true), /*timing=*/true, nullptr},
          destroy_event);
      owner.submit(EventRecord{as_event(event)->handle}, handle);
    }
    if (cpu_ns != nullptr) {
      *cpu_ns = c10::getTime();
    }
  }

  // Microseconds; 0 for events of two devices, which share no clock.
  float elapsed(const ProfilerVoidEventStub* start, const ProfilerVoidEventStub* end) const override {
    const Event* first = as_event(start);
    const Event* second = as_event(end);
    if (first == nullptr || second == nullptr || first->device != second->device) {
      return 0;
    }
    synchronize_event(first);
    synchronize_event(second);
    return static_cast<float>(elapsed_ms(first, second) * 1000);
  }

  bool enabled() const override {
    return true;
  }

  void onEachDevice(std::function<void(int)> function) const override {
    const auto before = current_device();
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      set_current_device(index);
      function(index);
    }
    set_current_device(before);
  }

  void synchronize() const override {
    synchronize_device(current_device());
  }

  // Markers are for vendors' tools.
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}

 private:
  static const Event* as_event(const ProfilerVoidEventStub* event) {
    return static_cast<const Event*>(event->get());
  }
};

const bool registered = [] {
  static Stubs stubs;
  torch::profiler::impl::registerPrivateUse1Methods(&stubs);
  return true;
}();

} // namespace
} // namespace backplane
