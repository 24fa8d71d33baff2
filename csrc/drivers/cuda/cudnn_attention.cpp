// Scaled dot product attention by cuDNN: graphs of products, a softmax and its gradient, which cuDNN's engines compute
// without storing the scores. The graphs are those that NVIDIA's cudnn-frontend builds, as engines know no others.

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "drivers/cuda/cudnn_graph.h"

namespace backplane::cuda::dnn::attention {
namespace {

constexpr std::array<NumberType, 2> kNumberTypes{{{"float16", kHalfNumbers}, {"bfloat16", kBfloat16Numbers}}};

// The integers of the families attention and attention_backward (docs/driver-contract.md). Strides are those of a
// batch, a head and a row.
enum Integer : size_t {
  kCausal,
  kHasBias,
  kBatch,
  kHeads,
  kKeyHeads,
  kQueries,
  kKeys,
  kColumns,
  kValueColumns,
  kQueryStrides,
  kKeyStrides = kQueryStrides + 3,
  kValueStrides = kKeyStrides + 3,
  kBiasStrides = kValueStrides + 3,
  kOutStrides = kBiasStrides + 3,
  kForwardIntegers = kOutStrides + 3,
  kGradStrides = kForwardIntegers,
  kQueryGradStrides = kGradStrides + 3,
  kKeyGradStrides = kQueryGradStrides + 3,
  kValueGradStrides = kKeyGradStrides + 3,
  kBackwardIntegers = kValueGradStrides + 3,
};

// The identities of tensors that are not virtual.
enum Id : int64_t {
  kQuery = 1,
  kKey,
  kValue,
  kBias,
  kOut,
  kLogarithm, // of the softmax's denominator, which cuDNN calls stats
  kGrad,
  kQueryGrad,
  kKeyGrad,
  kValueGrad,
  kProductSum, // of each row of grad · out
  kQuerySum, // query_grad in float32
  kScale,
  kLeftOut, // the score of keys that are left out
  kOne,
  kFirstVirtual = 100,
};

enum PointwiseMode : int { // cudnnPointwiseMode_t
  kAdd = 0,
  kMultiply = 1,
  kDivide = 6,
  kSubtract = 9,
  kExp = 13,
  kLog = 15,
  kIdentity = 21,
  kNotLess = 303,
  kIndex = 501,
  kSelect = 601,
};
enum ReductionOperator : int { kSum = 0, kMaximum = 3 }; // cudnnReduceTensorOp_t

// The key of a plan.
struct Shape {
  size_t type; // in kNumberTypes
  std::vector<int64_t> integers;
  auto operator<=>(const Shape&) const = default;

  bool is_backward() const {
    return integers.size() == kBackwardIntegers;
  }
  std::vector<Descriptor> graph(void* handle) const;
  // The gradient of the query is a sum that is added up in any order.
  bool accepts(const Notes& notes) const {
    return is_backward() || !notes.has(kNondeterministic);
  }
  // The elements of the float32 tensors of the backward, which follow each other in its workspace.
  int64_t product_sums() const {
    return integers[kBatch] * integers[kHeads] * integers[kQueries];
  }
  int64_t query_sums() const {
    return product_sums() * integers[kColumns];
  }
};

// A tensor of a graph.
struct Tensor {
  std::vector<int64_t> sizes, strides;
  void* descriptor;
};

std::vector<int64_t> contiguous(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size() - 1; d > 0; --d) {
    strides[d - 1] = strides[d] * sizes[d];
  }
  return strides;
}

Tensor transposed(Tensor tensor) {
  std::swap(tensor.sizes[2], tensor.sizes[3]);
  std::swap(tensor.strides[2], tensor.strides[3]);
  return tensor;
}

// Adds operations to a graph.
class Graph {
 public:
  explicit Graph(const Shape& shape) : all_(shape.integers), number_(kNumberTypes.at(shape.type).type) {}

