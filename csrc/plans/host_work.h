// Work of a plan that the host does: a PyTorch operator's CPU kernel, or a function of a C library such as BLAS.
//
// It runs when the stream gets there, in a thread of the device's, on the device's memory: so only on devices whose memory
// the host sees (Device::host_sees_memory), such as OpenCL's processors.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/util/DimVector.h>

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "devices/library_symbol.h"

namespace backplane {

class HostWork {
 public:
  virtual ~HostWork() = default;
  // `memory`: where the host sees each piece of memory; `numbers`: the bytes of each number, as store_number writes them.
  virtual void run(char* const* memory, const uint64_t* numbers) const = 0;
  virtual const std::string& name() const = 0;
  // Everything that the work is, in words: what differs does other work.
  virtual std::string text() const = 0;
};

// An operator's CPU kernel. Its results go where arguments say: operators with `out=`, or that work in place.
class CpuOperator final : public HostWork {
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

  CpuOperator(c10::OperatorHandle op, std::vector<Argument> arguments);

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
class LibraryFunction final : public HostWork {
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

// Gives the work to the stream. What it throws is thrown by the stream's next synchronization.
void do_on_host(
    c10::Stream stream,
    std::shared_ptr<const HostWork> work,
    c10::ArrayRef<char*> memory,
    c10::ArrayRef<uint64_t> numbers);

} // namespace backplane
