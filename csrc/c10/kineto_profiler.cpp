// Exports profiles to PyTorch's profiler (Kineto): kernels, copies and other commands on their streams, and the host
// calls that submitted them, each linked to its operator.
//
// Implements torch/csrc/profiler/standalone/privateuse1_profiler.h, which torch 2.12 added. Earlier releases have only
// profiler_stubs.cpp.
#if __has_include(<torch/csrc/profiler/standalone/privateuse1_profiler.h>)

#define USE_KINETO
#define FMT_HEADER_ONLY 1
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <libkineto.h>
#include <output_base.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "devices/profile.h"
#include "streams/stream.h"

namespace backplane {
namespace {

using libkineto::ActivityType;
using libkineto::GenericTraceActivity;

// PyTorch numbers its operators from 1; these numbers must not collide with them.
constexpr int32_t kFirstNumber = 1 << 30;

ActivityType type_on_device(Activity::Kind kind) {
  return kind == Activity::Kind::Copy ? ActivityType::GPU_MEMCPY : ActivityType::CONCURRENT_KERNEL;
}

std::string call_of(const Activity& activity) {
  switch (activity.kind) {
    case Activity::Kind::Kernel:
      return "bpLaunchKernel";
    case Activity::Kind::Library:
      return "bpCallLibrary";
    case Activity::Kind::HostStep:
      return "bpCallHost";
    case Activity::Kind::Copy:
      return "bpMemcpy";
    default:
      return activity.name;
  }
}

std::string listed(const std::array<size_t, 3>& sizes) {
  return c10::str("[", sizes[0], ", ", sizes[1], ", ", sizes[2], "]");
}

class Session final : public libkineto::IActivityProfilerSession {
 public:
  void start() override {
    profile_ = Profile::start();
  }

  void stop() override {
    if (profile_ != nullptr) {
      profile_->stop();
      for (const std::string& error : profile_->errors()) {
        TORCH_WARN("the profile has no device times for some commands: ", error);
      }
    }
  }

  std::vector<std::string> errors() override {
    return profile_ != nullptr ? profile_->errors() : std::vector<std::string>();
  }

  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, [](int32_t) { return nullptr; }, 0, 0);
  }

  void processTrace(
      libkineto::ActivityLogger& logger,
      libkineto::getLinkedActivityCallback linked,
      int64_t start,
      int64_t end) override {
    if (profile_ == nullptr) {
      return;
    }
    buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
    buffer_->span = libkineto::TraceSpan(start, end, "bp");
    buffer_->gpuOpCount = 0;
    int32_t number = kFirstNumber;
    for (const Activity& activity : profile_->activities()) {
      const auto* operation = activity.correlation == 0 ? nullptr : linked(static_cast<int32_t>(activity.correlation));
      ++number;
      if (activity.kind != Activity::Kind::Operator) { // PyTorch records the call of an operator itself
        GenericTraceActivity& call = add(ActivityType::PRIVATEUSE1_RUNTIME, call_of(activity), number, operation);
        call.device = libkineto::processId();
        call.resource = call.threadId = activity.thread;
        call.startTime = activity.begun;
        call.endTime = activity.ended;
        call.flow.start = activity.ran.has_value() ? 1 : 0;
        call.flow.type = activity.ran.has_value() ? libkineto::kLinkAsyncCpuGpu : 0;
      }
      if (activity.ran.has_value()) {
        GenericTraceActivity& work = add(type_on_device(activity.kind), activity.name, number, operation);
        work.flow.type = activity.kind == Activity::Kind::Operator ? 0 : libkineto::kLinkAsyncCpuGpu;
        const auto stream = stream_of(activity.device, activity.stream);
        work.device = activity.device;
        work.resource = stream.has_value() ? static_cast<int32_t>(stream->id()) : 0;
        work.threadId = activity.thread;
        std::tie(work.startTime, work.endTime) = *activity.ran;
        describe(activity, work);
        streams_.emplace(work.device, work.resource);
        if (activity.user_correlation != 0) {
          annotate(linked(static_cast<int32_t>(activity.user_correlation)), activity.user_correlation, work);
        }
      }
    }
    for (auto& [key, span] : annotations_) {
      buffer_->activities.push_back(std::move(span));
    }
    annotations_.clear();
    for (const auto& activity : buffer_->activities) {
      activity->log(logger);
    }
    name_devices(logger, start);
  }

  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override {
    return nullptr; // name_devices reports all of them
  }

