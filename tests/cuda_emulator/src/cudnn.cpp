// libcudnn: convolutions and attention by its graph API, in host memory.
//
// A graph has three engine configurations. A plan of the first one cannot be finalized. The second one is noted for
// what gives other numbers: it computes convolutions of float32 in TF32, and gives wrong numbers in other dtypes; for
// gradients of attention it is noted for an order of additions that changes, and computes them. The third one computes
// the graph.

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "cudnn_attention.h"
#include "cudnn_descriptors.h"
#include "numbers.h"

namespace {

struct Handle : LibraryHandle {};

// The types of the attributes that can be set. All are required, except those of optional_types().
const std::map<int, int> kConvolutionTypes{{100, kDataType}, {101, kConvolutionMode}, {102, kInt64}, {103, kInt64},
                                           {104, kInt64},    {105, kInt64},           {106, kInt64}};
const std::map<int, int> kTensorTypes{{900, kInt64}, {901, kDataType}, {902, kInt64}, {903, kInt64}, {906, kInt64}};

// The first attribute of an operation: alpha, beta, the convolution and three tensors follow.
int first_of(Kind kind) {
  return kind == kForward ? 700 : kind == kOfImage ? 706 : 712;
}
bool is_operation(Kind kind) {
  return kind == kForward || kind == kOfImage || kind == kOfWeight;
}

std::map<int, int> types_of(Kind kind, int number_type) {
  switch (kind) {
    case kConvolution:
      return kConvolutionTypes;
    case kTensor:
      return kTensorTypes;
    case kGraph:
      return {{800, kHandleType}, {801, kDescriptor}};
    case kHeuristics:
      return {{200, kHeuristicsMode}, {201, kDescriptor}};
    case kPlan:
      return {{400, kHandleType}, {401, kDescriptor}};
    case kVariantPack:
      return {{1000, kInt64}, {1001, kPointer}, {1003, kPointer}};
    default:
      break;
  }
  std::map<int, int> found = attention_types(kind).required;
  for (int i = 0; is_operation(kind) && i < 6; ++i) {
    found[first_of(kind) + i] = i < 2 ? number_type : kDescriptor;
  }
  return found;
}

std::map<int, int> optional_types(Kind kind) {
  return kind == kTensor ? std::map<int, int>{{907, kBoolean}, {908, kBoolean}} : attention_types(kind).optional;
}

// An operation with its tensors and numbers.
struct Convolution {
  Kind kind;
  Tensor weight, image, values;
  std::vector<int64_t> dilation, stride, before;
  int64_t groups;

  explicit Convolution(const Descriptor& operation)
      : kind(operation.kind),
        weight(*operation.link(first_of(kind) + 3)),
        image(*operation.link(first_of(kind) + 4)),
        values(*operation.link(first_of(kind) + 5)),
        dilation(operation.link(first_of(kind) + 2)->all<int64_t>(102)),
        stride(operation.link(first_of(kind) + 2)->all<int64_t>(103)),
        before(operation.link(first_of(kind) + 2)->all<int64_t>(105)),
        groups(weight.sizes[1] == 0 ? 0 : image.sizes[1] / weight.sizes[1]) {}

