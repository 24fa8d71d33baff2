#include "fallback/deferred.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "c10/generator.h"
#include "c10/storage.h"
#include "devices/command.h"
#include "devices/interrupts.h"
#include "fallback/arguments.h"
#include "fallback/cpu_mirror.h"
#include "streams/capture.h"
#include "streams/stream.h"
#include "streams/submit.h"

namespace backplane {
namespace {

// A deferred call of a CPU kernel with its arguments. The callback's numbers are the seed and offset of a random
// operator.
class DeferredCall final : public HostFunction {
 public:
  struct Written { // a stand-in that the kernel writes, and the layout that it must still have afterwards
    at::Tensor tensor;
    c10::DimVector sizes;
    c10::DimVector strides;
    const void* memory;
    bool is_conj;

    explicit Written(const at::Tensor& stand_in)
        : tensor(stand_in),
          sizes(stand_in.sizes()),
          strides(stand_in.strides()),
          memory(stand_in.const_data_ptr()),
          is_conj(stand_in.is_conj()) {}
    bool is_where_it_was() const {
      return tensor.sizes() == sizes && tensor.const_data_ptr() == memory && tensor.is_conj() == is_conj;
    }
    // Restores the expected strides, if the kernel has changed them.
    void restore_strides() const {
      if (tensor.strides() != strides) {
        const at::Tensor elements = tensor.clone();
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, tensor.storage_offset());
        tensor.copy_(elements);
      }
    }
  };

  explicit DeferredCall(const DeferredOperator& call)
      : operator_name(call.name), kernel(call.kernel), promotion(call.promotion), generator(call.generator) {}

  const std::string operator_name;
  c10::OperatorHandle kernel;
  const PromotionRule* promotion;
  int generator; // index of the Generator argument; -1: none
  torch::jit::Stack arguments{};
  std::vector<Written> written{};
  // The destination of each result, with lists flattened. Undefined: the result is undefined, or a written argument.
  std::vector<at::Tensor> results{};

  const std::string& name() const override {
    return operator_name;
  }
  bool is_operator() const override {
    return true;
  }

  void run(char* const*, const uint64_t* numbers) const override {
    // This can be a thread of the program, with any dispatch mode active.
    const c10::impl::ForceDispatchKeyGuard keys(
        c10::default_included_set, c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    torch::jit::Stack stack = arguments;
    if (generator >= 0) {
      stack[generator] = cpu_generator({numbers[0], numbers[1]});
    }
    if (promotion != nullptr) {
      run_promoted(*promotion, kernel, &stack);
    } else {
      kernel.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    }
    for (const Written& one : written) {
      check(one.is_where_it_was(), one.tensor);
      one.restore_strides();
    }
    size_t count = 0;
    const auto put = [&](const at::Tensor& found) {
      check(count < results.size(), found);
      const at::Tensor& place = results[count++];
      if (place.defined()) {
        check(found.defined() && found.sizes() == place.sizes() && found.scalar_type() == place.scalar_type(), found);
        copy(found, place);
      }
    };
    for (const c10::IValue& value : stack) {
      if (value.isTensor()) {
        put(value.toTensor());
      } else {
        for (const at::Tensor& tensor : value.toTensorVector()) {
          put(tensor);
        }
      }
    }
    check(count == results.size(), at::Tensor());
  }

 private:
  void check(bool is_as_foretold, const at::Tensor& found) const {
    TORCH_CHECK(
        is_as_foretold, operator_name, " cannot be deferred: the CPU kernel's result (",
        found.defined() ? c10::str(found.scalar_type(), found.sizes()) : "none",
        ") differs from the result of PyTorch's meta kernel");
  }

  static void copy(const at::Tensor& from, const at::Tensor& to) {
    if (from.strides() == to.strides() && from.is_non_overlapping_and_dense() && from.is_conj() == to.is_conj() &&
        from.is_neg() == to.is_neg()) {
      if (from.numel() > 0) {
        std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
      }
    } else {
      to.copy_(from);
    }
  }
};

// The out= variant of a structured operator: "aten::add.out" for "aten::add.Tensor". nullopt for losses and isin, whose
// kernels resize their out= tensors.
std::optional<c10::OperatorHandle> find_out_form(const c10::OperatorHandle& op) {
  auto& dispatcher = c10::Dispatcher::singleton();
  static const auto* overloads = [&] {
    auto* all = new std::unordered_map<std::string, std::vector<c10::OperatorName>>;
    for (const auto& name : dispatcher.getAllOpNames()) {
      (*all)[name.name].push_back(name);
    }
    return all;
  }();
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto found = overloads->find(schema.name());
  const bool has_none = std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& one) {
    return one.alias_info() != nullptr || one.name() == "reduction";
  });
  if (found == overloads->end() || has_none || schema.name() == "aten::isin") {
    return std::nullopt;
  }
  for (const c10::OperatorName& name : found->second) {
    const auto other = dispatcher.findSchema(name);
    if (!other.has_value() || !other->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      continue;
    }
    const auto& theirs = other->schema().arguments();
    const auto same = [](const c10::Argument& one, const c10::Argument& other) {
      return one.name() == other.name() && *one.type() == *other.type();
    };
    const auto is_place = [](const c10::Argument& one) {
      return one.type()->kind() == c10::TypeKind::TensorType && one.alias_info() != nullptr &&
          one.alias_info()->isWrite();
    };
    if (theirs.size() == arguments.size() + schema.returns().size() &&
        other->schema().returns().size() == schema.returns().size() &&
        std::equal(arguments.begin(), arguments.end(), theirs.begin(), same) &&
        std::all_of(theirs.begin() + static_cast<std::ptrdiff_t>(arguments.size()), theirs.end(), is_place)) {
      return other;
    }
  }
  return std::nullopt;
}