  // An operand of attention, or its transposed matrices. Its columns are contiguous.
  Tensor operand(Id id, Integer heads, Integer rows, Integer columns, Integer strides, bool is_transposed = false) {
    Tensor made{
        {all_[kBatch], all_[heads], all_[rows], all_[columns]},
        {all_[strides], all_[strides + 1], all_[strides + 2], 1},
        nullptr};
    return add(id, number_, is_transposed ? transposed(made) : made, Place::Device);
  }
  // The same bias for all batches or heads has a stride of 0.
  Tensor bias() {
    const auto size = [&](Integer one, size_t stride) { return all_[kBiasStrides + stride] == 0 ? 1 : all_[one]; };
    Tensor made{
        {size(kBatch, 0), size(kHeads, 1), all_[kQueries], all_[kKeys]},
        {all_[kBiasStrides], all_[kBiasStrides + 1], all_[kBiasStrides + 2], 1},
        nullptr};
    for (size_t d = 2; d-- > 0;) {
      made.strides[d] = made.sizes[d] == 1 ? made.sizes[d + 1] * made.strides[d + 1] : made.strides[d];
    }
    return add(kBias, number_, made, Place::Device);
  }
  // A float32 number for each row of the queries, or for each of its columns.
  Tensor of_queries(Id id, int64_t columns = 1) {
    return add(id, kFloatNumbers, shaped({all_[kBatch], all_[kHeads], all_[kQueries], columns}), Place::Device);
  }
  Tensor number(Id id) {
    return add(id, kFloatNumbers, shaped({1, 1, 1, 1}), Place::Host);
  }
  Tensor between(const std::vector<int64_t>& sizes, Number type = kFloatNumbers) {
    return add(next_++, type, shaped(sizes), Place::Virtual);
  }
  Tensor between(const Tensor& like, Number type) {
    return add(next_++, type, like, Place::Virtual);
  }
  std::vector<int64_t> scores() const {
    return {all_[kBatch], all_[kHeads], all_[kQueries], all_[kKeys]};
  }
  std::vector<int64_t> rows() const {
    return {all_[kBatch], all_[kHeads], all_[kQueries], 1};
  }

  Tensor multiply_matrices(const Tensor& a, const Tensor& b, const Tensor& out) {
    Descriptor how(kProduct);
    how.set(kProductCompute, kDataTypeType, kFloatNumbers);
    Descriptor operation(kProductOperation);
    operation.set(kProductOf, kDescriptor, keep(std::move(how)));
    operation.set(kProductA, kDescriptor, a.descriptor);
    operation.set(kProductB, kDescriptor, b.descriptor);
    operation.set(kProductC, kDescriptor, out.descriptor);
    operations_.push_back(keep(std::move(operation)));
    return out;
  }
  Tensor pointwise(PointwiseMode mode, const std::vector<Tensor>& inputs, const Tensor& out, int64_t axis = -1) {
    constexpr std::array<Attribute, 3> names{kPointwiseX, kPointwiseB, kPointwiseT};
    Descriptor how(kPointwise);
    how.set(kPointwiseModeOf, kPointwiseMode, mode);
    how.set(kPointwiseCompute, kDataTypeType, mode == kNotLess ? kBooleans : kFloatNumbers);
    if (axis >= 0) {
      how.set(kPointwiseAxis, kInt64, axis);
    }
    Descriptor operation(kPointwiseOperation);
    operation.set(kPointwiseOf, kDescriptor, keep(std::move(how)));
    for (size_t i = 0; i < inputs.size(); ++i) {
      operation.set(names.at(i), kDescriptor, inputs[i].descriptor);
    }
    operation.set(kPointwiseY, kDescriptor, out.descriptor);
    operation.set(kPointwiseFactorX, kFloat, 1.0F);
    operation.set(kPointwiseFactorB, kFloat, 1.0F);
    operations_.push_back(keep(std::move(operation)));
    return out;
  }
  // The same for a result between operations, with the sizes of the first input.
  Tensor pointwise(PointwiseMode mode, const std::vector<Tensor>& inputs) {
    return pointwise(mode, inputs, between(inputs[0].sizes));
  }
  Tensor reduce(ReductionOperator how, const Tensor& from, const Tensor& out) {
    Descriptor reduction(kReduction);
    reduction.set(kReductionOperatorOf, kReductionOperator, how);
    reduction.set(kReductionCompute, kDataTypeType, kFloatNumbers);
    Descriptor operation(kReductionOperation);
    operation.set(kReductionOf, kDescriptor, keep(std::move(reduction)));
    operation.set(kReductionX, kDescriptor, from.descriptor);
    operation.set(kReductionY, kDescriptor, out.descriptor);
    operations_.push_back(keep(std::move(operation)));
    return out;
  }
  // The transposed matrices, in the dtype of the operands.
  Tensor transpose(const Tensor& from) {
    const Tensor out = between(transposed(from), number_);
    Descriptor operation(kReshapeOperation);
    operation.set(kReshapeX, kDescriptor, from.descriptor);
    operation.set(kReshapeY, kDescriptor, out.descriptor);
    operations_.push_back(keep(std::move(operation)));
    return out;
  }

