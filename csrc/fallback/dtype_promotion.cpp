#include "fallback/dtype_promotion.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/div.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fallback/arguments.h"

namespace backplane {

using c10::ScalarType;

namespace {

// A replacement for a CPU kernel that a wider dtype does not help. Replaces the arguments on the stack by the result.
using Composed = void (*)(const c10::FunctionSchema& schema, torch::jit::Stack* stack);

void histogram(const c10::FunctionSchema& schema, torch::jit::Stack* stack);
void sum_without_nan(const c10::FunctionSchema& schema, torch::jit::Stack* stack);
void absolute_of_bools(const c10::FunctionSchema& schema, torch::jit::Stack* stack);
void triangle(const c10::FunctionSchema& schema, torch::jit::Stack* stack);

constexpr uint64_t bit(ScalarType dtype) {
  return uint64_t{1} << static_cast<unsigned>(dtype);
}

constexpr uint64_t kComplexHalf = bit(ScalarType::ComplexHalf);
constexpr uint64_t kHalf = bit(ScalarType::Half);
constexpr uint64_t kHalves = kHalf | bit(ScalarType::BFloat16);
constexpr uint64_t kBool = bit(ScalarType::Bool);
constexpr uint64_t kIntegers = bit(ScalarType::Byte) | bit(ScalarType::Char) | bit(ScalarType::Short) |
    bit(ScalarType::Int) | bit(ScalarType::Long);
constexpr uint64_t kComplex = kComplexHalf | bit(ScalarType::ComplexFloat) | bit(ScalarType::ComplexDouble);

} // namespace

struct PromotionRule {
  uint64_t unsupported; // bit mask of dtypes
  Composed composed; // nullptr: none
  bool of_one_dtype; // the kernels reject floating-point tensors of different dtypes
};

namespace {

struct Row {
  uint64_t unsupported;
  std::vector<const char*> names; // with all overloads; without a namespace: ATen's
  Composed composed = nullptr;
  bool of_one_dtype = false;
};

const std::vector<Row>& rows() {
  static const auto* table = new std::vector<Row>{
      {kComplexHalf,
       {"acos",
        "acosh",
        "angle",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "cos",
        "cosh",
        "div",
        "exp",
        "lerp",
        "log",
        "logaddexp",
        "pow",
        "prod",
        "rsqrt",
        "sigmoid",
        "sigmoid_backward",
        "sin",
        "sinh",
        "sqrt",
        "sum",
        "tan",
        "tanh",
        "tanh_backward",
        "_fft_c2c",
        "_fft_c2r",
        "cumprod",
        "flip"}},
      {kComplexHalf | kHalf, {"_fft_r2c"}},
      {kHalf, {"rrelu_with_noise"}},
      {kHalves,
       {"avg_pool3d", "avg_pool3d_backward", "_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward",
        "multi_margin_loss", "multi_margin_loss_backward", "multilabel_margin_loss_forward",
        "multilabel_margin_loss_backward"},
       nullptr,
       true},
      {kHalf, {"torchvision::nms"}, nullptr, true},
      {kBool, {"abs"}, &absolute_of_bools},
      {kBool | kComplexHalf, {"trace"}},
      {kIntegers, {"histc"}, &histogram},
      {kComplex, {"nansum"}, &sum_without_nan},
      {~uint64_t{0}, {"tril", "triu"}, &triangle}, // all dtypes: works around a layout
  };
  return *table;
}

ScalarType wider(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::ComplexHalf:
      return ScalarType::ComplexFloat;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return ScalarType::Float;
    case ScalarType::Bool:
      return ScalarType::Byte;
    default:
      return dtype;
  }
}

bool is_dtype(const c10::Argument& argument) {
  const auto* optional = argument.real_type()->castRaw<c10::OptionalType>();
  return (optional != nullptr ? optional->getElementType()->kind() : argument.real_type()->kind()) ==
      c10::TypeKind::ScalarTypeType;
}

// Raises the CPU kernel's error for a result that partially overlaps an operand. Runs the kernel on zeros with the
// memory layout of `arguments`, and with the dtype `wide` instead of `narrow`. If the kernel does not throw, discards
// what it computed.
void raise_of_overlaps(
    const c10::OperatorHandle& op, std::span<const c10::IValue> arguments, ScalarType narrow, ScalarType wide) {
  const auto written = [&](size_t i) { return is_written(op.schema(), op.schema().arguments()[i]); };
  const auto tensor = [&](size_t i) { return arguments[i].isTensor() ? arguments[i].toTensor() : at::Tensor(); };
  bool overlap = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    for (size_t j = 0; j < arguments.size() && written(i); ++j) {
      overlap |= i != j && tensor(i).defined() && tensor(j).defined() &&
          at::get_overlap_status(tensor(i), tensor(j)) == at::MemOverlapStatus::Partial;
    }
  }
  if (!overlap) {
    return;
  }
  std::unordered_map<const void*, at::Tensor> memory; // zeros, by the storage that they replace
  torch::jit::Stack probe;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const at::Tensor one = tensor(i);
    if (!one.defined() || one.scalar_type() != narrow) {
      const bool is_narrow = arguments[i].isInt() && is_dtype(op.schema().arguments()[i]) &&
          static_cast<ScalarType>(arguments[i].toInt()) == narrow;
      probe.push_back(is_narrow ? c10::IValue(static_cast<int64_t>(wide)) : arguments[i]);
      continue;
    }
    auto& storage = memory[one.storage().unsafeGetStorageImpl()];
    if (!storage.defined()) {
      const auto elements = static_cast<int64_t>(one.storage().nbytes() / one.itemsize());
      storage = at::zeros({elements}, one.options().dtype(wide));
    }
    probe.emplace_back(storage.as_strided(one.sizes(), one.strides(), one.storage_offset()));
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &probe);
}