std::optional<c10::OperatorHandle> out_form(const c10::OperatorHandle& op) {
  static auto* known = new std::unordered_map<std::string, std::optional<c10::OperatorHandle>>;
  static std::mutex lock;
  std::lock_guard<std::mutex> guard(lock);
  const std::string name = toString(op.operator_name());
  const auto found = known->find(name);
  return found != known->end() ? found->second : known->emplace(name, find_out_form(op)).first->second;
}

// Converts the tensors of a call to meta tensors, one for each tensor object.
class Metas {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || (!tensor.device().is_privateuseone() && tensor.dim() == 0)) {
      return tensor; // a zero-dimensional CPU tensor is a number, and keeps its value
    }
    for (const auto& [original, meta] : pairs_) {
      if (original.is_same(tensor)) {
        return meta;
      }
    }
    c10::Storage& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) { // tensors that share a storage still do, because meta kernels check for overlap
      storage = c10::Storage(
          c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::GetAllocator(c10::kMeta),
          /*resizable=*/true);
    }
    const auto meta = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
    meta.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    meta._set_conj(tensor.is_conj());
    meta._set_neg(tensor.is_neg());
    pairs_.emplace_back(tensor, meta);
    return meta;
  }

  // The call's tensor for a meta tensor; nullptr if there is none.
  const at::Tensor* original_of(const at::Tensor& tensor) const {
    for (const auto& [original, meta] : pairs_) {
      if (meta.is_same(tensor)) {
        return &original;
      }
    }
    return nullptr;
  }

  bool shares_memory(const at::Tensor& tensor) const {
    for (const auto& [original, meta] : pairs_) {
      if (meta.is_alias_of(tensor)) {
        return true;
      }
    }
    return false;
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
};

bool is_tensors(const c10::Argument& result) {
  const auto& type = *result.type();
  const auto* list = type.castRaw<c10::ListType>();
  const bool fits = type.kind() == c10::TypeKind::TensorType ||
      (list != nullptr && list->getElementType()->kind() == c10::TypeKind::TensorType);
  return fits && (result.alias_info() == nullptr || result.alias_info()->isWrite()); // otherwise it is a view
}

// Operators whose results on the CPU have other shapes than on all other devices, the conjugate bit, or are None.
constexpr std::string_view kLikeNoOther[] = {
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    "aten::_native_multi_head_attention",
    "aten::linalg_eig",
    "aten::linalg_eig.out",
    "aten::linalg_eigvals",
    "aten::linalg_eigvals.out",
    "aten::linalg_lu_solve",
    "aten::linalg_lu_solve.out",
    "aten::native_batch_norm.out"};

// Only operators of PyTorch and of this library are deferred. Kernels of other libraries can be Python functions, which
// would run in a stream's thread or at a replay without their author expecting it.
bool is_known(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  const auto* other = std::find(std::begin(kLikeNoOther), std::end(kLikeNoOther), toString(op.operator_name()));
  return other == std::end(kLikeNoOther) && (name.starts_with("aten::") || name.starts_with("backplane::"));
}

at::Tensor meta_of(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  return at::Tensor(at::detail::empty_strided_meta(sizes, strides, dtype));
}