  // The scores, without those that a causal mask leaves out.
  Tensor causal(const Tensor& scores) {
    if (all_[kCausal] == 0) {
      return scores;
    }
    const Tensor row = pointwise(kIndex, {scores}, between(scores.sizes, kInt32Numbers), 2);
    const Tensor column = pointwise(kIndex, {scores}, between(scores.sizes, kInt32Numbers), 3);
    const Tensor kept = pointwise(kNotLess, {row, column}, between(scores.sizes, kBooleans));
    return pointwise(kSelect, {scores, number(kLeftOut), kept});
  }
  Tensor scaled_product(const Tensor& query, const Tensor& key, const Tensor& scale) {
    const Tensor product = pointwise(kMultiply, {multiply_matrices(query, key, between(scores())), scale});
    return all_[kHasBias] == 0 ? product : pointwise(kAdd, {product, bias()});
  }
  // The gradient of the key or the value: the product, summed over the query heads that share one of the operand's.
  void multiply_to_shared(const Tensor& a, const Tensor& b, const Tensor& out) {
    if (all_[kHeads] == all_[kKeyHeads]) {
      multiply_matrices(a, b, out);
    } else {
      std::vector<int64_t> sizes = out.sizes;
      sizes[1] = all_[kHeads];
      reduce(kSum, multiply_matrices(a, b, between(sizes, number_)), out);
    }
  }

  std::vector<Descriptor> finalized(void* handle) {
    made_.push_back(operation_graph(handle, operations_));
    return std::move(made_);
  }

  Number number_type() const {
    return number_;
  }

 private:
  static Tensor shaped(const std::vector<int64_t>& sizes) {
    return {sizes, contiguous(sizes), nullptr};
  }
  Tensor add(int64_t id, Number type, Tensor made, Place place) {
    made_.push_back(tensor(id, type, made.sizes, made.strides, place));
    made.descriptor = made_.back().get();
    return made;
  }
  void* keep(Descriptor made) {
    made.finalize();
    made_.push_back(std::move(made));
    return made_.back().get();
  }

  const std::vector<int64_t>& all_;
  const Number number_;
  int64_t next_ = kFirstVirtual;
  std::vector<Descriptor> made_;
  std::vector<void*> operations_;
};

void add_forward(Graph& graph) {
  const Tensor query = graph.operand(kQuery, kHeads, kQueries, kColumns, kQueryStrides);
  const Tensor key = graph.operand(kKey, kKeyHeads, kKeys, kColumns, kKeyStrides, true);
  const Tensor value = graph.operand(kValue, kKeyHeads, kKeys, kValueColumns, kValueStrides);
  const Tensor scores = graph.causal(graph.scaled_product(query, key, graph.number(kScale)));
  const Tensor maximum = graph.reduce(kMaximum, scores, graph.between(graph.rows()));
  const Tensor powers = graph.pointwise(kExp, {graph.pointwise(kSubtract, {scores, maximum})});
  const Tensor total = graph.reduce(kSum, powers, graph.between(graph.rows()));
  graph.pointwise(kAdd, {maximum, graph.pointwise(kLog, {total})}, graph.of_queries(kLogarithm));
  const Tensor weights = graph.pointwise(kDivide, {powers, total}, graph.between(graph.scores(), graph.number_type()));
  graph.multiply_matrices(weights, value, graph.operand(kOut, kHeads, kQueries, kValueColumns, kOutStrides));
}

// With the weights P, their gradients dP = grad · valueᵀ and those of the scores, dS = P ∘ (dP − sum(grad ∘ out)), the
// gradients are Pᵀ · grad, dSᵀ · query and dS · key.
void add_backward(Graph& graph, const std::vector<int64_t>& all) {
  const Tensor query = graph.operand(kQuery, kHeads, kQueries, kColumns, kQueryStrides);
  const Tensor key = graph.operand(kKey, kKeyHeads, kKeys, kColumns, kKeyStrides, true);
  const Tensor value = graph.operand(kValue, kKeyHeads, kKeys, kValueColumns, kValueStrides, true);
  const Tensor out = graph.operand(kOut, kHeads, kQueries, kValueColumns, kOutStrides);
  const Tensor grad = graph.operand(kGrad, kHeads, kQueries, kValueColumns, kGradStrides);
  const Tensor scale = graph.number(kScale);
  const Tensor sum = graph.reduce(kSum, graph.pointwise(kMultiply, {grad, out}), graph.between(graph.rows()));
  const Tensor sums = graph.pointwise(kMultiply, {sum, graph.number(kOne)}, graph.of_queries(kProductSum));

  const Tensor product = graph.scaled_product(query, key, scale);
  const Tensor scores = graph.causal(graph.pointwise(kSubtract, {product, graph.of_queries(kLogarithm)}));
  const Tensor weights = graph.pointwise(kExp, {scores});
  graph.multiply_to_shared(
      graph.transpose(weights), grad, graph.operand(kValueGrad, kKeyHeads, kKeys, kValueColumns, kValueGradStrides));

  const Tensor of_weights = graph.multiply_matrices(grad, value, graph.between(graph.scores()));
  const Tensor of_exponents = graph.pointwise(kMultiply, {graph.pointwise(kSubtract, {of_weights, sums}), weights});
  const Tensor of_scores = graph.pointwise(kMultiply, {of_exponents, scale});
  graph.multiply_to_shared(
      graph.transpose(of_scores), query, graph.operand(kKeyGrad, kKeyHeads, kKeys, kColumns, kKeyGradStrides));
  const Tensor query_sum =
      graph.multiply_matrices(of_scores, graph.transpose(key), graph.of_queries(kQuerySum, all[kColumns]));
  graph.pointwise(kIdentity, {query_sum}, graph.operand(kQueryGrad, kHeads, kQueries, kColumns, kQueryGradStrides));
}

std::vector<Descriptor> Shape::graph(void* handle) const {
  Graph made(*this);
  is_backward() ? add_backward(made, integers) : add_forward(made);
  return made.finalized(handle);
}

// The workspace of the backward: what the plan needs, then the tensors of the graph that are no arguments.
struct Workspace {
  Workspace(const Shape& shape, int64_t of_plan)
      : product_sums(padded(of_plan)),
        query_sums(product_sums + padded(shape.is_backward() ? shape.product_sums() * bytes : 0)),
        all(query_sums + (shape.is_backward() ? shape.query_sums() * bytes : 0)) {}

