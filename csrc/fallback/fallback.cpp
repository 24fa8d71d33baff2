#include "fallback/fallback.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/flat_hash_map.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "c10/generator.h"
#include "c10/refusals.h"
#include "devices/operator_scope.h"
#include "devices/profile.h"
#include "fallback/arguments.h"
#include "fallback/cpu_memory.h"
#include "fallback/cpu_mirror.h"
#include "fallback/deferred.h"
#include "fallback/dtype_promotion.h"
#include "fallback/structured_meta.h"
#include "streams/capture.h"
#include "streams/stream.h"

namespace backplane {

bool is_advanced_indexing(const c10::FunctionSchema& schema) {
  static constexpr std::string_view kNames[] = {"aten::index",
                                                "aten::index_put",
                                                "aten::index_put_",
                                                "aten::_index_put_impl",
                                                "aten::_index_put_impl_",
                                                "aten::_unsafe_index",
                                                "aten::_unsafe_index_put"};
  return std::find(std::begin(kNames), std::end(kNames), schema.name()) != std::end(kNames);
}
namespace {

std::atomic<FallbackPolicy> policy{FallbackPolicy::Warn};

// Facts about an operator, computed at its first fallback.
struct OperatorFacts {
  std::string name;
  c10::SmallVector<bool, 16> written; // per argument
  int generator = -1; // index of the Generator argument
  const PromotionRule* promotion; // dtypes that its CPU kernel lacks
  const c10::KernelFunction* structured_meta; // nullptr: none
  bool indexes = false; // an indexing operator: its `indices` can be on the CPU or on the device of `self`
  c10::SmallVector<bool, 16> may_be_scalar; // per argument: zero-dimensional CPU tensors are allowed
  c10::SmallVector<bool, 16> from_anywhere; // per argument: CPU tensors of any shape are allowed, as with CUDA
  std::atomic<uint64_t> calls{0};
  std::atomic<bool> warned{false};

  explicit OperatorFacts(const c10::OperatorHandle& op)
      : name(toString(op.operator_name())),
        promotion(promotion_rule(op)),
        structured_meta(backplane::structured_meta(name)) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      written.push_back(is_written(op.schema(), arguments[i]));
      const auto& type = *arguments[i].type();
      const auto* optional = type.castRaw<c10::OptionalType>();
      const auto kind = optional != nullptr ? optional->getElementType()->kind() : type.kind();
      if (kind == c10::TypeKind::GeneratorType) {
        generator = static_cast<int>(i);
      }
    }
    indexes = is_advanced_indexing(op.schema());
    const bool has_lengths =
        op.schema().name() == "aten::_ctc_loss" || op.schema().name() == "aten::_ctc_loss_backward";
    for (const auto& argument : arguments) {
      may_be_scalar.push_back(!written[may_be_scalar.size()] && !(indexes && argument.name() == "self"));
      from_anywhere.push_back(
          (indexes && argument.name() == "indices") ||
          (has_lengths && (argument.name() == "input_lengths" || argument.name() == "target_lengths")));
    }
  }
};

class FactsTable {
 public:
  FactsTable() {
    // Never freed, like the table.
    static_cast<void>(new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>(*this))));
  }

  // A thread-local cache keeps the lock out of the hot path.
  OperatorFacts& of(const c10::OperatorHandle& op) {
    struct Cache {
      ska::flat_hash_map<const void*, OperatorFacts*> facts;
      uint64_t forgotten = 0;
    };
    static thread_local Cache cache;
    if (const uint64_t forgotten = forgotten_.load(std::memory_order_acquire);
        C10_UNLIKELY(cache.forgotten != forgotten)) {
      cache = {{}, forgotten};
    }
    const void* key = &op.schema();
    auto found = cache.facts.find(key);
    if (C10_LIKELY(found != cache.facts.end())) {
      return *found->second;
    }
    std::lock_guard<std::mutex> guard(lock_);
    auto& facts = facts_[key];
    if (facts == nullptr) {
      facts = std::make_unique<OperatorFacts>(op);
    }
    cache.facts[key] = facts.get();
    return *facts;
  }

  template <typename Function>
  void for_each(const Function& function) {
    std::lock_guard<std::mutex> guard(lock_);
    for (auto& [key, facts] : facts_) {
      function(*facts);
    }
  }

 private:
  // The operators of a torch.library.Library are destroyed with it, and other schemas can then reuse their addresses.
  class Listener final : public c10::OpRegistrationListener {
   public:
    explicit Listener(FactsTable& table) : table_(table) {}
    void onOperatorRegistered(const c10::OperatorHandle&) override {}
    void onOperatorDeregistered(const c10::OperatorHandle& op) override {
      table_.forget(&op.schema());
    }

   private:
    FactsTable& table_;
  };

  void forget(const void* key) {
    std::lock_guard<std::mutex> guard(lock_);
    const auto found = facts_.find(key);
    if (found != facts_.end()) {
      static_cast<void>(found->second.release()); // leaked, because another thread may still use it
      facts_.erase(found);
      forgotten_.fetch_add(1, std::memory_order_release);
    }
  }

  std::mutex lock_;
  ska::flat_hash_map<const void*, std::unique_ptr<OperatorFacts>> facts_; // by the schema's address
  std::atomic<uint64_t> forgotten_{0}; // number of destroyed operators
};

