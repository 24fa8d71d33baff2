#include "plans/planned_operator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <utility>

#include "devices/interrupts.h"
#include "devices/operator_scope.h"
#include "devices/profile.h"
#include "fallback/arguments.h"
#include "fallback/fallback.h"
#include "plans/recorder.h"
#include "streams/capture.h"
#include "streams/stream.h"

namespace backplane {
namespace {

// If the CPU kernel unexpectedly accepts a call that the planner refused, it computes on zeros. Not tried for arguments
// of more bytes than this.
constexpr size_t kMaxZeros = size_t{64} << 20;

std::atomic<PlanMode> mode{PlanMode::On};
std::atomic<bool> launch_blocking{false};
thread_local std::vector<PlanEvent>* listener = nullptr;

// The bp device of the first argument that has one; -1 if none has.
c10::DeviceIndex device_of(c10::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& value : arguments) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined() && tensor.device().is_privateuseone()) {
        return tensor.device().index();
      }
    } else if (value.isList()) {
      const auto index = device_of(value.toListRef());
      if (index >= 0) {
        return index;
      }
    } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
      return checked_index(value.toDevice().index());
    }
  }
  return -1;
}

// Materializes copy-on-write tensors.
void own_memory(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.device().is_privateuseone() && tensor.has_storage()) {
      tensor.storage().unsafeGetStorageImpl()->mutable_data();
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      own_memory(element);
    }
  }
}

bool is_foreach(const c10::FunctionSchema& schema) {
  return schema.name().starts_with("aten::_foreach_");
}

// The lists that torch._foreach_*_ writes. Their kernels must increment the tensors' version counters for autograd. For
// operators that write single tensors, and for fused optimizers, PyTorch does this in layers above.
std::vector<size_t> written_lists(const c10::FunctionSchema& schema) {
  std::vector<size_t> found;
  for (size_t i = 0; is_foreach(schema) && i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (argument.type()->castRaw<c10::ListType>() != nullptr && is_written(schema, argument)) {
      found.push_back(i);
    }
  }
  return found;
}

// Whether the argument's type is SymInt, possibly optional or in a list.
bool is_size(const c10::Argument& argument) {
  const c10::Type* type = argument.real_type().get();
  if (const auto* optional = type->castRaw<c10::OptionalType>()) {
    type = optional->getElementType().get();
  }
  if (const auto* list = type->castRaw<c10::ListType>()) {
    type = list->getElementType().get();
  }
  return type->kind() == c10::TypeKind::SymIntType;
}

void replace(torch::jit::Stack* stack, size_t count, c10::SmallVectorImpl<c10::IValue>& results) {
  torch::jit::drop(*stack, count);
  for (c10::IValue& result : results) {
    stack->push_back(std::move(result));
  }
}

// The boxed kernel registered with PyTorch. The PlannedOperator is never freed.
class Registered final : public c10::OperatorKernel {
 public:
  explicit Registered(PlannedOperator& planned) : planned_(planned) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    planned_.run(stack);
  }

 private:
  PlannedOperator& planned_;
};

struct Table {
  std::mutex lock;
  std::map<std::string, std::unique_ptr<PlannedOperator>> operators;
  std::map<std::string, torch::Library> libraries; // by namespace
};

Table& table() {
  static auto* instance = new Table;
  return *instance;
}

// Suppresses warnings. PyTorch warns if a kernel overrides another; here a planner's kernel overrides one of this
// library's C++ kernels on purpose, and calls it on devices without kernels.
class Silence final : public c10::WarningHandler {
 public:
  Silence() : guard_(this) {}
  void process(const c10::Warning&) override {}

 private:
  c10::WarningUtils::WarningHandlerGuard guard_;
};

// Throws the CPU kernel's error, if there is one. Warnings are suppressed: without an error, the call runs again in
// the fallback, which warns.
void try_for_error(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, size_t max_bytes = SIZE_MAX) {
  const Silence silence;
  raise_cpu_error(op, arguments, max_bytes);
}

// Planners run like kernels below autograd: without autograd, autocast and Python modes.
struct BelowEverything {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard others{
      c10::autocast_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::Python) |
      c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot)};
};

// The position of the argument `indices` of an indexing operator.
std::optional<int> indices_of(const c10::FunctionSchema& schema) {
  return is_advanced_indexing(schema) ? schema.argumentIndexWithName("indices") : std::nullopt;
}

bool is_on_cpu(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu();
}

