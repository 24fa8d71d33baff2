#include "drivers/native_launcher.h"

#include <c10/util/Exception.h>

#include "drivers/c_launcher.h"
#include "drivers/opencl/opencl_launcher.h"

namespace backplane {

std::unique_ptr<NativeLauncher> make_native_launcher(
    const std::string& api, const std::map<std::string, uintptr_t>& functions) {
  if (api == "c") {
    return make_c_launcher(functions);
  }
  TORCH_CHECK_VALUE(api == "opencl", "a native launcher's api must be 'opencl' or 'c', but got '", api, "'");
  return make_opencl_launcher(functions);
}

c10::SmallVector<CArgument, 32> c_arguments(c10::ArrayRef<LaunchArgument> arguments) {
  c10::SmallVector<CArgument, 32> given;
  for (const LaunchArgument& one : arguments) {
    given.push_back({one.memory, one.offset, one.data, one.bytes});
  }
  return given;
}

void NativeLauncher::copy_in(void*, const LaunchArgument&, const void*, size_t) const {
  TORCH_CHECK(false, "the native launcher does not copy host memory");
}

void NativeLauncher::copy_out(void*, void*, const LaunchArgument&, size_t) const {
  TORCH_CHECK(false, "the native launcher does not copy host memory");
}

std::unique_ptr<NativeEvent> NativeLauncher::create_event(bool) const {
  TORCH_CHECK(false, "the native launcher has no events");
}

void NativeLauncher::call_host(void*, std::function<void()>) const {
  TORCH_CHECK(false, "the native launcher has no host callbacks");
}

void NativeLauncher::copy_from_peer(void*, const LaunchArgument&, const LaunchArgument&, size_t) const {
  TORCH_CHECK(false, "the native launcher does not copy from other devices");
}

void NativeEvent::wait_on_peer(void*) {
  TORCH_CHECK(false, "the native launcher does not wait for events of other devices");
}

HostMemory NativeLauncher::host_memory(void*, c10::ArrayRef<LaunchArgument>, uint64_t) const {
  TORCH_CHECK(false, "the host does not see the memory of the native launcher's device");
}

bool has_function(const std::map<std::string, uintptr_t>& functions, const char* name) {
  return functions.count(name) != 0;
}

uintptr_t function_of(const std::map<std::string, uintptr_t>& functions, const char* api, const char* name) {
  const auto found = functions.find(name);
  TORCH_CHECK_VALUE(
      found != functions.end() && found->second != 0, "a native launcher for ", api, " needs the address of ", name);
  return found->second;
}

} // namespace backplane