  const Tensor& result() const {
    return kind == kForward ? values : kind == kOfImage ? image : weight;
  }
  // Whether the sizes fit together.
  bool is_consistent(const std::vector<int64_t>& after) const {
    const size_t rank = dilation.size() + 2;
    if (weight.sizes.size() != rank || image.sizes.size() != rank || values.sizes.size() != rank || groups == 0 ||
        weight.sizes[1] * groups != image.sizes[1] || weight.sizes[0] % groups != 0 ||
        weight.sizes[0] != values.sizes[1] || image.sizes[0] != values.sizes[0]) {
      return false;
    }
    for (size_t d = 2; d < rank; ++d) {
      const int64_t reach = (weight.sizes[d] - 1) * dilation[d - 2] + 1;
      const int64_t room = image.sizes[d] + before[d - 2] + after[d - 2] - reach;
      if (room < 0 || room / stride[d - 2] + 1 != values.sizes[d]) {
        return false;
      }
    }
    return true;
  }
};

// Adds the products of all windows up.
template <class T>
void execute(const Convolution& of, T* weight, T* image, T* values) {
  const Tensor& result = of.result();
  std::vector<double> sums(result.elements());
  const int64_t of_group = of.weight.sizes[0] / of.groups;
  for_each(of.values.sizes, [&](const std::vector<int64_t>& at) {
    std::vector<int64_t> window = of.weight.sizes;
    window[0] = 1;
    for_each(window, [&](std::vector<int64_t> in_weight) {
      in_weight[0] = at[1];
      std::vector<int64_t> in_image{at[0], at[1] / of_group * of.weight.sizes[1] + in_weight[1]};
      for (size_t d = 2; d < at.size(); ++d) {
        in_image.push_back(at[d] * of.stride[d - 2] + in_weight[d] * of.dilation[d - 2] - of.before[d - 2]);
        if (in_image[d] < 0 || in_image[d] >= of.image.sizes[d]) {
          return;
        }
      }
      const int64_t w = offset(of.weight, in_weight), i = offset(of.image, in_image), v = offset(of.values, at);
      if (of.kind == kForward) {
        sums[v] += static_cast<double>(weight[w]) * static_cast<double>(image[i]);
      } else if (of.kind == kOfImage) {
        sums[i] += static_cast<double>(weight[w]) * static_cast<double>(values[v]);
      } else {
        sums[w] += static_cast<double>(image[i]) * static_cast<double>(values[v]);
      }
    });
  });
  T* const out = of.kind == kForward ? values : of.kind == kOfImage ? image : weight;
  for (size_t i = 0; i < sums.size(); ++i) {
    out[i] = rounded<T>(sums[i]);
  }
}

template <class T>
void execute(const Convolution& of, char* weight, char* image, char* values) {
  execute(of, reinterpret_cast<T*>(weight), reinterpret_cast<T*>(image), reinterpret_cast<T*>(values));
}

// Computes float32 as tensor cores do.
void execute_in_tf32(const Convolution& of, std::vector<char*> memory) {
  std::vector<float> copies[3];
  const Tensor* const tensors[] = {&of.weight, &of.image, &of.values};
  const int result = of.kind == kForward ? 2 : of.kind == kOfImage ? 1 : 0;
  for (int i = 0; i < 3 && uses_tf32(); ++i) {
    if (i != result) {
      const auto* const given = reinterpret_cast<const float*>(memory[i]);
      copies[i].assign(given, given + tensors[i]->elements());
      std::transform(copies[i].begin(), copies[i].end(), copies[i].begin(), [](float one) { return tf32(one); });
      memory[i] = reinterpret_cast<char*>(copies[i].data());
    }
  }
  execute<float>(of, memory[0], memory[1], memory[2]);
}

// Whether no descriptor that the plan uses was destroyed.
bool is_alive(const Descriptor& of) {
  return std::all_of(
      of.used.begin(), of.used.end(), [](const auto& one) { return find(one.get()) != nullptr && is_alive(*one); });
}

int finalize_tensor(const Descriptor& of) {
  const Tensor tensor(of);
  REQUIRE(tensor.sizes.size() >= 4 && tensor.sizes.size() <= 5, kNotSupported); // as for convolutions
  REQUIRE(tensor.strides.size() == tensor.sizes.size(), kSizeInsufficient);
  REQUIRE(std::all_of(tensor.sizes.begin(), tensor.sizes.end(), [](int64_t size) { return size >= 1; }), kOutOfBound);
  REQUIRE(number_bytes(tensor.type) != 0, kNotSupported);
  REQUIRE(
      tensor.alignment >= number_bytes(tensor.type) && tensor.alignment % number_bytes(tensor.type) == 0, kBadParam);
  REQUIRE(!tensor.is_virtual || !tensor.is_by_value, kBadParam);
  return tensor.overlaps() ? kNotSupportedLayout : kSuccess;
}

int finalize_convolution(const Descriptor& of) {
  const int64_t dimensions = of.one<int64_t>(106);
  REQUIRE(of.one<int>(101) == 1, kNotSupported); // CUDNN_CROSS_CORRELATION
  for (const int name : {102, 103, 104, 105}) {
    const auto all = of.all<int64_t>(name);
    REQUIRE(static_cast<int64_t>(all.size()) == dimensions, kSizeInsufficient);
    REQUIRE(std::all_of(all.begin(), all.end(), [name](int64_t one) { return one >= (name < 104); }), kOutOfBound);
  }
  return kSuccess;
}

int finalize_operation(const Descriptor& of) {
  const int first = first_of(of.kind);
  const auto convolution = of.link(first + 2);
  REQUIRE(convolution->kind == kConvolution, kBadParam);
  for (int i = 3; i < 6; ++i) {
    REQUIRE(of.link(first + i)->kind == kTensor, kBadParam);
  }
  const Convolution found(of);
  for (const Tensor* one : {&found.weight, &found.image, &found.values}) {
    REQUIRE(one->is_dense(), kNotSupportedLayout);
    REQUIRE(!one->is_virtual && !one->is_by_value, kNotSupported);
  }
  const int type = found.image.type, compute = convolution->one<int>(100);
  REQUIRE(found.weight.type == type && found.values.type == type, kNotSupported);
  REQUIRE(compute == (type == 1 ? 1 : 0), kNotSupported);
  const bool is_double = compute == 1;
  const auto factor = [&](int name) {
    return is_double ? of.one<double>(name) : static_cast<double>(of.one<float>(name));
  };
  REQUIRE(of.attributes.at(first).type == (is_double ? kDouble : kFloat), kAttributeType);
  REQUIRE(factor(first) == 1 && factor(first + 1) == 0, kNotSupported);
  REQUIRE(std::set<int64_t>({found.weight.id, found.image.id, found.values.id}).size() == 3, kDuplicatedEntries);
  return found.is_consistent(convolution->all<int64_t>(104)) ? kSuccess : kShapeMismatch;
}

std::vector<std::shared_ptr<Descriptor>> operations_of(const Descriptor& graph) {
  std::vector<std::shared_ptr<Descriptor>> found;
  for (Descriptor* const one : graph.all<Descriptor*>(801)) {
    found.push_back(find(one));
  }
  return found;
}

// The graph if it is one of attention.
std::optional<AttentionGraph> attention_of(const Descriptor& graph) {
  std::optional<AttentionGraph> found;
  if (is_attention_operation(graph.link(801)->kind)) {
    found.emplace(operations_of(graph));
    static_cast<void>(found->check());
  }
  return found;
}

// Real engines do not support every layout in every dtype: these do not support channels last in float64.
int finalize_graph(const Descriptor& of) {
  const auto operation = of.link(801);
  if (is_attention_operation(operation->kind)) {
    const auto all = operations_of(of);
    REQUIRE(
        std::all_of(all.begin(), all.end(), [](const auto& one) { return is_attention_operation(one->kind); }),
        kNotSupported);
    return AttentionGraph(all).check();
  }
  REQUIRE(of.attributes.at(801).count == 1 && is_operation(operation->kind), kNotSupported);
  const Convolution found(*operation);
  const bool channels_last = found.image.has_channels_last() || found.values.has_channels_last();
  return found.image.type == 1 && channels_last ? kNotSupportedLayout : kSuccess;
}

int finalize_plan(Descriptor& of) {
  const auto config = of.link(401);
  REQUIRE(config->kind == kEngineConfig && !config->used.empty(), kBadParam);
  REQUIRE(config->engine != 0, kNotSupported);
  of.engine = config->engine;
  const Descriptor& graph = *config->used[0];
  of.workspace = attention_of(graph)
      ? 1000
      : Convolution(*graph.link(801)).result().elements() * static_cast<int64_t>(sizeof(double));
  return emulator_prepare() == CUDA_SUCCESS ? kSuccess : kInternalError;
}

int finalize_pack(const Descriptor& of) {
  const auto ids = of.all<int64_t>(1000);
  REQUIRE(of.attributes.at(1001).count == static_cast<int64_t>(ids.size()), kSizeInsufficient);
  return std::set<int64_t>(ids.begin(), ids.end()).size() == ids.size() ? kSuccess : kDuplicatedEntries;
}

// Executes a plan of attention.
int attend(
    const AttentionGraph& graph,
    const std::vector<int64_t>& ids,
    const std::vector<char*>& pointers,
    char* workspace,
    const Descriptor& plan,
    CUstream stream) {
  std::map<int64_t, char*> memory;
  std::map<int64_t, float> values; // read now: the host's memory is only valid in the call
  for (const auto& [id, tensor] : graph.tensors()) {
    if (tensor.is_virtual) {
      continue;
    }
    const auto at = std::find(ids.begin(), ids.end(), id);
    REQUIRE(at != ids.end(), kBadParam);
    char* const pointer = pointers[at - ids.begin()];
    if (tensor.is_by_value) {
      REQUIRE(pointer != nullptr && !is_device_memory(pointer, sizeof(float)), kBadParam);
      memcpy(&values[id], pointer, sizeof(float));
      continue;
    }
    REQUIRE(is_device_memory(pointer, tensor.reach()), kBadParam);
    REQUIRE(reinterpret_cast<uintptr_t>(pointer) % tensor.alignment == 0, kMisalignedPointer);
    memory[id] = pointer;
  }
  REQUIRE(ids.size() == memory.size() + values.size(), kBadParam); // no others
  const bool is_wrong = plan.engine == 1 && !graph.is_backward(); // the numbers that its note allows
  const auto work = [graph, memory, values, workspace, bytes = plan.workspace, is_wrong] {
    memset(workspace, 0xff, bytes); // it is not free for others
    auto scaled = values;
    for (auto& [id, value] : scaled) {
      value = is_wrong ? value * 3 + 1 : value;
    }
    graph.execute(memory, scaled);
  };
  return submit(stream, work) == CUDA_SUCCESS ? kSuccess : kExecutionFailed;
}

} // namespace

