#include <algorithm>
#include <array>
#include <vector>

#include "drivers/cuda/cudnn_graph.h"

namespace backplane::cuda::dnn::convolution {
namespace {

constexpr int kCrossCorrelation = 1; // cudnnConvolutionMode_t

constexpr std::array<NumberType, 4> kNumberTypes{
    {{"float32", kFloatNumbers},
     {"float64", kDoubleNumbers},
     {"float16", kHalfNumbers},
     {"bfloat16", kBfloat16Numbers}}};

// The integers of the family convolution (docs/driver-contract.md). The arrays have 3 spatial dimensions.
enum Integer : size_t {
  kPass,
  kChannelsLast,
  kGroups,
  kBatch,
  kImageChannels,
  kChannels,
  kImage,
  kWindow = kImage + 3,
  kStride = kWindow + 3,
  kPadding = kStride + 3,
  kDilation = kPadding + 3,
  kAllowed = kDilation + 3,
  kIntegers,
};
constexpr int64_t kTf32 = 1; // of kAllowed
enum Pass : int64_t { kForward = 0, kOfImage = 1, kOfWeight = 2 };

// The key of a plan.
struct Shape {
  size_t type; // in kNumberTypes
  std::array<int64_t, kIntegers> integers;
  auto operator<=>(const Shape&) const = default;

  std::vector<Descriptor> graph(void* handle) const;
  bool accepts(const Notes& notes) const;
};

// The contiguous strides of a tensor, whose dimension 1 is the innermost one if `channels_last`.
std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes, bool channels_last) {
  std::vector<int64_t> strides(sizes.size(), 1);
  int64_t step = channels_last ? sizes[1] : 1;
  for (size_t d = sizes.size() - 1; d > 1; step *= sizes[d--]) {
    strides[d] = step;
  }
  if (!channels_last) {
    strides[1] = step;
    step *= sizes[1];
  }
  strides[0] = step;
  return strides;
}

Descriptor tensor_of(int64_t id, Number type, const std::vector<int64_t>& sizes, bool channels_last) {
  return tensor(id, type, sizes, strides_of(sizes, channels_last));
}

// The numbers of a convolution along its spatial dimensions: two, or three if the first one is not trivial.
struct Spatial {
  explicit Spatial(const std::array<int64_t, kIntegers>& all)
      : first(all[kImage] == 1 && all[kWindow] == 1 && all[kPadding] == 0 ? 1 : 0) {
    for (size_t d = first; d < 3; ++d) {
      image.push_back(all[kImage + d]);
      window.push_back(all[kWindow + d]);
      stride.push_back(all[kStride + d]);
      padding.push_back(all[kPadding + d]);
      dilation.push_back(all[kDilation + d]);
      const int64_t reach = (window.back() - 1) * dilation.back() + 1;
      places.push_back((image.back() + 2 * padding.back() - reach) / stride.back() + 1);
    }
  }

