#include "fallback/structured_meta.h"

#include <torch/library.h>

#include <unordered_map>

#include "fallback/structured_metas.inc" // without STRUCTURED_META: includes the functions' headers

namespace backplane {
namespace {

template <class Type>
c10::KernelFunction boxed(Type* function) {
  return c10::KernelFunction::makeFromUnboxedRuntimeFunction(function);
}

using Table = std::unordered_map<std::string, c10::KernelFunction>;

const Table& table() {
  static const Table* all = [] {
    auto* made = new Table;
#define STRUCTURED_META(type, function, name) \
  made->emplace(name, boxed(static_cast<std::add_pointer_t<STRUCTURED_META_TYPE type>>(&at::meta::function)));
#define STRUCTURED_META_TYPE(...) __VA_ARGS__
#include "fallback/structured_metas.inc"
#undef STRUCTURED_META
    return made;
  }();
  return *all;
}

} // namespace

const c10::KernelFunction* structured_meta(const std::string& name) {
  const auto found = table().find(name);
  return found == table().end() ? nullptr : &found->second;
}

} // namespace backplane
