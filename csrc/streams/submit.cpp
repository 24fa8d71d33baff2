#include "streams/submit.h"

#include <ATen/Parallel.h>
#include <c10/util/StringUtil.h>

#include <exception>
#include <utility>

#include "devices/device.h"
#include "devices/profile.h"
#include "devices/shutdown.h"
#include "devices/verbose.h"
#include "streams/device_errors.h"
#include "streams/stream.h"

namespace backplane {
namespace {

// A host function that reports its exceptions to the stream, and does not start while the process exits.
class Guarded final : public HostFunction {
 public:
  Guarded(std::shared_ptr<const HostFunction> function, c10::Stream stream)
      : function_(std::move(function)), stream_(stream) {}

  void run(char* const* memory, const uint64_t* numbers) const override {
    const HostCall call;
    if (!call.may_run()) {
      return;
    }
    try {
      at::init_num_threads(); // applies torch.set_num_threads() in a driver's thread, too
      if (is_operator()) {
        function_->run(memory, numbers);
      } else {
        run_verbosely(
            [&] { function_->run(memory, numbers); },
            [&] { return c10::str("bp:", static_cast<int>(stream_.device_index()), " host ", function_->text()); });
      }
    } catch (const std::exception&) {
      report_error(stream_, std::current_exception());
    }
  }
  const std::string& name() const override {
    return function_->name();
  }
  bool is_operator() const override {
    return function_->is_operator();
  }

 private:
  const std::shared_ptr<const HostFunction> function_;
  const c10::Stream stream_;
};

} // namespace

std::shared_ptr<const HostFunction> guarded(std::shared_ptr<const HostFunction> function, c10::Stream stream) {
  return std::make_shared<Guarded>(std::move(function), stream);
}

Submitter::Submitter(c10::Stream stream)
    : stream_(stream), capture_(Capture::of(stream)), queue_(capture_ == nullptr ? stream_handle(stream) : nullptr) {}

void Submitter::submit(const Command& command, c10::ArrayRef<RandomNumber> random, const c10::Storage& pinned) const {
  if (C10_LIKELY(capture_ == nullptr)) {
    submit_now(stream_, queue_, command);
  } else {
    capture_->add(stream_, command, random, pinned);
  }
}

void submit_now(c10::Stream stream, StreamHandle queue, const Command& command) {
  Device& owner = device(stream.device_index());
  const ProfiledCommand profiled(stream.device_index(), queue, command);
  if (const auto* callback = std::get_if<HostCallback>(&command)) {
    owner.submit(HostCallback{guarded(callback->function, stream), callback->memory, callback->numbers}, queue);
  } else {
    owner.submit(command, queue);
  }
}

void wait_for_signal(const c10::intrusive_ptr<HostSignal>& signal, c10::Stream stream) {
  if (signal->is_over()) {
    signal->check();
    return;
  }
  if (const auto capture = Capture::of(stream); C10_UNLIKELY(capture != nullptr)) {
    capture->refuse("it makes the captured stream wait for the host");
  }
  Device& owner = device(stream.device_index());
  if (owner.wait_for_signal(signal, stream_handle(stream))) {
    return;
  }
  if (owner.defers_operators()) {
    const auto wait = [signal](char* const*, const uint64_t*) {
      signal->wait();
      signal->check();
    };
    submit(stream, HostCallback{make_host_function("wait for a signal", wait)});
    return;
  }
  {
    const GilReleased released;
    signal->wait();
  }
  signal->check();
}

} // namespace backplane