  static constexpr int64_t bytes = sizeof(float);
  static int64_t padded(int64_t size) {
    constexpr int64_t unit = 256;
    return (size + unit - 1) / unit * unit;
  }

  int64_t product_sums, query_sums; // where they begin
  int64_t all;
};

std::pair<int, size_t> workspace(size_t index, size_t type, c10::ArrayRef<int64_t> integers) {
  const Shape shape{type, integers.vec()};
  size_t bytes = 0;
  const int status = with_plan(index, shape, [&](void*, const Plan& plan) {
    bytes = static_cast<size_t>(Workspace(shape, plan.workspace()).all);
    return 0;
  });
  return {status, bytes};
}

// Runs a plan. `ids`: of the memory arguments, which the scale, the integers and the workspace follow.
int attend(
    size_t index, size_t type, size_t integers, c10::ArrayRef<int64_t> ids, void* queue, const CArgument* arguments) {
  Shape shape{type, {}};
  const CArgument* given = arguments + ids.size();
  float scale = *static_cast<const float*>(given++->data);
  for (size_t i = 0; i < integers; ++i) {
    shape.integers.push_back(*static_cast<const int64_t*>(given++->data));
  }
  return with_plan(index, shape, [&](void* handle, const Plan& plan) {
    const Workspace needed(shape, plan.workspace());
    if (*static_cast<const int64_t*>(given[1].data) < needed.all) {
      return static_cast<int>(kSizeInsufficient);
    }
    float left_out = -std::numeric_limits<float>::infinity(), one = 1;
    auto* const memory = static_cast<char*>(given[0].memory);
    std::vector<int64_t> every;
    std::vector<void*> pointers;
    const auto add = [&](int64_t id, void* pointer) {
      every.push_back(id);
      pointers.push_back(pointer);
    };
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] != kBias || shape.integers[kHasBias] != 0) {
        add(ids[i], arguments[i].memory);
      }
    }
    add(kScale, &scale);
    if (shape.integers[kCausal] != 0) {
      add(kLeftOut, &left_out);
    }
    if (shape.is_backward()) {
      add(kOne, &one);
      add(kProductSum, memory + needed.product_sums);
      add(kQuerySum, memory + needed.query_sums);
    }
    const int status = cudnn.cudnnSetStream(handle, queue);
    return status != 0 ? status : plan.run(handle, every, pointers, memory);
  });
}

int forward(size_t index, size_t type, void* queue, const CArgument* arguments) {
  constexpr std::array<int64_t, 6> ids{kOut, kLogarithm, kQuery, kKey, kValue, kBias};
  return attend(index, type, kForwardIntegers, ids, queue, arguments);
}

int backward(size_t index, size_t type, void* queue, const CArgument* arguments) {
  constexpr std::array<int64_t, 10> ids{kQueryGrad, kKeyGrad, kValueGrad, kGrad, kQuery,
                                        kKey,       kValue,   kBias,      kOut,  kLogarithm};
  return attend(index, type, kBackwardIntegers, ids, queue, arguments);
}

} // namespace

const Routines& forward_routines() {
  static const Routines routines{
      "attention", kNumberTypes, kRoutinesOf<&forward, kNumberTypes.size()>, kForwardIntegers, &workspace};
  return routines;
}

const Routines& backward_routines() {
  static const Routines routines{
      "attention_backward", kNumberTypes, kRoutinesOf<&backward, kNumberTypes.size()>, kBackwardIntegers, &workspace};
  return routines;
}

} // namespace backplane::cuda::dnn::attention
