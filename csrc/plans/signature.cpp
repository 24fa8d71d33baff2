#include "plans/signature.h"

#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <cstring>
#include <functional>

namespace backplane {
namespace {

std::atomic<uint64_t> epoch{0};

// The low 8 bits of each value's first word. The other bits hold further properties of the value.
enum class Tag : uint64_t {
  None,
  Tensor,
  Number,
  Int,
  Double,
  Complex,
  Bool,
  String,
  List,
  Device,
  Generator,
  Undefined
};

class Reader {
 public:
  Reader(PlannedCall& call, Signature& signature) : call_(call), words_(signature.words), sizes_(signature.sizes) {}

  const char* problem() const {
    return problem_;
  }

  void read(const c10::IValue& value, const ArgumentFacts& facts) {
    if (value.isTensor()) {
      read(value.toTensor(), facts);
    } else if (value.isNone()) {
      tag(Tag::None);
    } else if (value.isInt()) {
      if (facts.passed_through) {
        pass(value.toInt());
      } else {
        tag(Tag::Int);
        if (facts.is_size) {
          sizes_.push_back(value.toInt());
        } else {
          words_.push_back(static_cast<uint64_t>(value.toInt()));
        }
      }
    } else if (value.isDouble()) {
      if (facts.passed_through) {
        pass(value.toDouble());
      } else {
        tag(Tag::Double);
        words_.push_back(c10::bit_cast<uint64_t>(value.toDouble()));
      }
    } else if (value.isBool()) {
      if (facts.passed_through) {
        pass(value.toBool());
      } else {
        tag(Tag::Bool, value.toBool());
      }
    } else if (value.isList()) {
      const auto elements = value.toListRef();
      tag(Tag::List, elements.size());
      for (const c10::IValue& element : elements) {
        read(element, facts);
      }
    } else if (value.isString()) {
      const auto& text = value.toStringRef();
      tag(Tag::String, text.size());
      for (size_t i = 0; i < text.size(); i += sizeof(uint64_t)) {
        uint64_t word = 0;
        std::memcpy(&word, text.data() + i, std::min(sizeof word, text.size() - i));
        words_.push_back(word);
      }
    } else if (value.isDevice()) {
      const auto device = value.toDevice();
      tag(Tag::Device, static_cast<uint64_t>(device.type()) << 8 | static_cast<uint8_t>(device.index()));
    } else if (value.isGenerator()) {
      tag(Tag::Generator);
    } else if (value.isComplexDouble()) {
      if (facts.passed_through) {
        pass(value.toComplexDouble());
      } else {
        const auto number = value.toComplexDouble();
        tag(Tag::Complex);
        words_.push_back(c10::bit_cast<uint64_t>(number.real()));
        words_.push_back(c10::bit_cast<uint64_t>(number.imag()));
      }
    } else {
      problem_ = "an argument of an unsupported type";
    }
  }

 private:
  void tag(Tag tag, uint64_t rest = 0) {
    words_.push_back(static_cast<uint64_t>(tag) | rest << 8);
  }

  void pass(const c10::Scalar& number, bool is_tensor = false, bool is_wrapped = false) {
    tag(Tag::Number, static_cast<uint64_t>(number.type()) | uint64_t{is_tensor} << 8 | uint64_t{is_wrapped} << 9);
    call_.numbers.push_back(number);
  }

  void read(const at::Tensor& tensor, const ArgumentFacts& facts) {
    if (!tensor.defined()) {
      tag(Tag::Undefined);
      return;
    }
    const auto device = tensor.device();
    if (!device.is_privateuseone()) {
      if (device.is_cpu() && tensor.dim() == 0 && !facts.written) {
        tag(Tag::Number, uint64_t{1} << 16 | static_cast<uint64_t>(tensor.scalar_type()));
        pass(cpu_value(tensor), true, tensor.unsafeGetTensorImpl()->is_wrapped_number());
      } else {
        problem_ = "a tensor on another device";
      }
      return;
    }
    if (device.index() != call_.device) {
      problem_ = "tensors on two bp devices";
      return;
    }
    const auto* impl = tensor.unsafeGetTensorImpl();
    if (tensor.layout() != c10::kStrided || tensor.key_set().has(c10::DispatchKey::ZeroTensor) ||
        !impl->has_storage()) {
      problem_ = "a tensor without strided memory";
      return;
    }
    const auto data = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    tag(Tag::Tensor,
        static_cast<uint64_t>(tensor.scalar_type()) | sizes.size() << 8 | data % kAlignmentClass << 24 |
            uint64_t{tensor.is_conj()} << 32 | uint64_t{tensor.is_neg()} << 33 |
            uint64_t{impl->is_wrapped_number()} << 34);
    sizes_.append(sizes.begin(), sizes.end());
    sizes_.append(strides.begin(), strides.end());
    read_sharing(tensor, data);
    call_.tensors.push_back(&tensor);
    call_.written.push_back(facts.written);
  }