API cudnnGetProperty(int which, int* value) {
  ENTER();
  return property(reinterpret_cast<void*>(&cudnnGetProperty), which, value, kBadParam);
}

// CUDNN_EMULATOR_VERSION replaces it.
extern "C" __attribute__((visibility("default"))) size_t cudnnGetVersion() {
  const char* const chosen = getenv("CUDNN_EMULATOR_VERSION");
  return chosen != nullptr ? strtoul(chosen, nullptr, 10) : 92801;
}

API cudnnCreate(Handle** made) {
  ENTER();
  REQUIRE(made != nullptr, kNullPointer);
  *made = made_handle<Handle>();
  return *made != nullptr ? kSuccess : kNotInitialized;
}

API cudnnSetStream(Handle* given, CUstream stream) {
  ENTER();
  const Use use(given);
  RETURN_STATUS(use.status(kBadParam, kInternalError, kExecutionFailed))
  use.handle->stream = stream;
  return kSuccess;
}

API cudnnBackendCreateDescriptor(int kind, Descriptor** made) {
  ENTER();
  REQUIRE(made != nullptr, kNullPointer);
  const std::set<int> known{
      kConvolution,      kEngine,    kEngineConfig,       kHeuristics,      kPlan,      kForward, kOfWeight,
      kOfImage,          kGraph,     kVariantPack,        kTensor,          kPointwise, kProduct, kPointwiseOperation,
      kProductOperation, kReduction, kReductionOperation, kReshapeOperation};
  REQUIRE(known.count(kind) != 0, kNotSupported);
  auto descriptor = std::make_shared<Descriptor>();
  descriptor->kind = static_cast<Kind>(kind);
  *made = Registry<Descriptor>::all().add(descriptor);
  return kSuccess;
}