  size_t first;
  std::vector<int64_t> image, window, stride, padding, dilation, places;
};

std::vector<int64_t> joined(int64_t first, int64_t second, std::vector<int64_t> rest) {
  rest.insert(rest.begin(), {first, second});
  return rest;
}

// The operation's attributes: alpha, beta, the convolution, the weight, the image and the values. The descriptors of
// tensors have the numbers of the family's memory arguments: 0 is the result.
struct Operation {
  Kind kind;
  std::array<int, 6> attributes;
  int64_t weight, image, values;
};
constexpr std::array<Operation, 3> kOperations{{
    {kForwardOperation, {700, 701, 702, 703, 704, 705}, 2, 1, 0},
    {kDataOperation, {706, 707, 708, 709, 710, 711}, 2, 0, 1},
    {kFilterOperation, {712, 713, 714, 715, 716, 717}, 0, 2, 1},
}};

// The graph of one operation.
std::vector<Descriptor> Shape::graph(void* handle) const {
  const auto& all = integers;
  const Number number = kNumberTypes.at(type).type;
  const bool is_double = number == kDoubleNumbers;
  const Spatial spatial(all);
  Descriptor convolution(kConvolution);
  convolution.set(kConvolutionCompute, kDataTypeType, is_double ? kDoubleNumbers : kFloatNumbers);
  convolution.set(kConvolutionModeOf, kConvolutionMode, kCrossCorrelation);
  convolution.set(kConvolutionDimensions, kInt64, static_cast<int64_t>(spatial.image.size()));
  convolution.set(kConvolutionDilations, spatial.dilation);
  convolution.set(kConvolutionStrides, spatial.stride);
  convolution.set(kConvolutionPaddingBefore, spatial.padding);
  convolution.set(kConvolutionPaddingAfter, spatial.padding);
  convolution.finalize();

  const Operation& named = kOperations.at(static_cast<size_t>(all[kPass]));
  const bool channels_last = all[kChannelsLast] != 0;
  const int64_t of_group = all[kImageChannels] / all[kGroups];
  Descriptor weight = tensor_of(named.weight, number, joined(all[kChannels], of_group, spatial.window), channels_last);
  Descriptor image =
      tensor_of(named.image, number, joined(all[kBatch], all[kImageChannels], spatial.image), channels_last);
  Descriptor values =
      tensor_of(named.values, number, joined(all[kBatch], all[kChannels], spatial.places), channels_last);
  const auto attribute = [&named](size_t at) { return static_cast<Attribute>(named.attributes.at(at)); };
  Descriptor operation(named.kind);
  if (is_double) {
    operation.set(attribute(0), kDouble, 1.0);
    operation.set(attribute(1), kDouble, 0.0);
  } else {
    operation.set(attribute(0), kFloat, 1.0F);
    operation.set(attribute(1), kFloat, 0.0F);
  }
  operation.set(attribute(2), convolution);
  operation.set(attribute(3), weight);
  operation.set(attribute(4), image);
  operation.set(attribute(5), values);
  operation.finalize();

  Descriptor graph = operation_graph(handle, operation.get());
  std::vector<Descriptor> made;
  for (Descriptor* one : {&convolution, &weight, &image, &values, &operation, &graph}) {
    made.push_back(std::move(*one));
  }
  return made;
}

// Whether an engine computes with the precision of the dtype, or one that is allowed, and in a fixed order.
bool Shape::accepts(const Notes& notes) const {
  const bool is_float = kNumberTypes.at(type).type == kFloatNumbers; // tensor cores compute it in TF32
  const bool can_use_tensor_cores = !is_float || (integers[kAllowed] & kTf32) != 0;
  return !notes.has(kConvertsInputs) && !notes.has(kNondeterministic) &&
      (can_use_tensor_cores || !notes.has(kTensorCore));
}

// The arguments of the family convolution, with a workspace.
int convolve(size_t index, size_t type, void* queue, const CArgument* arguments) {
  Shape shape{type, {}};
  for (size_t i = 0; i < kIntegers; ++i) {
    shape.integers.at(i) = *static_cast<const int64_t*>(arguments[3 + i].data);
  }
  const CArgument* const given = arguments + 3 + kIntegers; // the workspace
  return with_plan(index, shape, [&](void* handle, const Plan& plan) {
    if (*static_cast<const int64_t*>(given[1].data) < plan.workspace()) {
      return static_cast<int>(kSizeInsufficient);
    }
    const int status = cudnn.cudnnSetStream(handle, queue);
    return status != 0
        ? status
        : plan.run(handle, {0, 1, 2}, {arguments[0].memory, arguments[1].memory, arguments[2].memory}, given[0].memory);
  });
}

std::pair<int, size_t> workspace(size_t index, size_t type, c10::ArrayRef<int64_t> integers) {
  Shape shape{type, {}};
  std::copy(integers.begin(), integers.end(), shape.integers.begin());
  size_t bytes = 0;
  const int status = with_plan(index, shape, [&bytes](void*, const Plan& plan) {
    bytes = static_cast<size_t>(plan.workspace());
    return 0;
  });
  return {status, bytes};
}

} // namespace

const Routines& routines() {
  static const Routines found{
      "convolution", kNumberTypes, kRoutinesOf<&convolve, kNumberTypes.size()>, kIntegers, &workspace};
  return found;
}

} // namespace backplane::cuda::dnn::convolution
