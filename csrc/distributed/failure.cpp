#include "distributed/failure.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace backplane {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& thrown) {
    return thrown.what_without_backtrace();
  } catch (const std::exception& thrown) {
    return thrown.what();
  }
}

std::exception_ptr failure_of(const CollectiveId& collective, const std::string& reason) {
  const auto& [member, name, bytes, number] = collective;
  return std::make_exception_ptr(
      c10::DistBackendError(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
          c10::str(
              name, " of ", bytes, " bytes failed on rank ", member.rank, " of ", member.size, " (group '",
              member.group, "', collective number ", number, "): ", reason)));
}

} // namespace backplane
