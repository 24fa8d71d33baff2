// The timer that DistributedDataParallel uses for its statistics: events on the current stream.
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <map>
#include <utility>

#include "streams/stream.h"

namespace backplane {
namespace {

class DdpTimer final : public c10d::Timer {
 public:
  explicit DdpTimer(c10::Device device) : device_(device) {}

  void record(Event event) override {
    Timer::record(event);
    c10::Event recorded(c10::kPrivateUse1, c10::EventFlag::BACKEND_DEFAULT); // with timing
    recorded.record(current_stream(device_.index()));
    events_.insert_or_assign(event, std::move(recorded));
  }

  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto first = events_.find(start);
    const auto last = events_.find(end);
    if (first == events_.end() || last == events_.end()) {
      return std::nullopt;
    }
    first->second.synchronize();
    last->second.synchronize();
    const double milliseconds = first->second.elapsedTime(last->second);
    return milliseconds < 0 ? std::nullopt : std::optional<int64_t>(static_cast<int64_t>(milliseconds * 1e6));
  }

 private:
  const c10::Device device_;
  std::map<Event, c10::Event> events_;
};

} // namespace
} // namespace backplane

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kPrivateUse1, backplane::DdpTimer)
} // namespace c10d