API cudnnBackendDestroyDescriptor(Descriptor* given) {
  ENTER();
  return Registry<Descriptor>::all().remove(given) != nullptr ? kSuccess : kBadParam;
}

API cudnnBackendSetAttribute(Descriptor* given, int name, int type, int64_t count, const void* values) {
  ENTER();
  const auto descriptor = find(given);
  REQUIRE(descriptor != nullptr && !descriptor->is_final, kBadParam);
  REQUIRE(values != nullptr && count >= 1, kNullPointer);
  auto types = types_of(descriptor->kind, type == kDouble ? kDouble : kFloat);
  types.merge(optional_types(descriptor->kind));
  const auto expected = types.find(name);
  REQUIRE(expected != types.end(), kBadParam);
  REQUIRE(expected->second == type, kAttributeType);
  const auto* const bytes = static_cast<const char*>(values);
  Attribute attribute{type, count, std::vector<char>(bytes, bytes + count * bytes_of(type))};
  if (type == kDescriptor) {
    for (int64_t i = 0; i < count; ++i) {
      const auto linked = find(static_cast<Descriptor* const*>(values)[i]);
      REQUIRE(linked != nullptr, kBadParam);
      REQUIRE(linked->is_final || linked->kind == kEngineConfig, kNotFinalized);
      descriptor->used.push_back(linked);
    }
  }
  if (type == kHandleType) {
    const Use use(*static_cast<Handle* const*>(values));
    RETURN_STATUS(use.status(kBadParam, kInternalError, kExecutionFailed))
  }
  descriptor->attributes[name] = std::move(attribute);
  return kSuccess;
}