FactsTable& facts_table() {
  static auto* table = new FactsTable;
  return *table;
}

// Finds the common bp device of the arguments; -1 if there is none.
class CommonDevice {
 public:
  explicit CommonDevice(bool indexes) : indexes_(indexes) {}

  // `may_be_scalar`: accept a zero-dimensional CPU tensor. False for arguments that the operator writes or indexes.
  void see(const at::Tensor& tensor, bool from_anywhere, bool may_be_scalar) {
    seen_ = true;
    const auto device = tensor.device();
    if (device.is_privateuseone()) {
      if (index_ < 0) {
        index_ = device.index();
        is_of_index_ = from_anywhere;
      } else if (index_ != device.index()) {
        check_index(from_anywhere, c10::Device(c10::kPrivateUse1, index_));
        refuse(c10::Device(c10::kPrivateUse1, index_), device);
      }
    } else if (!(may_be_scalar && tensor.dim() == 0) && !from_anywhere && !foreign_.has_value()) {
      foreign_ = device;
    }
  }

  void see(c10::Device device) {
    if (device.is_privateuseone() && index_ < 0) {
      index_ = checked_index(device.index());
    }
  }

  // Whether only CPU tensors were seen: then the call was dispatched to bp because of its generator.
  bool is_cpu() const {
    return index_ < 0 && seen_;
  }

  c10::DeviceIndex index() const {
    if (index_ >= 0 && foreign_.has_value()) {
      check_index(is_of_index_, *foreign_);
      refuse(c10::Device(c10::kPrivateUse1, index_), *foreign_);
    }
    return index_;
  }

 private:
  void check_index(bool is_on_another_device, c10::Device indexed) const {
    TORCH_CHECK(
        !indexes_ || !is_on_another_device,
        "indices should be either on cpu or on the same device as the indexed tensor (", indexed, ")");
  }

  [[noreturn]] static void refuse(c10::Device one, c10::Device other) {
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other,
        "!");
  }

  bool indexes_;
  bool seen_ = false;
  bool is_of_index_ = false; // index_ is the device of a from_anywhere argument
  c10::DeviceIndex index_ = -1;
  std::optional<c10::Device> foreign_; // device of a non-bp tensor that is not allowed
};

at::Tensor stand_in(CpuMirror& mirror, const at::Tensor& tensor, bool written) {
  if (!tensor.defined() || !tensor.device().is_privateuseone()) {
    return tensor;
  }
  return mirror.stand_in(tensor, written);
}

at::Tensor bp_result(CpuMirror& mirror, const OperatorFacts& facts, at::Tensor tensor) {
  if (tensor.defined()) {
    if (const char* kind = unsupported_kind(tensor)) {
      refuse_kind(facts.name, kind);
    }
  }
  return mirror.result(std::move(tensor));
}

