#include "distributed/communication.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "distributed/collective.h"

namespace backplane {
namespace {

using c10d::ReduceOp;

constexpr std::array<c10::ScalarType, 9> kReduced{c10::kFloat, c10::kDouble, c10::kHalf, c10::kBFloat16, c10::kInt,
                                                  c10::kLong,  c10::kChar,   c10::kByte, c10::kBool};

// The reductions as in ProcessGroupNCCL. Numbers of bool are 0 and 1: their sum is «or».
Reduction reduction_of(const ReduceOp& operation, c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(
      std::find(kReduced.begin(), kReduced.end(), dtype) != kReduced.end(),
      "NCCL reduces tensors of float32, float64, float16, bfloat16, int32, int64, int8, uint8 and bool, not ", dtype);
  const bool is_bool = dtype == c10::kBool;
  switch (operation) {
    case ReduceOp::SUM:
      return is_bool ? Reduction::Max : Reduction::Sum;
    case ReduceOp::PRODUCT:
      return Reduction::Product;
    case ReduceOp::MIN:
      return Reduction::Min;
    case ReduceOp::MAX:
      return Reduction::Max;
    case ReduceOp::AVG:
      TORCH_CHECK_VALUE(!is_bool, "ReduceOp.AVG needs tensors of numbers, not ", dtype);
      return Reduction::Average;
    case ReduceOp::PREMUL_SUM:
      TORCH_CHECK_VALUE(
          c10::isFloatingType(dtype), "ReduceOp.PREMUL_SUM needs tensors of a floating-point dtype, not ", dtype);
      return Reduction::ScaledSum;
    default:
      TORCH_CHECK_VALUE(
          false,
          "NCCL has no bitwise reductions (ReduceOp.BAND, BOR, BXOR), only SUM, PRODUCT, MIN, MAX, AVG and "
          "PREMUL_SUM");
  }
}

void* address_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr() : nullptr;
}

} // namespace

void Communication::keep(const at::Tensor& from, const at::Tensor& to) {
  const auto keep_one = [this](const at::Tensor& tensor) {
    check_tensor(tensor);
    TORCH_CHECK_VALUE(
        tensors.empty() || tensors.front().device() == tensor.device(), name, " needs tensors on one device, but got ",
        tensors.front().device(), " and ", tensor.device());
    bytes += static_cast<int64_t>(tensor.nbytes());
    tensors.push_back(tensor.detach()); // without the caller's Python object
  };
  if (from.defined()) {
    keep_one(from);
  }
  if (to.defined() && !to.is_same(from)) {
    keep_one(to);
  }
}

void Communication::move(Kind kind, const at::Tensor& from, const at::Tensor& to, int peer) {
  keep(from, to);
  const bool is_sized_by_output = !from.defined() || kind == Kind::Broadcast;
  if (const size_t count = is_sized_by_output && to.defined() ? to.nbytes() : from.nbytes(); count > 0) {
    steps.push_back({kind, address_of(from), address_of(to), count, c10::kByte, peer});
  }
}

void Communication::reduce(
    Kind kind, const at::Tensor& from, const at::Tensor& to, const ReduceOp& operation, int peer) {
  keep(from, to);
  CommunicationStep step{kind, address_of(from), address_of(to), 0, from.scalar_type(), peer};
  step.reduction = reduction_of(operation, step.dtype);
  step.count = static_cast<size_t>(kind == Kind::ReduceScatter ? to.numel() : from.numel());
  if (step.reduction == Reduction::ScaledSum) {
    const auto& given = static_cast<const c10d::NCCLPreMulSumSupplement&>(*operation.supplement_);
    step.factor = given.double_factor;
    if (given.tensor_factor.defined()) {
      const at::Tensor factor = given.tensor_factor.to(from.options());
      TORCH_CHECK_VALUE(
          factor.numel() == 1, "the factor of ReduceOp.PREMUL_SUM must be one number, but got sizes ", factor.sizes());
      tensors.push_back(factor);
      step.factor_memory = factor.const_data_ptr();
    }
  }
  if (step.count > 0) {
    steps.push_back(step);
  }
}

void Communication::append(Communication other) {
  const auto take = [](auto& from, auto& to) {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  };
  take(other.outputs, outputs);
  take(other.inputs, inputs);
  take(other.steps, steps);
  take(other.tensors, tensors);
  bytes += other.bytes;
  timeout = std::max(timeout, other.timeout);
}

} // namespace backplane
