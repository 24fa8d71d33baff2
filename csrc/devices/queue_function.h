// A library function that submits work to a device's queue itself, such as a vendor's matrix product.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "devices/compiled_kernel.h"
#include "devices/library_symbol.h"

namespace backplane {

// docs/write-an-operator.md declares the function type: it takes the native queue, and arguments as a launcher in C
// takes them. It returns 0 or an error status, which `explain` describes, if it is set.
class QueueFunction : public std::enable_shared_from_this<QueueFunction> {
 public:
  using Explain = std::function<std::string(int status)>;

  QueueFunction(LibrarySymbol symbol, std::vector<KernelParameter> parameters, Explain explain);

  const std::string& name() const {
    return symbol_.name;
  }
  uintptr_t address() const {
    return symbol_.address;
  }
  const std::vector<KernelParameter>& parameters() const {
    return parameters_;
  }
  std::string explain(int status) const {
    return explain_ ? explain_(status) : std::string();
  }
  // Identifies the function: two functions differ if their texts differ.
  std::string text() const;

 private:
  const LibrarySymbol symbol_;
  const std::vector<KernelParameter> parameters_;
  const Explain explain_;
};

} // namespace backplane