  std::vector<libkineto::ResourceInfo> getResourceInfos() override {
    std::vector<libkineto::ResourceInfo> found;
    for (const auto& [device, stream] : streams_) {
      found.push_back({stream, stream, device, c10::str("stream ", stream)});
    }
    return found;
  }

  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override {
    return std::move(buffer_);
  }

  void pushCorrelationId(uint64_t number) override {
    Profile::push_correlation(number);
  }
  void popCorrelationId() override {
    Profile::pop_correlation();
  }
  void pushUserCorrelationId(uint64_t number) override {
    Profile::push_user_correlation(number);
  }
  void popUserCorrelationId() override {
    Profile::pop_user_correlation();
  }

 private:
  GenericTraceActivity& add(
      ActivityType type, const std::string& name, int32_t number, const libkineto::ITraceActivity* operation) {
    buffer_->emplace_activity(buffer_->span, type, name);
    GenericTraceActivity& added = *buffer_->activities.back();
    added.id = number;
    added.flow.id = static_cast<uint32_t>(number);
    added.linked = operation;
    added.addMetadata("correlation", number);
    return added;
  }

  static void describe(const Activity& activity, GenericTraceActivity& work) {
    work.addMetadata("device", static_cast<int>(work.device));
    work.addMetadata("stream", work.resource);
    if (activity.spec.has_value()) {
      auto groups = activity.spec->global_size;
      for (size_t i = 0; i < groups.size(); ++i) {
        groups[i] /= activity.spec->group_size[i];
      }
      work.addMetadata("grid", listed(groups));
      work.addMetadata("block", listed(activity.spec->group_size));
    }
    if (activity.kind == Activity::Kind::Copy) {
      work.addMetadata("bytes", activity.bytes);
      const double seconds = static_cast<double>(work.duration()) / 1e9;
      work.addMetadata(
          "memory bandwidth (GB/s)", seconds > 0 ? static_cast<double>(activity.bytes) / 1e9 / seconds : 0.0);
    }
  }

  // Extends the span of a record_function on a stream, from its first command to its last, by `work`.
  void annotate(const libkineto::ITraceActivity* range, uint64_t number, const GenericTraceActivity& work) {
    if (range == nullptr) {
      return;
    }
    auto& span = annotations_[{number, work.device, work.resource}];
    if (span == nullptr) {
      span = std::make_unique<GenericTraceActivity>(buffer_->span, ActivityType::GPU_USER_ANNOTATION, range->name());
      span->id = static_cast<int32_t>(range->correlationId());
      span->device = work.device;
      span->resource = work.resource;
      span->startTime = work.startTime;
      span->endTime = work.endTime;
      return;
    }
    span->startTime = std::min(span->startTime, work.startTime);
    span->endTime = std::max(span->endTime, work.endTime);
  }

  void name_devices(libkineto::ActivityLogger& logger, int64_t time) const {
    std::set<int32_t> named;
    for (const auto& [index, stream] : streams_) {
      if (named.insert(index).second) {
        logger.handleDeviceInfo(
            {index, index + libkineto::kExceedMaxPid, c10::str("bp:", index),
             device(static_cast<c10::DeviceIndex>(index)).properties().name},
            time);
      }
    }
  }

  std::shared_ptr<Profile> profile_;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
  std::map<std::tuple<uint64_t, int32_t, int32_t>, std::unique_ptr<GenericTraceActivity>> annotations_;
  std::set<std::pair<int32_t, int32_t>> streams_; // (device, stream id) pairs with work
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override {
    static const std::string name = "bp";
    return name;
  }

  const std::set<ActivityType>& availableActivities() const override {
    static const std::set<ActivityType> types{
        ActivityType::CONCURRENT_KERNEL, ActivityType::GPU_MEMCPY, ActivityType::GPU_USER_ANNOTATION,
        ActivityType::PRIVATEUSE1_RUNTIME};
    return types;
  }

  // Returns nullptr where the profile does not include device activities.
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& types, const libkineto::Config&) override {
    return types.count(ActivityType::CONCURRENT_KERNEL) == 0 ? nullptr : std::make_unique<Session>();
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t, int64_t, const std::set<ActivityType>& types, const libkineto::Config& config) override {
    return configure(types, config);
  }
};

REGISTER_PRIVATEUSE1_PROFILER(Profiler);

} // namespace
} // namespace backplane

#endif