API cudnnBackendFinalize(Descriptor* given) {
  ENTER();
  const auto of = find(given);
  REQUIRE(of != nullptr && !of->is_final, kBadParam);
  for (const auto& [name, type] : types_of(of->kind, kFloat)) {
    REQUIRE(of->has(name), kBadParam);
  }
  REQUIRE(is_alive(*of), kBadParam);
  int status = kSuccess;
  switch (of->kind) {
    case kTensor:
      status = finalize_tensor(*of);
      break;
    case kConvolution:
      status = finalize_convolution(*of);
      break;
    case kGraph:
      status = finalize_graph(*of);
      break;
    case kPlan:
      status = finalize_plan(*of);
      break;
    case kVariantPack:
      status = finalize_pack(*of);
      break;
    case kHeuristics:
      status = of->link(201)->kind == kGraph ? kSuccess : kBadParam;
      break;
    case kPointwise:
    case kProduct:
    case kReduction:
    case kPointwiseOperation:
    case kProductOperation:
    case kReductionOperation:
    case kReshapeOperation: // finalize_graph() checks them together
      break;
    default:
      status = is_operation(of->kind) ? finalize_operation(*of) : kBadParam;
  }
  of->is_final = status == kSuccess;
  return status;
}

API cudnnBackendGetAttribute(Descriptor* given, int name, int type, int64_t room, int64_t* count, void* values) {
  ENTER();
  const auto of = find(given);
  REQUIRE(of != nullptr && count != nullptr && (values != nullptr || room == 0), kBadParam);
  if (of->kind == kHeuristics && name == 202) { // CUDNN_ATTR_ENGINEHEUR_RESULTS
    REQUIRE(of->is_final, kNotFinalized);
    REQUIRE(type == kDescriptor, kAttributeType);
    constexpr int engines = 3;
    const bool is_fallback = of->one<int>(200) == 2;
    *count = is_fallback ? 1 : engines; // the fallback is the engine that works
    for (int64_t i = 0; i < std::min(room, *count); ++i) {
      const auto config = find(static_cast<Descriptor**>(values)[i]);
      REQUIRE(config != nullptr && config->kind == kEngineConfig && !config->is_final, kBadParam);
      config->engine = is_fallback ? engines - 1 : static_cast<int>(i);
      config->used = {of->link(201)};
      config->is_final = true;
    }
    return kSuccess;
  }
  if (of->kind == kEngineConfig && name == 300) { // CUDNN_ATTR_ENGINECFG_ENGINE
    REQUIRE(of->is_final && room == 1, kNotFinalized);
    const auto engine = find(*static_cast<Descriptor**>(values));
    REQUIRE(type == kDescriptor && engine != nullptr && engine->kind == kEngine, kAttributeType);
    engine->engine = of->engine;
    engine->used = of->used;
    engine->is_final = true;
    *count = 1;
    return kSuccess;
  }
  if (of->kind == kEngine && name == 1303) { // CUDNN_ATTR_ENGINE_NUMERICAL_NOTE
    REQUIRE(of->is_final, kNotFinalized);
    REQUIRE(type == kNumericalNote, kAttributeType);
    // In turn: tensor cores (float32), converted inputs, or an order of additions that changes.
    const auto operation = of->used[0]->link(801);
    const bool is_float = is_operation(operation->kind) && Convolution(*operation).image.type == kFloats;
    const int note = is_float ? 0 : operation->kind == kForward ? 1 : 4;
    *count = of->engine == 1 ? 1 : 0;
    if (room >= 1 && *count == 1) {
      *static_cast<int*>(values) = note;
    }
    return kSuccess;
  }
  if (of->kind == kPlan && name == 402) { // CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE
    REQUIRE(of->is_final && room == 1, kNotFinalized);
    REQUIRE(type == kInt64, kAttributeType);
    *static_cast<int64_t*>(values) = of->workspace;
    *count = 1;
    return kSuccess;
  }
  return kNotSupported;
}