at::Tensor in_format(const at::Tensor& meta, at::MemoryFormat format) {
  const auto sizes = meta.sizes();
  switch (format) {
    case at::MemoryFormat::ChannelsLast:
      return meta_of(sizes, c10::get_channels_last_strides_2d(sizes), meta.scalar_type());
    case at::MemoryFormat::ChannelsLast3d:
      return meta_of(sizes, c10::get_channels_last_strides_3d(sizes), meta.scalar_type());
    default:
      return meta_of(sizes, c10::contiguous_strides(sizes), meta.scalar_type());
  }
}

// Operators whose first result has the memory format of an argument on the CPU, but not in the meta kernel.
struct Format {
  std::string_view name;
  size_t argument;
};
constexpr Format kFormats[] = {{"aten::batch_norm_backward", 1},    {"aten::channel_shuffle", 0},
                               {"aten::max_unpool2d", 0},           {"aten::native_batch_norm_backward", 1},
                               {"aten::native_channel_shuffle", 0}, {"aten::pixel_shuffle", 0},
                               {"aten::reflection_pad2d", 0},       {"aten::reflection_pad2d_backward", 1},
                               {"aten::reflection_pad3d", 0},       {"aten::reflection_pad3d_backward", 1},
                               {"aten::replication_pad2d", 0},      {"aten::replication_pad2d_backward", 1},
                               {"aten::replication_pad3d", 0},      {"aten::replication_pad3d_backward", 1}};

// Operators whose result is contiguous on the CPU, but not in the meta kernel.
constexpr std::string_view kContiguous[] = {"aten::glu_backward", "aten::nonzero_static"};

// The dtype of statistics: float32 if one of the parameters, arguments [first, end), is float32; otherwise the input's.
c10::ScalarType statistics_dtype(const torch::jit::Stack& arguments, size_t first, size_t end) {
  const bool has_floats = std::any_of(
      arguments.begin() + static_cast<std::ptrdiff_t>(first), arguments.begin() + static_cast<std::ptrdiff_t>(end),
      [](const c10::IValue& value) {
        return value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() == at::kFloat;
      });
  return has_floats ? at::kFloat : arguments[0].toTensor().scalar_type();
}

// The memory format of a convolution's results, which depends on the CPU kernel that PyTorch selects. `first`: index of
// the input argument; weight to groups follow it.
at::MemoryFormat convolution_format(
    const torch::jit::Stack& arguments, size_t first, bool is_backward, c10::DeviceIndex index) {
  CpuMirror mirror = CpuMirror::for_later(index); // the selection needs CPU tensors, but does not read their contents
  const auto stand_in = [&](const c10::IValue& value) { return mirror.stand_in(value.toTensor(), /*written=*/false); };
  const at::Tensor input = stand_in(arguments[first]);
  const at::Tensor weight = stand_in(arguments[first + 1]);
  const c10::IValue& bias = arguments[first + 2]; // in the backward: its sizes
  const bool has_bias = bias.isTensor() && bias.toTensor().defined();
  const auto numbers = [&](size_t i) { return arguments[first + i].toSymIntVector(); };
  std::vector<c10::SymInt> bias_sizes;
  if (is_backward && !bias.isNone()) {
    bias_sizes = bias.toSymIntVector();
  }
  const auto backend = at::native::select_conv_backend(
      input, weight, has_bias ? std::optional(stand_in(bias)) : std::nullopt, numbers(3), numbers(4), numbers(5),
      arguments[first + 6].toBool(), numbers(7), arguments[first + 8].toInt(),
      bias_sizes.empty() ? c10::OptionalArrayRef<c10::SymInt>() : c10::OptionalArrayRef<c10::SymInt>(bias_sizes));
  return at::native::_determine_backend_memory_format(input, weight, backend);
}

