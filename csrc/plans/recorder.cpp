#include "plans/recorder.h"

#include <ATen/core/List.h>

#include "plans/signature.h"

namespace backplane {

Recorder::Recorder(PlannedCall& call, bool dry) : call_(call), dry_(dry), outer_(active_) {
  plan_.numbers = static_cast<uint32_t>(call.numbers.size());
  active_ = this;
}

Recorder::~Recorder() {
  active_ = outer_;
}

void Recorder::allocated(void* memory, size_t bytes) {
  live_[memory] = plan_.allocations;
  plan_.steps.emplace_back(AllocateStep{plan_.allocations++, bytes});
}

void Recorder::freed(void* memory) {
  const auto found = live_.find(memory);
  if (found != live_.end()) { // otherwise it was allocated before the recording
    plan_.steps.emplace_back(FreeStep{found->second});
    live_.erase(found);
  }
}

void Recorder::copied(const at::Tensor& destination, const at::Tensor& source, size_t bytes) {
  const Address to = locate(destination);
  plan_.steps.emplace_back(CopyStep{to, locate(source), bytes});
}

uint32_t Recorder::take_random(uint64_t count) {
  const auto first = static_cast<uint32_t>(call_.numbers.size());
  plan_.random.push_back({count, first});
  if (dry_) {
    call_.numbers.resize(first + 2); // the generator must not advance, and no launch reads these
  } else {
    take_random_numbers(call_, count);
  }
  return first;
}

void Recorder::keep(const at::Tensor& tensor) {
  plan_.kept.push_back(tensor);
}

void Recorder::cannot_replay(std::string reason) {
  if (plan_.unplannable.empty()) {
    plan_.unplannable = std::move(reason);
  }
}

Address Recorder::locate(const at::Tensor& tensor) {
  const char* data = static_cast<const char*>(tensor.const_data_ptr());
  const char* memory = static_cast<const char*>(tensor.storage().data());
  if (const auto found = live_.find(memory); found != live_.end()) {
    return {Address::Base::Allocation, found->second, data - memory};
  }
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  for (size_t i = 0; i < call_.tensors.size(); ++i) {
    if (call_.tensors[i]->storage().unsafeGetStorageImpl() == storage) {
      const char* base = static_cast<const char*>(call_.tensors[i]->const_data_ptr());
      return {Address::Base::Argument, static_cast<uint32_t>(i), data - base};
    }
  }
  for (size_t i = 0; i < plan_.kept.size(); ++i) {
    if (plan_.kept[i].storage().unsafeGetStorageImpl() == storage) {
      return {
          Address::Base::Kept, static_cast<uint32_t>(i),
          data - static_cast<const char*>(plan_.kept[i].const_data_ptr())};
    }
  }
  cannot_replay("it uses a tensor that is neither an argument nor allocated by the planner");
  return {Address::Base::Argument, 0, 0};
}

ResultTensor Recorder::result(const at::Tensor& tensor) {
  ResultTensor result;
  if (!tensor.defined()) {
    return result;
  }
  for (size_t i = 0; i < call_.tensors.size(); ++i) {
    if (call_.tensors[i]->is_same(tensor)) {
      result.kind = ResultTensor::Kind::Argument;
      result.index = static_cast<int32_t>(i);
      return result;
    }
  }
  if (!tensor.device().is_privateuseone() || tensor.device().index() != call_.device) {
    cannot_replay("it returns a tensor on another device");
    return result;
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    cannot_replay("it returns a lazily conjugated or negated tensor");
    return result;
  }
  result.dtype = tensor.scalar_type();
  result.sizes.append(tensor.sizes().begin(), tensor.sizes().end());
  result.strides.append(tensor.strides().begin(), tensor.strides().end());
  if (tensor.storage().nbytes() == 0) {
    result.kind = ResultTensor::Kind::New;
    result.index = -1;
    result.offset = tensor.storage_offset();
    return result;
  }
  const Address address = locate(tensor);
  const auto item = static_cast<int64_t>(tensor.itemsize());
  if (address.base == Address::Base::Kept || address.offset % item != 0) {
    cannot_replay("it returns memory that the plan keeps, or a tensor whose offset is not a multiple of its item size");
  }
  result.kind = address.base == Address::Base::Argument ? ResultTensor::Kind::View : ResultTensor::Kind::New;
  result.index = static_cast<int32_t>(address.index);
  result.offset = address.offset / item;
  return result;
}

Plan Recorder::finish(c10::ArrayRef<c10::IValue> results) {
  active_ = outer_;
  for (const c10::IValue& value : results) {
    if (value.isTensor()) {
      plan_.results.emplace_back(result(value.toTensor()));
    } else if (value.isTensorList()) {
      std::vector<ResultTensor> list;
      for (const c10::IValue& element : value.toListRef()) {
        list.push_back(result(element.toTensor()));
      }
      plan_.results.emplace_back(std::move(list));
    } else {
      plan_.results.emplace_back(value);
    }
  }
  if (!plan_.unplannable.empty()) {
    Plan nothing;
    nothing.unplannable = std::move(plan_.unplannable);
    return nothing;
  }
  return std::move(plan_);
}

uint64_t PlannerScope::read_tf32() {
  std::optional<uint64_t> found; // the same for all calls, if another thread changes the setting
  for (auto* scope = innermost(); scope != nullptr; scope = scope->outer_) {
    found = scope->call_.tf32.has_value() ? scope->call_.tf32 : found;
  }
  const uint64_t tf32 = found.has_value() ? *found : float32_in_tf32();
  for (auto* scope = innermost(); scope != nullptr; scope = scope->outer_) {
    scope->call_.tf32 = tf32;
  }
  return tf32;
}

// Arguments of out= do not count: they are only written, and the fallback can overwrite them.
bool PlannerScope::reads(const c10::StorageImpl* storage) const {
  const auto is_in = [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.has_storage() && tensor.storage().unsafeGetStorageImpl() == storage;
  };
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const auto& declared = schema_.arguments()[i];
    const bool is_out = declared.kwarg_only() && declared.alias_info() != nullptr && declared.alias_info()->isWrite();
    if (is_out) {
      continue;
    }
    if (arguments_[i].isTensor() && is_in(arguments_[i].toTensor())) {
      return true;
    }
    if (arguments_[i].isList()) {
      for (const c10::IValue& element : arguments_[i].toListRef()) {
        if (element.isTensor() && is_in(element.toTensor())) {
          return true;
        }
      }
    }
  }
  return false;
}

void PlannerScope::note_write(const c10::StorageImpl* storage, bool surely) {
  for (auto* scope = this; scope != nullptr; scope = scope->outer_) {
    bool met = false;
    bool declared = false;
    for (size_t i = 0; i < scope->call_.tensors.size(); ++i) {
      if (scope->call_.tensors[i]->storage().unsafeGetStorageImpl() == storage) {
        met = true;
        declared |= scope->call_.written[i];
      }
    }
    TORCH_CHECK(
        !met || declared || !surely, "the planner of ", scope->schema_.operator_name(),
        " writes to an argument that the operator's schema does not declare as written");
    scope->has_effect_ |= met && scope->reads(storage);
  }
}

} // namespace backplane