  // Adds the first earlier tensor in the same storage with its distance, and the earlier argument that is the same
  // tensor object, if any. Planners can distinguish the same tensor from another view of its elements, and a replay has
  // to return the tensor that the planner returned.
  void read_sharing(const at::Tensor& tensor, uintptr_t data) {
    const void* storage = tensor.storage().unsafeGetStorageImpl();
    const void* self = tensor.unsafeGetTensorImpl();
    const size_t here = storages_.size();
    storages_.push_back({storage, data});
    if (here < kLinear) {
      for (size_t i = 0; i < here; ++i) {
        if (storages_[i].first == storage) {
          share(i, data);
          repeat_one_of_first(here, self);
          return;
        }
      }
      return;
    }
    if (here == kLinear) {
      for (size_t i = 0; i < here; ++i) {
        by_storage_.emplace(storages_[i].first, i);
      }
    }
    const auto [found, fresh] = by_storage_.emplace(storage, here);
    if (fresh) {
      return;
    }
    share(found->second, data);
    if (repeat_one_of_first(kLinear, self)) {
      return;
    }
    by_tensor_.emplace(call_.tensors[found->second]->unsafeGetTensorImpl(), found->second);
    const auto [same, is_other] = by_tensor_.emplace(self, here);
    if (!is_other) {
      repeat(same->second);
    }
  }

  bool repeat_one_of_first(size_t count, const void* self) {
    for (size_t i = 0; i < count; ++i) {
      if (call_.tensors[i]->unsafeGetTensorImpl() == self) {
        repeat(i);
        return true;
      }
    }
    return false;
  }

  // These words cannot be confused with tags.
  void share(size_t earlier, uintptr_t data) {
    words_.push_back(~uint64_t{0} - earlier);
    sizes_.push_back(static_cast<int64_t>(data - storages_[earlier].second));
  }
  void repeat(size_t earlier) {
    words_.push_back(~uint64_t{0} - earlier - (uint64_t{1} << 32));
  }

  static constexpr size_t kLinear = 8; // up to this many tensors, linear search is fastest

  PlannedCall& call_;
  c10::SmallVectorImpl<uint64_t>& words_;
  c10::SmallVectorImpl<int64_t>& sizes_;
  c10::SmallVector<std::pair<const void*, uintptr_t>, 8> storages_;
  ska::flat_hash_map<const void*, size_t> by_storage_;
  ska::flat_hash_map<const void*, size_t> by_tensor_; // tensors beyond the first kLinear that share a storage
  const char* problem_ = nullptr;
};

template <typename Word>
uint64_t hash_of(c10::ArrayRef<Word> words, uint64_t seed = 0x9e3779b97f4a7c15u) {
  uint64_t hash = seed ^ words.size();
  for (const Word word : words) {
    const auto product = static_cast<unsigned __int128>(hash ^ static_cast<uint64_t>(word)) * 0xa0761d6478bd642fu;
    hash = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    hash += 0x9e3779b97f4a7c15u;
  }
  return hash;
}

} // namespace

uint64_t hash_of_class(const Signature& signature) {
  return hash_of<uint64_t>(signature.words);
}

c10::Scalar cpu_value(const at::Tensor& tensor) {
  return at::native::_local_scalar_dense_cpu(tensor);
}

uint64_t configuration_epoch() {
  return epoch.load(std::memory_order_relaxed);
}

void advance_configuration_epoch() {
  epoch.fetch_add(1);
}

uint64_t float32_in_tf32() {
  const auto allows = [](at::Float32Op op) {
    return at::globalContext().float32Precision(at::Float32Backend::CUDA, op) == at::Float32Precision::TF32;
  };
  return uint64_t{allows(at::Float32Op::MATMUL)} | uint64_t{allows(at::Float32Op::CONV)} << 1;
}

void add_tf32(Signature& signature, uint64_t tf32) {
  signature.words.push_back(tf32);
  signature.hash = hash_of<int64_t>(signature.sizes, hash_of_class(signature));
}

const char* read_call(
    c10::ArrayRef<c10::IValue> arguments,
    const std::vector<ArgumentFacts>& facts,
    PlannedCall& call,
    Signature& signature) {
  Reader reader(call, signature);
  signature.words.push_back(
      configuration_epoch() << 24 | static_cast<uint64_t>(call.device) << 16 |
      static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << 8 |
      uint64_t{at::globalContext().userEnabledCuDNNSDP()} << 1 | // operators/library_attention.py
      uint64_t{at::globalContext().deterministicAlgorithms()});
  for (size_t i = 0; i < arguments.size(); ++i) {
    reader.read(arguments[i], facts[i]);
    if (facts[i].is_generator) {
      call.generator = &arguments[i];
    }
  }
  if (call.tf32.has_value()) {
    signature.words.push_back(*call.tf32);
  }
  signature.hash = hash_of<int64_t>(signature.sizes, hash_of_class(signature));
  return reader.problem();
}

std::string describe(c10::ArrayRef<c10::IValue> arguments, const std::vector<ArgumentFacts>& facts) {
  std::string whole;
  size_t tensors = 0;
  size_t numbers = 0;
  const std::function<std::string(const c10::IValue&, bool)> text = [&](const c10::IValue& value, bool passed) {
    if (value.isTensor() && value.toTensor().defined()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.device().is_privateuseone()) {
        return c10::str("number ", numbers++, " (", tensor.scalar_type(), " on ", tensor.device(), ")");
      }
      return c10::str(
          "argument ", tensors++, ": ", tensor.scalar_type(), ", sizes ", tensor.sizes(), ", strides ",
          tensor.strides());
    }
    if (value.isList()) {
      std::string list;
      for (const c10::IValue& element : value.toListRef()) {
        list += (list.empty() ? "" : "; ") + text(element, passed);
      }
      return "[" + list + "]";
    }
    return passed && value.isScalar() ? c10::str("number ", numbers++, " (", value.toScalar().type(), ")")
                                      : c10::str(value);
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    whole += text(arguments[i], facts[i].passed_through) + (i + 1 < arguments.size() ? "\n" : "");
  }
  return whole;
}

} // namespace backplane