// Copies the CPU tensors among indices to the device.
void move_indices(c10::IValue& indices, c10::DeviceIndex index) {
  const auto given = indices.toListRef();
  if (std::none_of(given.begin(), given.end(), is_on_cpu)) {
    return;
  }
  c10::List<std::optional<at::Tensor>> moved;
  for (const c10::IValue& element : given) {
    moved.push_back(
        is_on_cpu(element) ? element.toTensor().to(c10::Device(c10::kPrivateUse1, index))
                           : element.toOptional<at::Tensor>());
  }
  indices = std::move(moved);
}

} // namespace

void set_plan_mode(PlanMode chosen) {
  mode = chosen;
}

PlanMode plan_mode() {
  return mode;
}

void set_launch_blocking(bool blocking) {
  launch_blocking = blocking;
}

std::vector<PlanEvent>* listen(std::vector<PlanEvent>* events) {
  return std::exchange(listener, events);
}

PlannedOperator::PlannedOperator(const c10::OperatorHandle& op)
    : op_(op),
      name_(toString(op.operator_name())),
      written_lists_(written_lists(op.schema())),
      indices_(indices_of(op.schema())),
      otherwise_(op.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
  // PyTorch's composite kernels of foreach operators loop over the lists. Use them where the CPU has no kernel, as the
  // CPU does. Other composite kernels differ from the CPU's kernels in error messages and rounding.
  const bool composed = is_foreach(op.schema()) && !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
  const bool ours = op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) && !has_direct_fallback(op);
  falls_back_ = !composed && !ours;
  outcome_otherwise_ = composed ? "composed of other operators"
      : ours                    ? "ran without kernels of the device"
                                : "ran on the CPU";
}

