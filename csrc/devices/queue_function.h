// A function of a vendor's library that gives work to a device's queue itself, such as a matrix product's.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "devices/compiled_kernel.h"
#include "devices/library_symbol.h"

namespace backplane {

// It is called as docs/write-an-operator.md declares it: with the native queue, and with arguments as a launcher in C has
// them. It answers 0, or a status of its own, of which `explain` has the words, if there are any.
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
  // Everything that it is, in words: what differs is another function.
  std::string text() const;

 private:
  const LibrarySymbol symbol_;
  const std::vector<KernelParameter> parameters_;
  const Explain explain_;
};

} // namespace backplane
