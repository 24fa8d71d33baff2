#include "drivers/native_launcher.h"

#include <c10/util/Exception.h>

#include "drivers/c_launcher.h"
#include "drivers/opencl_launcher.h"

namespace backplane {

std::unique_ptr<NativeLauncher> make_native_launcher(
    const std::string& api, const std::map<std::string, uintptr_t>& functions) {
  if (api == "c") {
    return make_c_launcher(functions);
  }
  TORCH_CHECK_VALUE(api == "opencl", "a native launcher's api must be 'opencl' or 'c', and got '", api, "'");
  return make_opencl_launcher(functions);
}

uintptr_t function_of(const std::map<std::string, uintptr_t>& functions, const char* api, const char* name) {
  const auto found = functions.find(name);
  TORCH_CHECK_VALUE(
      found != functions.end() && found->second != 0, "a native launcher for ", api, " needs the address of ", name);
  return found->second;
}

} // namespace backplane