// One call: the dtype that the kernel lacks, the dtype of the results, and the written tensors.
class PromotedCall {
 public:
  PromotedCall(const c10::OperatorHandle& op, const PromotionRule& rule, torch::jit::Stack* stack)
      : schema_(op.schema()),
        arguments_(stack->data() + stack->size() - schema_.arguments().size(), schema_.arguments().size()) {
    at::native::ResultTypeState state;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& argument = schema_.arguments()[i];
      if (arguments_[i].isTensor() && arguments_[i].toTensor().defined()) {
        const at::Tensor& tensor = arguments_[i].toTensor();
        if (!argument.is_out() || rule.composed == nullptr) { // a replacement is chosen by the operands
          check_dtype(tensor.scalar_type(), rule.unsupported);
        }
        if (rule.of_one_dtype && tensor.is_floating_point()) {
          two_dtypes_ |= seen_.value_or(tensor.scalar_type()) != tensor.scalar_type();
          seen_ = tensor.scalar_type();
        }
        if (!argument.is_out() && argument.name() != "target") { // targets are class indices
          state = at::native::update_result_type_state(tensor, state);
        }
      } else if (arguments_[i].isInt() && is_dtype(argument)) {
        requested_ = static_cast<ScalarType>(arguments_[i].toInt());
        check_dtype(*requested_, rule.unsupported);
      }
    }
    computed_ = requested_.value_or(at::native::result_type(state));
    if (two_dtypes_) {
      unsupported_ = ScalarType::Undefined; // run the kernel unchanged: it raises the error
    }
  }

  // Undefined if the kernel supports all dtypes of the call.
  ScalarType unsupported() const {
    return unsupported_;
  }

  void widen() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      c10::IValue& value = arguments_[i];
      const auto& argument = schema_.arguments()[i];
      if (value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() == unsupported_) {
        const at::Tensor narrow = value.toTensor();
        const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
        const at::Tensor wide = argument.is_out() ? at::empty({0}, narrow.options().dtype(wider(unsupported_)))
                                                  : narrow.to(wider(unsupported_));
        if (written) {
          at::assert_no_internal_overlap(narrow);
          written_.push_back({narrow, wide});
        }
        value = wide;
      } else if (value.isInt() && is_dtype(argument) && static_cast<ScalarType>(value.toInt()) == unsupported_) {
        value = static_cast<int64_t>(wider(unsupported_));
      }
    }
  }

  void narrow(torch::jit::Stack* stack) const {
    for (const auto& [original, wide] : written_) {
      at::native::resize_output(original, wide.sizes());
      original.copy_(wide);
    }
    for (size_t i = stack->size() - schema_.returns().size(); i < stack->size(); ++i) {
      c10::IValue& value = (*stack)[i];
      if (value.isTensor() && value.toTensor().defined()) {
        value = narrow(value.toTensor());
      }
    }
  }

 private:
  void check_dtype(ScalarType dtype, uint64_t unsupported) {
    if ((unsupported & bit(dtype)) != 0) {
      unsupported_ = dtype;
    }
  }

  at::Tensor narrow(const at::Tensor& result) const {
    for (const auto& [original, wide] : written_) {
      if (result.is_same(wide)) {
        return original;
      }
    }
    if (computed_ != unsupported_) {
      return result; // has the promoted or requested dtype
    }
    const ScalarType wide = wider(unsupported_);
    if (result.scalar_type() == wide) {
      return result.to(unsupported_);
    }
    if (c10::isComplexType(wide) && result.scalar_type() == c10::toRealValueType(wide)) {
      return result.to(c10::toRealValueType(unsupported_));
    }
    if (c10::isFloatingType(wide) && result.scalar_type() == c10::toComplexType(wide)) {
      return result.to(c10::toComplexType(unsupported_));
    }
    return result;
  }

  const c10::FunctionSchema& schema_;
  const std::span<c10::IValue> arguments_; // on the stack
  ScalarType unsupported_ = ScalarType::Undefined;
  ScalarType computed_ = ScalarType::Undefined; // the dtype that PyTorch would compute in
  std::optional<ScalarType> requested_; // the value of a dtype argument
  std::optional<ScalarType> seen_; // the dtype of a floating-point tensor
  bool two_dtypes_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_; // (written argument, wide tensor in its place)
};