// Adjusts the meta kernel's results where those of the CPU kernel differ in strides, sizes or dtype.
void correct(
    const DeferredOperator& call,
    c10::DeviceIndex index,
    const torch::jit::Stack& arguments,
    torch::jit::Stack& results) {
  const auto& declared = call.op.schema().arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    if (declared[i].name() == "output_mask") { // gradients that are not needed are undefined
      const auto mask = arguments[i].toBoolList();
      for (size_t result = 0; result < mask.size(); ++result) {
        if (!mask[result]) {
          results[result] = at::Tensor();
        }
      }
    }
  }
  const std::string name = toString(call.kernel.operator_name());
  const auto put_in_format = [&](size_t result, at::MemoryFormat format) {
    const at::Tensor meta = results[result].toTensor();
    if (meta.defined() && (meta.dim() == 4 || meta.dim() == 5 || format == at::MemoryFormat::Contiguous)) {
      results[result] = in_format(meta, format);
    }
  };
  const auto put_statistics = [&](std::optional<int64_t> count, size_t first, size_t end) {
    for (const size_t i : {1, 2}) {
      const at::Tensor meta = results[i].toTensor();
      const auto sizes = count.has_value() ? c10::DimVector{*count} : c10::DimVector(meta.sizes());
      results[i] = meta_of(sizes, c10::contiguous_strides(sizes), statistics_dtype(arguments, first, end));
    }
  };
  const auto* format =
      std::find_if(std::begin(kFormats), std::end(kFormats), [&](const Format& one) { return one.name == name; });
  if (format != std::end(kFormats)) {
    put_in_format(0, arguments[format->argument].toTensor().suggest_memory_format());
  } else if (std::find(std::begin(kContiguous), std::end(kContiguous), name) != std::end(kContiguous)) {
    put_in_format(0, at::MemoryFormat::Contiguous);
  } else if (name == "aten::native_batch_norm" || name == "aten::_native_batch_norm_legit") {
    const bool training = arguments[5].toBool();
    put_statistics(training ? arguments[0].toTensor().size(1) : 0, 1, 5);
  } else if (name == "aten::_batch_norm_with_update") {
    put_statistics(std::nullopt, 1, 5);
  } else if (name == "aten::_native_batch_norm_legit.no_stats" || name == "aten::native_group_norm") {
    put_statistics(std::nullopt, 1, 3);
  } else if (name == "aten::native_layer_norm") {
    put_statistics(std::nullopt, 2, 4);
  } else if (name == "aten::isin.Scalar_Tensor" || name == "aten::isin.Scalar_Tensor_out") { // CPU: zero-dimensional
    results[0].toTensor().unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef(), c10::IntArrayRef());
  } else if (name == "aten::convolution") {
    put_in_format(0, convolution_format(arguments, 0, /*is_backward=*/false, index));
  } else if (name == "aten::convolution_backward") {
    const auto of_kernel = convolution_format(arguments, 1, /*is_backward=*/true, index);
    put_in_format(0, of_kernel);
    put_in_format(1, of_kernel);
  }
}

// Runs the meta kernel, which puts the results on the stack. Returns false if there is none or it rejects the call.
bool ask_meta_kernel(const DeferredOperator& call, c10::DeviceIndex index, Metas& metas, torch::jit::Stack& stack) {
  constexpr c10::DispatchKeySet kMeta(c10::DispatchKey::Meta);
  const auto& asked = call.kernel.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta) ? call.kernel : call.op;
  if (call.structured_meta == nullptr && !asked.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    return false;
  }
  const torch::jit::Stack arguments = stack;
  for (c10::IValue& value : stack) {
    replace_tensors(value, c10::kMeta, [&](const at::Tensor& tensor) { return metas.of(tensor); });
  }
  if (call.generator >= 0) {
    stack[call.generator] = c10::IValue();
  }
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    if (call.structured_meta != nullptr) {
      call.structured_meta->callBoxed(call.op, kMeta, &stack);
    } else {
      asked.redispatchBoxed(kMeta, &stack);
    }
  } catch (std::exception& error) {
    if (!is_refusal(error)) {
      throw;
    }
    return false; // the call is invalid, and the CPU kernel raises the error, or the meta kernel needs values
  }
  correct(call, index, arguments, stack);
  return true;
}

// Gives a written argument the sizes and strides that it has after the call.
void resize_written(const at::Tensor& tensor, const at::Tensor& meta) {
  if (tensor.sizes() != meta.sizes()) {
    tensor.resize_(meta.sizes());
  }
  if (tensor.strides() != meta.strides()) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(), tensor.storage_offset());
  }
}

at::Tensor like(const at::Tensor& meta, c10::DeviceIndex index) {
  check_dtype(index, meta.scalar_type());
  const size_t bytes = at::detail::computeStorageNbytes(meta.sizes(), meta.strides(), meta.itemsize());
  const at::Tensor made = make_tensor(make_storage(index, bytes), meta.dtype(), meta.sizes(), meta.strides());
  made._set_conj(meta.is_conj());
  made._set_neg(meta.is_neg());
  return made;
}

} // namespace

