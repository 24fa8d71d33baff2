// Looking up operators in PyTorch's dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace backplane {

// The overload without a name. Throws if there is none.
inline c10::OperatorHandle find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

} // namespace backplane
