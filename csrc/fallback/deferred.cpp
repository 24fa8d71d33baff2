#include "fallback/deferred.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>

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
#include "fallback/arguments.h"
#include "fallback/cpu_mirror.h"
#include "streams/capture.h"
#include "streams/stream.h"
#include "streams/submit.h"

namespace backplane {
namespace {

// A call of a CPU kernel, with all that it needs. Its numbers are the seed and the offset of a random operator.
class DeferredCall final : public HostFunction {
 public:
  struct Written { // a stand-in, and how it is to look afterwards, too
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
    bool is_as_it_was() const {
      return tensor.sizes() == sizes && tensor.strides() == strides && tensor.const_data_ptr() == memory &&
          tensor.is_conj() == is_conj;
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
  // Of all results, those of lists one after the other: where they go. Not defined: there is no such tensor, or it is a
  // written argument.
  std::vector<at::Tensor> results{};

  const std::string& name() const override {
    return operator_name;
  }
  bool is_operator() const override {
    return true;
  }

  void run(char* const*, const uint64_t* numbers) const override {
    // The thread may be one of the program's, in any of PyTorch's modes.
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
      check(one.is_as_it_was(), one.tensor);
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
        is_as_foretold, operator_name, " has a result that is not what PyTorch's meta kernel says of it (",
        found.defined() ? c10::str(found.scalar_type(), found.sizes()) : "none", "), so it cannot be done later");
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

// Of a structured operator the overload that puts all results where further arguments say: "aten::add.out" for
// "aten::add.Tensor". Not of losses, which resize them on their way.
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
  if (found == overloads->end() || has_none) {
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
      return one.type()->kind() == c10::TypeKind::TensorType && one.alias_info() != nullptr && one.alias_info()->isWrite();
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

// The arguments of a call as tensors of the meta device; each of the call's has one.
class Metas {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || (!tensor.device().is_privateuseone() && tensor.dim() == 0)) {
      return tensor; // a number of the CPU's has a value
    }
    for (const auto& [original, meta] : pairs_) {
      if (original.is_same(tensor)) {
        return meta;
      }
    }
    c10::Storage& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) { // what shares memory goes on sharing it: meta kernels look at that
      storage = c10::Storage(
          c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::GetAllocator(c10::kMeta), /*resizable=*/true);
    }
    const auto meta = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
    meta.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    meta._set_conj(tensor.is_conj());
    meta._set_neg(tensor.is_neg());
    pairs_.emplace_back(tensor, meta);
    return meta;
  }

  // The call's tensor for its meta one; nullptr: it is none of the call's.
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
  return fits && (result.alias_info() == nullptr || result.alias_info()->isWrite()); // else it is a view
}

// Of some of PyTorch's operators the CPU has results of other shapes than all other devices, or lazily conjugated ones.
constexpr std::string_view kLikeNoOther[] = {
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    "aten::linalg_eig",
    "aten::linalg_eig.out",
    "aten::linalg_eigvals",
    "aten::linalg_eigvals.out",
    "aten::linalg_lu_solve",
    "aten::linalg_lu_solve.out",
    "aten::native_batch_norm.out"};

// Kernels of others may be Python's, which streams and graphs would call without asking.
bool is_known(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  const auto* other = std::find(std::begin(kLikeNoOther), std::end(kLikeNoOther), toString(op.operator_name()));
  return other == std::end(kLikeNoOther) && (name.starts_with("aten::") || name.starts_with("backplane::"));
}

at::Tensor meta_of(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  return at::Tensor(at::detail::empty_strided_meta(sizes, strides, dtype));
}

// Where the CPU's results look otherwise than the meta kernel says.
void correct(const DeferredOperator& call, const torch::jit::Stack& arguments, torch::jit::Stack& results) {
  const std::string name = toString(call.kernel.operator_name());
  if (name == "aten::native_batch_norm" || name == "aten::_native_batch_norm_legit") {
    const at::Tensor& input = arguments[0].toTensor();
    const auto is_float = [](const c10::IValue& value) {
      return value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() == at::kFloat;
    };
    const bool has_floats = std::any_of(arguments.begin() + 1, arguments.begin() + 5, is_float);
    const auto dtype = has_floats ? at::kFloat : input.scalar_type();
    const int64_t count = arguments[5].toBool() ? input.size(1) : 0; // in training
    for (const size_t i : {1, 2}) {
      results[i] = meta_of({count}, {1}, dtype);
    }
  } else if (name == "backplane::convolution") {
    const at::Tensor meta = results[0].toTensor();
    for (const auto format : {at::MemoryFormat::ChannelsLast, at::MemoryFormat::ChannelsLast3d}) {
      const auto has_format = [&](const c10::IValue& value) { return value.toTensor().suggest_memory_format() == format; };
      if (meta.dim() == (format == at::MemoryFormat::ChannelsLast ? 4 : 5) &&
          (has_format(arguments[0]) || has_format(arguments[1]))) {
        const auto strides = format == at::MemoryFormat::ChannelsLast ? c10::get_channels_last_strides_2d(meta.sizes())
                                                                      : c10::get_channels_last_strides_3d(meta.sizes());
        results[0] = meta_of(meta.sizes(), strides, meta.scalar_type());
      }
    }
  }
}

// Whether the meta kernel says what the results are; it leaves them on the stack.
bool ask_meta_kernel(const DeferredOperator& call, Metas& metas, torch::jit::Stack& stack) {
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
    correct(call, arguments, stack);
    return true;
  } catch (const std::exception&) {
    return false; // it refuses the call, which is the CPU kernel's to say, or it would need values
  }
}

// Gives what is written the sizes that it will have.
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
  if (!ask_meta_kernel(call, metas, found)) {
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
        at::Tensor copy = tensor.clone(); // as it is now
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
          copy.unsafeGetTensorImpl()->set_wrapped_number(true); // which a tensor with dimensions may not even be told not to be
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
    at::Generator generator = source_generator(given.isNone() ? std::nullopt : std::optional(given.toGenerator()), index);
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