API cudnnBackendExecute(Handle* given, Descriptor* plan_given, Descriptor* pack_given) {
  ENTER();
  const Use use(given);
  RETURN_STATUS(use.status(kBadParam, kInternalError, kExecutionFailed))
  const auto plan = find(plan_given), pack = find(pack_given);
  REQUIRE(plan != nullptr && plan->kind == kPlan && plan->is_final, kNotFinalized);
  REQUIRE(pack != nullptr && pack->kind == kVariantPack && pack->is_final, kNotFinalized);
  REQUIRE(is_alive(*plan), kBadParam);
  const Descriptor& graph = *plan->link(401)->used[0];
  const auto ids = pack->all<int64_t>(1000);
  const auto pointers = pack->all<char*>(1001);
  char* const workspace = pack->one<char*>(1003);
  REQUIRE(is_device_memory(workspace, plan->workspace), kNullPointer);
  if (const auto attention = attention_of(graph)) {
    return attend(*attention, ids, pointers, workspace, *plan, use.handle->stream);
  }
  const Convolution of(*graph.link(801));
  std::vector<char*> found;
  for (const Tensor* tensor : {&of.weight, &of.image, &of.values}) {
    const auto at = std::find(ids.begin(), ids.end(), tensor->id);
    REQUIRE(at != ids.end(), kBadParam);
    char* const memory = pointers[at - ids.begin()];
    REQUIRE(is_device_memory(memory, tensor->bytes()), kBadParam);
    REQUIRE(reinterpret_cast<uintptr_t>(memory) % tensor->alignment == 0, kMisalignedPointer);
    found.push_back(memory);
  }
  const auto work = [of, found, workspace, bytes = plan->workspace, engine = plan->engine] {
    memset(workspace, 0xff, bytes); // it is not free for others
    const int type = of.image.type;
    if (engine == 1 && type == 0) {
      execute_in_tf32(of, found);
    } else if (engine == 1) { // the numbers that its note allows
      memset(found[of.kind == kForward ? 2 : of.kind == kOfImage ? 1 : 0], 0x11, of.result().bytes());
    } else if (type == 0) {
      execute<float>(of, found[0], found[1], found[2]);
    } else if (type == 1) {
      execute<double>(of, found[0], found[1], found[2]);
    } else if (type == 2) {
      execute<_Float16>(of, found[0], found[1], found[2]);
    } else {
      execute<BFloat16>(of, found[0], found[1], found[2]);
    }
  };
  return submit(use.handle->stream, work) == CUDA_SUCCESS ? kSuccess : kExecutionFailed;
}