void PlannedOperator::run_otherwise(torch::jit::Stack* stack) {
  if (falls_back_) {
    cpu_fallback(op_, stack);
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  otherwise_.callBoxed(op_, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
}

void PlannedOperator::set_planner(
    std::unique_ptr<Planner> planner,
    const std::vector<std::string>& passed_through,
    const std::vector<std::string>& by_value,
    const std::vector<std::string>& sizes,
    const std::vector<NumberCheck>& checks) {
  auto declaration = std::make_unique<Declaration>();
  const auto& arguments = op_.schema().arguments();
  for (const auto& argument : arguments) {
    ArgumentFacts facts;
    facts.written = is_written(op_.schema(), argument);
    if (facts.written) {
      declaration->written.push_back(declaration->facts.size());
    }
    const auto* optional = argument.type()->castRaw<c10::OptionalType>();
    const auto& type = optional != nullptr ? *optional->getElementType() : *argument.type();
    const auto* list = type.castRaw<c10::ListType>();
    const auto kind = list != nullptr ? list->getElementType()->kind() : type.kind();
    facts.passed_through = kind == c10::TypeKind::NumberType;
    facts.is_generator = kind == c10::TypeKind::GeneratorType;
    facts.is_size = is_size(argument);
    declaration->facts.push_back(facts);
  }
  const auto mark = [&](const std::vector<std::string>& names, bool ArgumentFacts::* fact, bool holds) {
    for (const std::string& name : names) {
      const auto found =
          std::find_if(arguments.begin(), arguments.end(), [&](const auto& one) { return one.name() == name; });
      TORCH_CHECK_VALUE(found != arguments.end(), name_, " has no argument ", name);
      declaration->facts[found - arguments.begin()].*fact = holds;
    }
  };
  mark(passed_through, &ArgumentFacts::passed_through, true);
  mark(by_value, &ArgumentFacts::passed_through, false);
  mark(sizes, &ArgumentFacts::is_size, true);
  declaration->checks = NumberChecks(op_.schema(), checks);
  declaration->planner = std::move(planner);
  declaration_ = declaration.release();
}

void PlannedOperator::run(torch::jit::Stack* stack) {
  const OperatorScope scope(name_);
  const bool waits = launch_blocking.load(std::memory_order_relaxed) && Recorder::active() == nullptr;
  if (C10_LIKELY(written_lists_.empty() && !waits)) {
    answer(stack);
    return;
  }
  const auto arguments = torch::jit::last(*stack, op_.schema().arguments().size());
  const auto named = device_of(arguments);
  c10::SmallVector<at::Tensor, 4> changed;
  for (const size_t i : written_lists_) {
    for (const c10::IValue& element : arguments[i].toListRef()) {
      changed.push_back(element.toTensor());
    }
  }
  answer(stack);
  for (const at::Tensor& tensor : changed) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
  const c10::Stream stream = current_stream(named >= 0 ? named : current_device());
  if (waits && Capture::of(stream) == nullptr) {
    synchronize_stream(stream);
  }
}

PlannedCall PlannedOperator::new_call(c10::DeviceIndex device) const {
  PlannedCall call{device, {}, {}, {}, nullptr, &name_, std::nullopt};
  if (reads_tf32_.load(std::memory_order_relaxed)) {
    call.tf32 = float32_in_tf32();
  }
  return call;
}

PlannerResult PlannedOperator::call_planner(
    const Declaration& declaration, c10::ArrayRef<c10::IValue> arguments, PlannedCall& call, FallbackReason& left) {
  auto results = declaration.planner->call(op_.schema(), arguments, declaration.facts, call, left);
  if (call.tf32.has_value()) {
    reads_tf32_.store(true, std::memory_order_relaxed);
  }
  return results;
}

void PlannedOperator::answer(torch::jit::Stack* stack) {
  const Declaration* declaration = declaration_.load(std::memory_order_acquire);
  if (C10_UNLIKELY(declaration == nullptr)) {
    run_otherwise(stack);
    return;
  }
  const auto& facts = declaration->facts;
  const size_t count = facts.size();
  const auto arguments = torch::jit::last(*stack, count);
  auto index = device_of(arguments);
  index = index >= 0 ? index : current_device();
  if (device(index).properties().dialect.empty()) {
    run_otherwise(stack);
    return;
  }
  if (C10_UNLIKELY(indices_.has_value())) {
    if (is_on_cpu(arguments[0])) { // zero-dimensional ones would count as numbers below
      run_otherwise(stack); // refuses it
      return;
    }
    move_indices(*(stack->end() - count + *indices_), index);
  }
  // Must come before addresses are read: it changes the addresses of all arguments that share a written storage.
  for (const size_t i : declaration->written) {
    own_memory(arguments[i]);
  }
  PlannedCall call = new_call(index);
  Signature signature;
  const char* problem = read_call(arguments, facts, call, signature);
  if (C10_UNLIKELY(problem == nullptr && !declaration->checks.hold(arguments))) {
    try_for_error(op_, arguments);
    problem = "a number does not meet the checks of the operator's declaration";
  }
  if (C10_UNLIKELY(problem != nullptr)) {
    cache_.count_unplannable();
    if (listener != nullptr) {
      listener->push_back({name_, describe(arguments, facts), c10::str(outcome_otherwise_, ": ", problem), ""});
    }
    run_otherwise(stack);
    return;
  }
  if (Recorder::active() == nullptr) {
    if (const auto captured = Capture::of(current_stream(index)); C10_UNLIKELY(captured != nullptr)) {
      capture(*captured, *declaration, stack, call, signature);
      return;
    }
  }
  if (Recorder::active() != nullptr || mode.load(std::memory_order_relaxed) == PlanMode::Off) {
    plan(*declaration, stack, call, /*record=*/false);
    return;
  }
  const auto known = cache_.find(signature);
  if (known == nullptr) {
    if (const auto made = cache_.find_dynamic_shape(signature)) {
      if (C10_UNLIKELY(mode.load(std::memory_order_relaxed) == PlanMode::Check)) {
        check(*declaration, arguments, call, *made);
      }
      if (C10_UNLIKELY(listener != nullptr)) {
        listener->push_back({name_, describe(arguments, facts), "replayed for any shape", describe(*made)});
      }
      auto results = replay(*made, call);
      replace(stack, count, results);
      return;
    }
    if (!cache_.is_to_be_recorded(signature)) {
      plan(*declaration, stack, call, /*record=*/false);
      return;
    }
    const bool another = cache_.is_to_be_traced(signature);
    std::optional<DynamicShapePlan> traced;
    std::string reason;
    if (another) { // trace before running the planner, which may write to its arguments
      traced = trace(*declaration, arguments, call.device, reason);
    }
    const bool has_tf32 = call.tf32.has_value();
    auto fresh = plan(*declaration, stack, call, /*record=*/true);
    if (!has_tf32 && call.tf32.has_value()) {
      add_tf32(signature, *call.tf32);
    }
    cache_.insert_into_class(signature, fresh, std::move(traced), std::move(reason));
    cache_.insert(std::move(signature), std::move(fresh));
    return;
  }
  if (C10_UNLIKELY(!known->unplannable.empty())) {
    cache_.count_unplannable();
    if (known->falls_back) {
      if (listener != nullptr) {
        listener->push_back({name_, describe(arguments, facts), outcome_otherwise_, describe(*known)});
      }
      run_otherwise(stack);
    } else {
      plan(*declaration, stack, call, /*record=*/false);
    }
    return;
  }
  if (C10_UNLIKELY(mode.load(std::memory_order_relaxed) == PlanMode::Check)) {
    check(*declaration, arguments, call, *known);
  }
  if (C10_UNLIKELY(listener != nullptr)) {
    listener->push_back({name_, describe(arguments, facts), "replayed", describe(*known)});
  }
  auto results = replay(*known, call);
  replace(stack, count, results);
}

std::shared_ptr<const Plan> PlannedOperator::plan(
    const Declaration& declaration, torch::jit::Stack* stack, PlannedCall& call, bool record) {
  const auto& facts = declaration.facts;
  const size_t count = facts.size();
  const auto arguments = torch::jit::last(*stack, count);
  FallbackReason left;
  std::string described = listener != nullptr ? describe(arguments, facts) : "";
  auto recorded = std::make_shared<Plan>();
  PlannerResult results;
  {
    BelowEverything guard;
    std::optional<Recorder> recorder;
    if (record) {
      recorder.emplace(call, /*dry=*/false);
    }
    const ProfiledRange profiled(Activity::Kind::Planning, "plan", name_);
    results = call_planner(declaration, arguments, call, left);
    if (results.has_value() && record) {
      *recorded = recorder->finish(*results);
    }
  }
  if (left.refused && falls_back_) {
    try_for_error(op_, arguments, kMaxZeros);
  }
  if (!results.has_value()) {
    recorded->unplannable = left.reason;
    recorded->falls_back = true;
  }
  cache_.count_planned(*recorded);
  if (listener != nullptr) {
    const char* outcome = !results.has_value() ? outcome_otherwise_ : record ? "planned" : "ran without recording";
    listener->push_back(
        {name_, std::move(described), outcome, !results.has_value() || record ? describe(*recorded) : ""});
  }
  if (results.has_value()) {
    c10::SmallVector<c10::IValue, 2> values(results->begin(), results->end());
    replace(stack, count, values);
  } else {
    run_otherwise(stack);
  }
  return recorded;
}

std::optional<DynamicShapePlan> PlannedOperator::trace(
    const Declaration& declaration,
    c10::ArrayRef<c10::IValue> arguments,
    c10::DeviceIndex device,
    std::string& reason) {
  const auto& facts = declaration.facts;
  PlannedCall call = new_call(device);
  Signature signature;
  read_call(arguments, facts, call, signature);
  at::AutoDispatchBelowADInplaceOrView autograd;
  // A trace is a Python dispatch mode, and those are excluded while another planner runs: re-enable them.
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet modes{c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot};
  const c10::impl::ForceDispatchKeyGuard keys{
      local.included_, (local.excluded_ - modes) | c10::autocast_dispatch_keyset};
  const ProfiledRange profiled(Activity::Kind::Planning, "dynamic-shape plan", name_);
  return declaration.planner->trace(op_.schema(), arguments, facts, call, reason);
}

std::optional<Plan> PlannedOperator::dry_run(
    const Declaration& declaration,
    c10::ArrayRef<c10::IValue> arguments,
    c10::DeviceIndex device,
    FallbackReason& left) {
  const auto& facts = declaration.facts;
  PlannedCall call = new_call(device);
  Signature signature;
  read_call(arguments, facts, call, signature);
  BelowEverything guard;
  Recorder recorder(call, /*dry=*/true);
  const auto results = call_planner(declaration, arguments, call, left);
  return results.has_value() ? std::make_optional(recorder.finish(*results)) : std::nullopt;
}

// A captured call must be replayable, so it always replays a plan. Without one, rehearses the planner. That plan is
// used only in this capture, because a planner does not tune candidates during a capture.
void PlannedOperator::capture(
    Capture& capture,
    const Declaration& declaration,
    torch::jit::Stack* stack,
    PlannedCall& call,
    const Signature& signature) {
  const size_t count = declaration.facts.size();
  const auto arguments = torch::jit::last(*stack, count);
  std::shared_ptr<const Plan> known;
  if (mode.load(std::memory_order_relaxed) != PlanMode::Off) {
    known = cache_.find(signature);
    known = known != nullptr ? known : cache_.find_dynamic_shape(signature);
  }
  if (known == nullptr) {
    FallbackReason left;
    auto made = dry_run(declaration, arguments, call.device, left);
    if (left.refused && falls_back_) {
      try_for_error(op_, arguments, kMaxZeros);
    }
    if (!made.has_value()) {
      made.emplace().unplannable = left.reason;
      made->falls_back = true;
    }
    known = std::make_shared<const Plan>(std::move(*made));
    cache_.count_planned(*known);
  }
  if (known->falls_back) {
    run_otherwise(stack); // can be a composite kernel whose operators can be captured
    return;
  }
  if (!known->unplannable.empty()) {
    capture.refuse(known->unplannable);
  }
  capture.hold(known);
  auto results = replay(*known, call);
  replace(stack, count, results);
}

void PlannedOperator::check(
    const Declaration& declaration, c10::ArrayRef<c10::IValue> arguments, const PlannedCall& call, const Plan& known) {
  const auto& facts = declaration.facts;
  check_numbers(known, call);
  FallbackReason left;
  std::optional<Plan> fresh;
  try {
    fresh = dry_run(declaration, arguments, call.device, left);
  } catch (std::exception& error) {
    if (!is_refusal(error)) {
      throw;
    }
    TORCH_CHECK(
        false, name_, " has a plan, and its planner now refuses the call: ", error.what(), "\n",
        describe(arguments, facts));
  }
  TORCH_CHECK(
      fresh.has_value(), name_, " has a plan, and its planner now leaves the call to the CPU: ", left.reason, "\n",
      describe(arguments, facts));
  const std::string found = difference(known, *fresh);
  TORCH_CHECK(
      found.empty(), "the plan of ", name_,
      " is not what its planner does for another call of the same signature: ", found, "\n",
      describe(arguments, facts));
}

PlannedOperator::Times PlannedOperator::time(c10::ArrayRef<c10::IValue> arguments, size_t times) {
  const auto index = device_of(arguments);
  TORCH_CHECK_VALUE(index >= 0, "at least one argument must be on a bp device");
  const auto seconds = [&](const auto& action) {
    action(); // warms up
    synchronize_stream(current_stream(index));
    device(index).sleep(std::max(10.0, 0.05 * static_cast<double>(times)), stream_handle(current_stream(index)));
    const auto start = std::chrono::steady_clock::now();
    for (size_t i = 0; i < times; ++i) {
      action();
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const Declaration* declaration = declaration_.load();
  TORCH_CHECK_VALUE(declaration != nullptr, name_, " has no planner");
  std::shared_ptr<const Plan> plan;
  std::optional<PlannedCall> call;
  Times found;
  found.signature = seconds([&] {
    call.emplace(new_call(index));
    Signature signature;
    read_call(arguments, declaration->facts, *call, signature);
    plan = cache_.find(signature);
  });
  TORCH_CHECK_VALUE(plan != nullptr && plan->unplannable.empty(), name_, " has no plan for these arguments");
  // Time the plan with successively fewer of its steps.
  Plan without_results = *plan;
  without_results.results.clear();
  Plan only_allocations = without_results;
  std::erase_if(only_allocations.steps, [](const Step& step) {
    return std::holds_alternative<LaunchStep>(step) || std::holds_alternative<LibraryStep>(step);
  });
  const double whole = seconds([&] { replay(*plan, *call); });
  const double unreturned = seconds([&] { replay(without_results, *call); });
  found.allocation = seconds([&] { replay(only_allocations, *call); });
  found.launch = unreturned - found.allocation;
  found.results = whole - unreturned;
  torch::jit::Stack stack;
  found.call = seconds([&] {
    stack.assign(arguments.begin(), arguments.end());
    op_.callBoxed(stack);
  });
  return found;
}

PlannedOperator& planned_operator(const std::string& name) {
  Table& all = table();
  std::lock_guard<std::mutex> guard(all.lock);
  auto& slot = all.operators[name];
  if (slot == nullptr) {
    const auto dot = name.find('.');
    const std::string base = name.substr(0, dot);
    const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
    const auto op = c10::Dispatcher::singleton().findSchema({base, overload});
    if (!op.has_value()) {
      all.operators.erase(name);
      TORCH_CHECK_VALUE(false, "PyTorch has no operator ", name);
    }
    slot = std::make_unique<PlannedOperator>(*op);
    const std::string space = base.substr(0, base.find(':'));
    const auto library =
        all.libraries.try_emplace(space, torch::Library::IMPL, space, c10::DispatchKey::PrivateUse1, __FILE__, __LINE__)
            .first;
    const Silence silence;
    library->second.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Registered>(*slot)));
  }
  return *slot;
}

void for_each_planned_operator(const std::function<void(PlannedOperator&)>& visit) {
  Table& all = table();
  std::lock_guard<std::mutex> guard(all.lock);
  for (auto& [name, planned] : all.operators) {
    visit(*planned);
  }
}

} // namespace backplane
