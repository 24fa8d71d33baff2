// Host functions of plans: a PyTorch operator's CPU kernel, or a function of a C library such as BLAS.
//
// They run in stream order on the device's memory, so only on devices whose memory the host sees
// (Device::host_sees_memory), such as OpenCL processors.
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

// An operator's CPU kernel. Its results go where arguments say: operators with `out=`, or that work in place.
class CpuOperator final : public HostFunction {
 public:
  struct Memory { // the next piece of memory, as a tensor
    c10::ScalarType dtype;
    c10::DimVector sizes;
    c10::DimVector strides;
  };
  struct Number { // the next number, of int64 or float64; of complex128 the next two, its parts
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

// A function of a C library. All that it takes must be passed as integers and pointers are, which holds for BLAS and
// LAPACK, where numbers come by reference; what it returns is not looked at.
class LibraryFunction final : public HostFunction {
 public:
  enum class Kind {
    Memory, // a pointer to the next piece of memory
    Value, // the next number, an integer
    Reference // a pointer to the next number
  };
  struct Parameter {
    Kind kind;
    c10::ScalarType dtype; // of a number
  };
  static constexpr size_t kMostParameters = 20;

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
