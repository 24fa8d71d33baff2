#include "devices/queue_function.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace backplane {

QueueFunction::QueueFunction(LibrarySymbol symbol, std::vector<KernelParameter> parameters, Explain explain)
    : symbol_(std::move(symbol)), parameters_(std::move(parameters)), explain_(std::move(explain)) {
  TORCH_CHECK_VALUE(symbol_.address != 0, "library function ", symbol_.name, " must have an address, but it is 0");
}

std::string QueueFunction::text() const {
  return c10::str(symbol_.name, " at ", symbol_.address);
}

} // namespace backplane