// Runs the CPU kernel of `name.overload` on the stack, with its promotion rule if it has one.
void call_cpu(const char* name, const char* overload, torch::jit::Stack* stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  if (const auto* rule = promotion_rule(op)) {
    run_promoted(*rule, op, stack);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
}

// CUDA computes histograms of integers in integers. In float64, an element at the edge of a bin could be counted in the
// next.
void histogram(const c10::FunctionSchema& schema, torch::jit::Stack* stack) {
  const bool has_out = schema.arguments().back().is_out();
  const at::Tensor out = has_out ? torch::jit::pop(*stack).toTensor() : at::Tensor();
  auto most = torch::jit::pop(*stack).toScalar();
  auto least = torch::jit::pop(*stack).toScalar();
  const int64_t bins = torch::jit::pop(*stack).toInt();
  const at::Tensor self = torch::jit::pop(*stack).toTensor();
  TORCH_CHECK(bins > 0, "bins must be > 0");
  const ScalarType dtype = self.scalar_type();
  const auto integer = [&](const c10::Scalar& number) { return at::scalar_tensor(number, dtype).item<int64_t>(); };
  const at::Tensor numbers = self.reshape({-1}).to(at::kLong);
  int64_t first = integer(least);
  int64_t last = integer(most);
  if (first == last && numbers.numel() > 0) {
    first = numbers.min().item<int64_t>();
    last = numbers.max().item<int64_t>();
  }
  if (first == last) {
    --first;
    ++last;
  }
  TORCH_CHECK(first < last, "max must be larger than min");
  const at::Tensor within = numbers.masked_select(numbers.ge(first).logical_and_(numbers.le(last)));
  const at::Tensor bin = at::div(within.sub(first).mul_(bins), last - first, "floor").clamp_max_(bins - 1);
  const at::Tensor counts = at::bincount(bin, {}, bins).to(dtype);
  if (has_out) {
    TORCH_CHECK(
        out.scalar_type() == dtype,
        "torch.histogram: input tensor and hist tensor should have the same dtype, but got ", "input ", dtype,
        " and hist ", out.scalar_type());
    at::native::resize_output(out, counts.sizes());
    out.copy_(counts);
  }
  torch::jit::push(*stack, has_out ? out : counts);
}

// The absolute value of a bool is the bool itself.
void absolute_of_bools(const c10::FunctionSchema& schema, torch::jit::Stack* stack) {
  const auto& last = schema.arguments().back();
  if (!is_written(schema, last)) {
    torch::jit::push(*stack, torch::jit::pop(*stack).toTensor().clone());
    return;
  }
  const at::Tensor out = torch::jit::pop(*stack).toTensor();
  at::assert_no_internal_overlap(out);
  if (last.is_out()) { // otherwise in-place: nothing to compute
    const at::Tensor self = torch::jit::pop(*stack).toTensor();
    TORCH_CHECK(
        out.scalar_type() == ScalarType::Bool, "Found dtype ", out.scalar_type(), " but expected ", ScalarType::Bool);
    at::native::resize_output(out, self.sizes());
    out.copy_(self);
  }
  torch::jit::push(*stack, out);
}

// The CPU kernels assume that the matrices of an out= tensor are a constant distance apart, and otherwise write out of
// bounds. Pass them a contiguous copy instead.
void triangle(const c10::FunctionSchema& schema, torch::jit::Stack* stack) {
  const auto kernel =
      c10::Dispatcher::singleton().findSchemaOrThrow(schema.name().c_str(), schema.overload_name().c_str());
  at::Tensor out;
  if (schema.arguments().back().is_out() && stack->back().toTensor().dim() > 3 &&
      !stack->back().toTensor().is_contiguous()) {
    out = torch::jit::pop(*stack).toTensor();
    torch::jit::push(*stack, out.clone(at::MemoryFormat::Contiguous));
  }
  kernel.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (out.defined()) {
    const at::Tensor made = torch::jit::pop(*stack).toTensor();
    at::native::resize_output(out, made.sizes());
    torch::jit::push(*stack, out.copy_(made));
  }
}

void sum_without_nan(const c10::FunctionSchema& schema, torch::jit::Stack* stack) {
  const bool has_out = schema.arguments().back().is_out();
  c10::IValue& self = (*stack)[stack->size() - (has_out ? 5 : 4)];
  const at::Tensor numbers = self.toTensor();
  const at::Tensor nan = numbers.scalar_type() == ScalarType::ComplexHalf
      ? at::isnan(at::view_as_real(numbers.resolve_conj())).any(-1)
      : at::isnan(numbers);
  self = numbers.masked_fill(nan, 0);
  call_cpu("aten::sum", has_out ? "IntList_out" : "dim_IntList", stack);
}

} // namespace