void replace_result(CpuMirror& mirror, const OperatorFacts& facts, c10::IValue& value) {
  if (value.isTensor()) {
    value = bp_result(mirror, facts, std::move(value).toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> replaced;
    for (at::Tensor& tensor : std::move(value).toTensorVector()) {
      replaced.push_back(bp_result(mirror, facts, std::move(tensor)));
    }
    value = std::move(replaced);
  } else if (is_nested(value)) {
    value = with_elements_replaced(value, [&](c10::IValue element) {
      replace_result(mirror, facts, element);
      return element;
    });
  }
}

void apply_policy(OperatorFacts& facts, const CpuMirror& mirror) {
  if (!mirror.copies() || policy.load(std::memory_order_relaxed) == FallbackPolicy::Silent) {
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      policy.load() != FallbackPolicy::Error, facts.name, " has no kernel for bp:", static_cast<int>(mirror.index()),
      " (", device(mirror.index()).properties().name,
      "), and TORCH_BACKPLANE_FALLBACK=error forbids running it on the CPU");
  if (!facts.warned.exchange(true)) {
    TORCH_WARN(
        facts.name, " has no kernel for bp:", static_cast<int>(mirror.index()), " (",
        device(mirror.index()).properties().name,
        ") and runs on the CPU, which copies its tensors to the CPU and back. Set TORCH_BACKPLANE_FALLBACK=silent to "
        "hide this warning, or TORCH_BACKPLANE_FALLBACK=error to raise an error instead.");
  }
}

} // namespace

void run_on_cpu(const c10::OperatorHandle& op, const c10::OperatorHandle& kernel, torch::jit::Stack* stack) {
  OperatorFacts& facts = facts_table().of(op);
  const OperatorScope scope(facts.name);
  const size_t count = facts.written.size();
  auto arguments = torch::jit::last(*stack, count);

  CommonDevice common(facts.indexes);
  for (size_t i = 0; i < count; ++i) {
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      common.see(tensor, facts.from_anywhere[i], facts.may_be_scalar[i]);
    });
  }
  for (const c10::IValue& value : arguments) {
    if (value.isDevice()) {
      common.see(value.toDevice());
    }
  }
  const auto index = common.index() >= 0 ? common.index() : current_device();

  TORCH_CHECK_NOT_IMPLEMENTED(
      kernel.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "bp has no kernel for ", facts.name,
      ", and there is no CPU kernel to fall back to");
  TORCH_CHECK(
      facts.generator < 0 || !common.is_cpu(), "Expected a 'cpu' device type for generator but found '",
      c10::Device(c10::kPrivateUse1).type(), "'");
  if (C10_UNLIKELY(defers(index))) {
    const Deferral deferral = defer(
        {op, kernel, facts.name, facts.written, facts.generator, facts.promotion, facts.structured_meta}, index, stack);
    if (deferral == Deferral::Submitted) {
      facts.calls.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    if (deferral == Deferral::Refused && Capture::of(current_stream(index)) != nullptr) {
      raise_cpu_error(kernel, arguments); // in a capture the CPU kernel cannot run below to raise it
    }
  }
  CpuMirror mirror(index);
  apply_policy(facts, mirror);
  facts.calls.fetch_add(1, std::memory_order_relaxed);

  const size_t base = stack->size() - count;
  for (size_t i = 0; i < count; ++i) {
    replace_tensors((*stack)[base + i], c10::kCPU, [&](const at::Tensor& tensor) {
      return stand_in(mirror, tensor, facts.written[i]);
    });
  }
  if (facts.generator >= 0) {
    c10::IValue& value = (*stack)[base + facts.generator];
    at::Generator source = source_generator(value.isNone() ? std::nullopt : std::optional(value.toGenerator()), index);
    std::lock_guard<std::mutex> guard(source.mutex());
    value = cpu_generator(source.get<PhiloxGenerator>()->advance(kCpuDraw));
  }
  mirror.load();
  {
    at::AutoDispatchBelowADInplaceOrView below;
    std::optional<CpuMemoryScope> scope;
    std::optional<ProfiledCommand> profiled;
    if (!mirror.copies()) {
      scope.emplace(index);
      profiled.emplace(Activity::Kind::Operator, index, stream_identity(current_stream(index)), facts.name);
    }
    if (C10_UNLIKELY(facts.promotion != nullptr)) {
      run_promoted(*facts.promotion, kernel, stack);
    } else {
      kernel.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
  }
  mirror.finish();
  const size_t results = op.schema().returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    replace_result(mirror, facts, (*stack)[i]);
  }
}

void cpu_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_cpu(op, op, stack);
}

