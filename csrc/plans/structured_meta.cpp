// PyTorch's C++ meta functions of structured operators: they check a call as its CPU and CUDA kernels do, and say what the
// results look like. The dispatcher does not lead to them: PyTorch registers Python functions over many, which refuse less.
#include "plans/structured_meta.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <unordered_map>

#include "bindings.h"
#include "plans/structured_metas.inc" // the headers

namespace py = pybind11;

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
#include "plans/structured_metas.inc"
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

void bind_structured_meta(py::module_& module) {
  module.def(
      "has_structured_meta", [](const std::string& name) { return structured_meta(name) != nullptr; }, py::arg("name"));
  module.def(
      "structured_meta",
      [](const std::string& name, const py::args& given) {
        const c10::KernelFunction* function = structured_meta(name);
        TORCH_CHECK_VALUE(function != nullptr, name, " has no structured meta function");
        const auto dot = name.find('.');
        const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
            name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
        const auto& schema = op.schema().arguments();
        TORCH_CHECK_VALUE(given.size() == schema.size(), name, " takes ", schema.size(), " arguments");
        torch::jit::Stack stack;
        for (size_t i = 0; i < schema.size(); ++i) {
          stack.push_back(torch::jit::toIValue(given[i], schema[i].type()));
        }
        function->callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
        py::list results;
        for (c10::IValue& value : stack) {
          results.append(torch::jit::toPyObject(std::move(value)));
        }
        return py::tuple(results);
      },
      py::arg("name"),
      "The results, as meta tensors, of an overload such as \"aten::add.out\", given all its arguments in the schema's order "
      "(tensors: meta). Throws PyTorch's errors for arguments that its kernels do not take.");
}

} // namespace backplane
