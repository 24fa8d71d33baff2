// Functions for host callbacks in plans: a PyTorch operator's CPU kernel, or a function of a C library such as BLAS.
//
// They access the device's memory directly, in stream order. This requires a device whose memory the host can access
// (Device::host_sees_memory), such as an OpenCL CPU device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>
#include <c10/util/DimVector.h>

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "devices/command.h"
#include "devices/library_symbol.h"

namespace backplane {

// An operator's CPU kernel. The operator writes its results to arguments: an out= variant or an in-place operator.
class CpuOperator final : public HostFunction {
 public:
  struct Memory { // a tensor over the callback's next memory address
    c10::ScalarType dtype;
    c10::DimVector sizes;
    c10::DimVector strides;
  };
  struct Number { // the callback's next number (int64 or float64); for complex128 the next two, real and imaginary part
    c10::ScalarType dtype;
  };
  using Argument = std::variant<c10::IValue, Memory, std::vector<Memory>, Number, std::vector<Number>>;

  CpuOperator(c10::OperatorHandle op, std::vector<Argument> arguments)
      : op_(std::move(op)), arguments_(std::move(arguments)) {}

  void run(char* const* memory, const uint64_t* numbers) const override;
  const std::string& name() const override {
    return op_.operator_name().name;
  }
  std::string text() const override;

  const c10::OperatorHandle& op() const {
    return op_;
  }
  const std::vector<Argument>& arguments() const {
    return arguments_;
  }

 private:
  const c10::OperatorHandle op_;
  const std::vector<Argument> arguments_;
};

// A function of a C library. Every argument must be an integer or a pointer. This holds for BLAS and LAPACK, which take
// numbers by reference. The return value is ignored.
class LibraryFunction final : public HostFunction {
 public:
  enum class Kind {
    Memory, // the next memory address
    Value, // the next number, which is an integer
    Reference // a pointer to the next number
  };
  struct Parameter {
    Kind kind;
    c10::ScalarType dtype; // of Value and Reference
  };
  static constexpr size_t kMaxParameters = 20;

  LibraryFunction(LibrarySymbol symbol, std::vector<Parameter> parameters);

  const std::string& name() const override {
    return symbol_.name;
  }
  const std::vector<Parameter>& parameters() const {
    return parameters_;
  }
  void run(char* const* memory, const uint64_t* numbers) const override;
  std::string text() const override;

 private:
  const LibrarySymbol symbol_;
  const std::vector<Parameter> parameters_;
};

} // namespace backplane