namespace {

size_t spanned_bytes(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

// A CPU tensor of zeros with the same sizes and strides. An expanded zero would have other strides, and kernels refuse
// to write to it. With calloc, a large tensor takes no physical memory before it is touched, and a kernel that rejects
// its arguments does not touch them.
at::Tensor zeros_on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_privateuseone()) {
    return tensor;
  }
  const size_t bytes = spanned_bytes(tensor);
  void* zeros = std::calloc(std::max<size_t>(bytes, 1), 1);
  TORCH_CHECK(zeros != nullptr, "cannot allocate ", bytes, " bytes of host memory");
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), static_cast<int64_t>(bytes), c10::DataPtr(zeros, zeros, &std::free, c10::kCPU),
      c10::GetCPUAllocator(), /*resizable=*/true); // kernels resize out= tensors of another size
  at::Tensor found = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return found;
}

} // namespace

void raise_cpu_error(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, size_t max_bytes) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
    return;
  }
  const OperatorFacts& facts = facts_table().of(op);
  CommonDevice common(facts.indexes); // throws PyTorch's error for tensors on two devices, which precedes all others
  size_t bytes = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      common.see(tensor, facts.from_anywhere[i], facts.may_be_scalar[i]);
      bytes += tensor.device().is_privateuseone() ? spanned_bytes(tensor) : 0;
    });
  }
  if (bytes > max_bytes) {
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  torch::jit::Stack stack;
  for (const c10::IValue& value : arguments) {
    stack.push_back(value);
    replace_tensors(stack.back(), c10::kCPU, &zeros_on_cpu);
  }
  if (facts.generator >= 0) {
    stack[facts.generator] = at::detail::createCPUGenerator(); // not the default generator, which would advance
  }
  try {
    if (facts.promotion != nullptr) {
      run_promoted(*facts.promotion, op, &stack);
    } else {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    }
  } catch (const c10::Error& error) {
    if (std::string_view(error.what_without_backtrace()).find("ZeroDivisionError") == std::string_view::npos) {
      throw;
    } // ignored: caused by the zeros
  }
}

void set_fallback_policy(FallbackPolicy chosen) {
  policy.store(chosen);
}

FallbackPolicy fallback_policy() {
  return policy.load();
}

std::vector<std::pair<std::string, uint64_t>> fallback_counts() {
  std::vector<std::pair<std::string, uint64_t>> counts;
  facts_table().for_each([&](const OperatorFacts& facts) {
    if (const auto calls = facts.calls.load()) {
      counts.emplace_back(facts.name, calls);
    }
  });
  return counts;
}

void reset_fallback_counts() {
  facts_table().for_each([](OperatorFacts& facts) { facts.calls.store(0); });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>());
}

namespace {

// Operators for which the fallback is registered explicitly, because PyTorch would otherwise use their composite
// kernel.
class DirectFallbacks {
 public:
  DirectFallbacks() {
    // These only allocate the result and call the out= variant. The fallback saves two passes through the dispatcher.
    fall_back_instead_of(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    // Layer norm, group norm, addr and others, whose composite kernels round differently from the CPU kernels.
    fall_back_instead_of(c10::DispatchKey::CompositeExplicitAutograd);
    // These composite kernels call CPU code regardless of the device, or require a device that they know.
    fall_back("conj_physical_");
    fall_back("mode.values");
    for (const char* name : {"ldexp.Tensor", "ldexp.out", "ldexp_"}) {
      fall_back(name);
    }
  }

 private:
  void fall_back(const char* name) {
    names.insert(name);
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>());
  }

  // Registers the fallback for every operator with a kernel for this composite key and for the CPU, but none for bp.
  void fall_back_instead_of(c10::DispatchKey composite) {
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getRegistrationsForDispatchKey(composite)) {
      const auto op = dispatcher.findOp(name);
      if (name.getNamespace() == "aten" && op.has_value() && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
          !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
        fall_back(toString(name).substr(sizeof("aten::") - 1).c_str());
      }
    }
  }

  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__};

 public:
  std::set<std::string> names; // without the namespace
};

const DirectFallbacks& direct_fallbacks() {
  static const auto* registrations = new DirectFallbacks;
  return *registrations;
}

} // namespace

void register_direct_fallbacks() {
  direct_fallbacks();
}

bool has_direct_fallback(const c10::OperatorHandle& op) {
  const std::string name = toString(op.operator_name());
  return name.starts_with("aten::") && direct_fallbacks().names.contains(name.substr(sizeof("aten::") - 1));
}

} // namespace backplane