const PromotionRule* promotion_rule(const c10::OperatorHandle& op) {
  static const auto* table = [] {
    auto* made = new std::unordered_map<std::string, PromotionRule>;
    for (const Row& row : rows()) {
      for (const char* name : row.names) {
        const char* space = std::string_view(name).find("::") == std::string_view::npos ? "aten::" : "";
        for (const char* in_place : {"", "_"}) {
          made->emplace(
              c10::str(space, name, in_place), PromotionRule{row.unsupported, row.composed, row.of_one_dtype});
        }
      }
    }
    return made;
  }();
  const auto found = table->find(op.schema().name());
  return found == table->end() ? nullptr : &found->second;
}

namespace {

// Raises the CPU kernel's error for arguments that it rejects in any dtype, so that the message shows the original
// dtypes.
void raise_for_originals(const c10::OperatorHandle& op, torch::jit::Stack given) {
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &given);
  } catch (const c10::NotImplementedError&) {
    return; // only the dtype is not supported
  }
}

} // namespace

void run_promoted(const PromotionRule& rule, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  PromotedCall call(op, rule, stack);
  if (call.unsupported() == ScalarType::Undefined) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  } else if (rule.composed != nullptr) {
    rule.composed(op.schema(), stack);
  } else {
    torch::jit::Stack given(stack->end() - op.schema().arguments().size(), stack->end());
    raise_of_overlaps(op, given, call.unsupported(), wider(call.unsupported()));
    call.widen();
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    } catch (const c10::Error&) {
      raise_for_originals(op, std::move(given));
      throw;
    }
    call.narrow(stack);
  }
}

namespace {

// The functions of torch.fft for float16. PyTorch's composite kernels reject float16 on every device but CUDA.
void transform(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::DispatchKeySet composition(c10::DispatchKey::CPU); // the CPU uses the composite kernels of these operators
  const size_t base = stack->size() - op.schema().arguments().size();
  const at::Tensor self = (*stack)[base].toTensor();
  if (self.scalar_type() != ScalarType::Half) {
    op.redispatchBoxed(composition, stack);
    return;
  }
  (*stack)[base] = self.to(ScalarType::Float);
  if (!op.schema().arguments().back().is_out()) {
    op.redispatchBoxed(composition, stack);
    const at::Tensor result = torch::jit::pop(*stack).toTensor();
    torch::jit::push(*stack, result.to(result.is_complex() ? ScalarType::ComplexHalf : ScalarType::Half));
    return;
  }
  const at::Tensor out = torch::jit::pop(*stack).toTensor();
  c10::Dispatcher::singleton().findSchemaOrThrow(op.schema().name().c_str(), "").redispatchBoxed(composition, stack);
  const at::Tensor result = torch::jit::pop(*stack).toTensor();
  at::native::resize_output(out, result.sizes());
  out.copy_(result);
  torch::jit::push(*stack, out);
}

void register_transforms(torch::Library& library) {
  for (const char* name :
       {"fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft", "fft_fft2", "fft_ifft2", "fft_rfft2",
        "fft_irfft2", "fft_hfft2", "fft_ihfft2", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_hfftn",
        "fft_ihfftn"}) {
    for (const char* overload : {"", ".out"}) {
      library.impl(c10::str(name, overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&transform>());
    }
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  register_transforms(m);
}

// Needs no autograd formula, because it only calls differentiable functions.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  register_transforms(m);
}

} // namespace
} // namespace backplane
