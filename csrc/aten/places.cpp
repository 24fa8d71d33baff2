#include "aten/places.h"

#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

namespace backplane {

using at::Tensor;

namespace {

// PyTorch has this key for modes of a thread that see each operator, and uses it in tests alone. Nothing comes by here but what
// is called while there is an offer.
constexpr c10::DispatchKey kAsked = c10::DispatchKey::TESTING_ONLY_GenericMode;

constexpr int64_t kLeastBytes = 16384; // less is copied as quickly

thread_local Offer* current = nullptr;

Tensor empty(
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> memory_format) {
  const c10::impl::ExcludeDispatchKeyGuard usual(kAsked);
  const bool is_plain = layout.value_or(at::kStrided) == at::kStrided && device.value_or(at::kCPU).is_cpu() &&
      !pin_memory.value_or(false) && memory_format.value_or(at::MemoryFormat::Contiguous) == at::MemoryFormat::Contiguous;
  if (current != nullptr && is_plain) {
    const auto kind = dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
    if (auto place = current->take(sizes, kind)) {
      return *std::move(place);
    }
  }
  return at::empty(sizes, dtype, layout, device, pin_memory, memory_format);
}

bool is_there(const Tensor& place, const Tensor& result) {
  return result.is_alias_of(place) && result.data_ptr() == place.data_ptr() && result.sizes() == place.sizes() &&
      result.strides() == place.strides() && result.scalar_type() == place.scalar_type();
}

} // namespace

Offer::Offer(const Places& places) : before_(current), asked_(kAsked) {
  for (const auto& place : places) {
    if (place.has_value() && place->is_contiguous() && static_cast<int64_t>(place->nbytes()) >= kLeastBytes) {
      places_.push_back(*place);
    }
  }
  current = this;
}

Offer::~Offer() {
  current = before_;
}

std::optional<Tensor> Offer::take(at::IntArrayRef sizes, at::ScalarType dtype) {
  const int64_t numbers = c10::multiply_integers(sizes);
  const auto fits = [&](const Tensor& place) {
    return place.scalar_type() == dtype && (place.numel() == numbers || (dtype == at::kByte && place.numel() > numbers)) &&
        numbers * static_cast<int64_t>(place.element_size()) >= kLeastBytes;
  };
  const auto found = std::find_if(places_.begin(), places_.end(), fits);
  if (found == places_.end()) {
    return std::nullopt;
  }
  const Tensor place = std::move(*found);
  places_.erase(found);
  return place.view(-1).narrow(0, 0, numbers).view(sizes);
}

void deliver(const Places& places, std::vector<Tensor> results) {
  TORCH_INTERNAL_ASSERT(places.size() == results.size());
  // What lies in a place, and not as it should lie there, would be overwritten.
  for (size_t i = 0; i < places.size(); ++i) {
    const auto lies_in = [&](const std::optional<Tensor>& place) {
      return place.has_value() && results[i].is_alias_of(*place);
    };
    if (places[i].has_value() && !is_there(*places[i], results[i]) && std::any_of(places.begin(), places.end(), lies_in)) {
      results[i] = results[i].clone();
    }
  }
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i].has_value() && !is_there(*places[i], results[i])) {
      places[i]->copy_(results[i]);
    }
  }
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, m) {
  m.impl("empty.memory_format", &empty);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

} // namespace backplane