bool can_defer(c10::DeviceIndex index) {
  const Device& owner = device(index);
  return owner.properties().dialect.empty() && owner.properties().host_accessible() && owner.host_sees_memory();
}

bool defers(c10::DeviceIndex index) {
  return (Capture::of(current_stream(index)) != nullptr || device(index).defers_operators()) && can_defer(index);
}

Deferral defer(const DeferredOperator& call, c10::DeviceIndex index, torch::jit::Stack* stack) {
  const auto& returns = call.op.schema().returns();
  if (!is_known(call.op) || !is_known(call.kernel) || !std::all_of(returns.begin(), returns.end(), &is_tensors)) {
    return Deferral::Impossible;
  }
  const size_t count = call.written.size();
  const size_t base = stack->size() - count;
  Metas metas;
  torch::jit::Stack found(stack->begin() + static_cast<std::ptrdiff_t>(base), stack->end());
  if (!ask_meta_kernel(call, index, metas, found)) {
    return Deferral::Refused;
  }
  bool is_view = false;
  for (const c10::IValue& value : found) {
    for_each_tensor(value, [&](const at::Tensor& meta) {
      is_view |= metas.original_of(meta) == nullptr && metas.shares_memory(meta);
    });
  }
  if (is_view) {
    return Deferral::Impossible;
  }

  auto deferred = std::make_shared<DeferredCall>(call);
  CpuMirror mirror = CpuMirror::for_later(index);
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = deferred->arguments.emplace_back((*stack)[base + i]);
    if (call.written[i]) {
      for_each_tensor(value, [&](const at::Tensor& tensor) { resize_written(tensor, metas.of(tensor)); });
    }
    replace_tensors(value, c10::kCPU, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) {
        return tensor;
      }
      if (!tensor.device().is_privateuseone()) {
        at::Tensor copy = tensor.clone(); // the program can change the tensor before the kernel runs
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
          copy.unsafeGetTensorImpl()->set_wrapped_number(true); // asserts that there are no dimensions, even for false
        }
        return copy;
      }
      const at::Tensor stand_in = mirror.stand_in(tensor, call.written[i]);
      if (call.written[i]) {
        deferred->written.emplace_back(stand_in);
      }
      return stand_in;
    });
  }
  for (c10::IValue& value : found) {
    replace_tensors(value, c10::kMeta, [&](const at::Tensor& meta) {
      const at::Tensor* original = meta.defined() ? metas.original_of(meta) : nullptr;
      const at::Tensor result = original != nullptr ? *original : meta.defined() ? like(meta, index) : meta;
      deferred->results.push_back(
          original == nullptr && meta.defined() ? mirror.stand_in(result, /*written=*/true) : at::Tensor());
      return result;
    });
  }

  const auto& places = deferred->results;
  const bool has_places = std::all_of(places.begin(), places.end(), [](const at::Tensor& one) {
    return one.defined() && !one.is_conj() && !one.is_neg();
  });
  const bool may_have_form = has_places && call.structured_meta != nullptr && call.promotion == nullptr;
  if (const auto form = may_have_form ? out_form(call.kernel) : std::nullopt) {
    deferred->kernel = *form;
    for (at::Tensor& place : deferred->results) {
      deferred->written.emplace_back(place);
      deferred->arguments.emplace_back(std::exchange(place, at::Tensor()));
    }
  }

  const Submitter submitter(current_stream(index));
  c10::SmallVector<uint64_t, 2> numbers;
  c10::SmallVector<RandomNumber, 2> random;
  if (call.generator >= 0) {
    const c10::IValue& given = (*stack)[base + call.generator];
    at::Generator generator =
        source_generator(given.isNone() ? std::nullopt : std::optional(given.toGenerator()), index);
    if (submitter.capture() != nullptr) {
      const auto [which, beyond] = submitter.capture()->take_random(generator, kCpuDraw);
      numbers = {0, 0};
      random = {{0, c10::kLong, which, /*is_offset=*/false, 0}, {1, c10::kLong, which, /*is_offset=*/true, beyond}};
    } else {
      std::lock_guard<std::mutex> guard(generator.mutex());
      const auto state = generator.get<PhiloxGenerator>()->advance(kCpuDraw);
      numbers = {state.seed, state.offset};
    }
  }
  submitter.submit(HostCallback{std::move(deferred), {}, numbers}, random);
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), std::make_move_iterator(found.begin()), std::make_move_iterator(found.end()));
  return Deferral::Submitted;
}

} // namespace backplane
