// Graphs of attention and its gradients, which the emulated cuDNN checks strictly, and computes operation by operation.

#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <set>

#include "cudnn_descriptors.h"
#include "numbers.h"

// The attributes of the descriptors. Those in `optional` need not be set.
struct AttributeTypes {
  std::map<int, int> required, optional;
};

inline AttributeTypes attention_types(Kind kind) {
  switch (kind) {
    case kPointwise:
      return {{{0, kPointwiseMode}, {1, kDataType}}, {{9, kInt64}}};
    case kPointwiseOperation:
      return {
          {{750, kDescriptor}, {751, kDescriptor}, {753, kDescriptor}, {754, kFloat}, {755, kFloat}},
          {{752, kDescriptor}, {758, kDescriptor}}};
    case kProduct:
      return {{{1500, kDataType}}, {}};
    case kProductOperation:
      return {{{1520, kDescriptor}, {1521, kDescriptor}, {1522, kDescriptor}, {1523, kDescriptor}}, {}};
    case kReduction:
      return {{{1600, kReductionOperator}, {1601, kDataType}}, {}};
    case kReductionOperation:
      return {{{1610, kDescriptor}, {1611, kDescriptor}, {1612, kDescriptor}}, {}};
    case kReshapeOperation:
      return {{{2200, kDescriptor}, {2201, kDescriptor}}, {}};
    default:
      return {};
  }
}

inline bool is_attention_operation(Kind kind) {
  return kind == kPointwiseOperation || kind == kProductOperation || kind == kReductionOperation ||
      kind == kReshapeOperation;
}

using Numbers = std::vector<double>; // of a tensor, contiguous

// An operation: its descriptor, and its tensors.
struct Step {
  explicit Step(const Descriptor& of) : kind(of.kind) {
    const auto add = [&of](std::vector<Tensor>& to, std::initializer_list<int> names) {
      for (const int name : names) {
        if (of.has(name)) {
          to.emplace_back(*of.link(name));
        }
      }
    };
    if (kind == kPointwiseOperation) {
      const auto how = of.link(750);
      mode = how->one<int>(0);
      compute = how->one<int>(1);
      axis = how->has(9) ? how->one<int64_t>(9) : -1;
      has_factors = of.one<float>(754) != 1 || of.one<float>(755) != 1;
      add(inputs, {751, 752, 758});
      add(outputs, {753});
    } else if (kind == kProductOperation) {
      compute = of.link(1523)->one<int>(1500);
      add(inputs, {1520, 1521});
      add(outputs, {1522});
    } else if (kind == kReductionOperation) {
      mode = of.link(1612)->one<int>(1600);
      compute = of.link(1612)->one<int>(1601);
      add(inputs, {1610});
      add(outputs, {1611});
    } else {
      add(inputs, {2200});
      add(outputs, {2201});
    }
  }

  const Tensor& out() const {
    return outputs.front();
  }

  int check() const {
    REQUIRE(!has_factors, kNotSupported);
    const bool compares = kind == kPointwiseOperation && mode == kNotLess;
    REQUIRE(kind == kReshapeOperation || compute == (compares ? kBooleans : kFloats), kNotSupported);
    const auto& x = inputs.front().sizes;
    const auto& y = out().sizes;
    if (kind == kProductOperation) {
      const auto& b = inputs[1].sizes;
      REQUIRE(b[1] != 0 && x[1] % b[1] == 0 && x[0] == b[0] && x[3] == b[2], kShapeMismatch);
      return y == std::vector<int64_t>{x[0], x[1], x[2], b[3]} ? kSuccess : kShapeMismatch;
    }
    if (kind == kReshapeOperation) {
      return y == std::vector<int64_t>{x[0], x[1], x[3], x[2]} ? kSuccess : kShapeMismatch;
    }
    if (kind == kReductionOperation) {
      REQUIRE(mode == kSum || mode == kMaximum, kNotSupported);
      for (size_t d = 0; d < 4; ++d) { // heads can be summed in groups
        REQUIRE(y[d] == x[d] || y[d] == 1 || (d == 1 && x[d] % y[d] == 0), kShapeMismatch);
      }
      return kSuccess;
    }
    const std::map<int, size_t> operands{{kAdd, 2}, {kMultiply, 2}, {kDivide, 2},  {kSubtract, 2}, {kExp, 1},
                                         {kLog, 1}, {kIdentity, 1}, {kNotLess, 2}, {kIndex, 1},    {kSelect, 3}};
    const auto expected = operands.find(mode);
    REQUIRE(expected != operands.end(), kNotSupported);
    REQUIRE(inputs.size() == expected->second && x == y, kBadParam);
    REQUIRE((mode == kIndex) == (axis >= 0 && axis < 4), kBadParam);
    REQUIRE(mode != kIndex || out().type == kInt32s, kNotSupported);
    REQUIRE(!compares || out().type == kBooleans, kNotSupported);
    REQUIRE(mode != kSelect || (inputs[2].type == kBooleans && inputs[2].sizes == x), kBadParam);
    for (const Tensor& one : inputs) {
      for (size_t d = 0; d < 4; ++d) {
        REQUIRE(one.sizes[d] == x[d] || one.sizes[d] == 1, kShapeMismatch);
      }
    }
    return kSuccess;
  }

  void execute(std::map<int64_t, Numbers>& memory) const {
    const Tensor& y = out();
    const bool is_maximum = kind == kReductionOperation && mode == kMaximum;
    Numbers found(y.elements(), is_maximum ? -std::numeric_limits<double>::infinity() : 0);
    const auto at = [](const Tensor& tensor, const std::vector<int64_t>& index) {
      int64_t place = 0; // dimensions of one element are broadcast
      for (size_t d = 0; d < index.size(); ++d) {
        place = place * tensor.sizes[d] + (tensor.sizes[d] == 1 ? 0 : index[d]);
      }
      return place;
    };
    const auto value = [&](size_t i, const std::vector<int64_t>& index) {
      return memory.at(inputs[i].id)[at(inputs[i], index)];
    };
    if (kind == kReductionOperation) {
      for_each(inputs[0].sizes, [&](const std::vector<int64_t>& index) {
        std::vector<int64_t> reduced = index;
        if (y.sizes[1] != 1) {
          reduced[1] /= inputs[0].sizes[1] / y.sizes[1];
        }
        double& result = found[at(y, reduced)];
        result = is_maximum ? std::max(result, value(0, index)) : result + value(0, index);
      });
    } else {
      for_each(y.sizes, [&](const std::vector<int64_t>& index) {
        double& result = found[at(y, index)];
        if (kind == kReshapeOperation) {
          result = value(0, {index[0], index[1], index[3], index[2]});
        } else if (kind == kProductOperation) {
          const int64_t group = inputs[0].sizes[1] / inputs[1].sizes[1];
          for (int64_t k = 0; k < inputs[1].sizes[2]; ++k) {
            result += value(0, {index[0], index[1], index[2], k}) * value(1, {index[0], index[1] / group, k, index[3]});
          }
        } else {
          result = pointwise(index, value);
        }
      });
    }
    if (number_bytes(y.type) == 2) {
      for (double& one : found) {
        one = y.type == kHalves ? static_cast<double>(rounded<_Float16>(one))
                                : static_cast<double>(rounded<BFloat16>(one));
      }
    }
    memory[y.id] = std::move(found);
  }

  Kind kind;
  int mode = 0, compute = kFloats;
  int64_t axis = -1;
  bool has_factors = false;
  std::vector<Tensor> inputs, outputs;

 private:
  enum Mode : int { // cudnnPointwiseMode_t
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
  enum Operator : int { kSum = 0, kMaximum = 3 }; // cudnnReduceTensorOp_t

  template <class Value>
  double pointwise(const std::vector<int64_t>& index, const Value& value) const {
    switch (mode) {
      case kAdd:
        return value(0, index) + value(1, index);
      case kMultiply:
        return value(0, index) * value(1, index);
      case kDivide:
        return value(0, index) / value(1, index);
      case kSubtract:
        return value(0, index) - value(1, index);
      case kExp:
        return std::exp(value(0, index));
      case kLog:
        return std::log(value(0, index));
      case kNotLess:
        return value(0, index) >= value(1, index);
      case kIndex:
        return static_cast<double>(index[axis]);
      case kSelect:
        return value(2, index) != 0 ? value(0, index) : value(1, index);
      default:
        return value(0, index);
    }
  }
};

class AttentionGraph {
 public:
  explicit AttentionGraph(const std::vector<std::shared_ptr<Descriptor>>& operations) {
    for (const auto& one : operations) {
      steps_.emplace_back(*one);
    }
  }

  bool is_backward() const {
    return products() == 5;
  }

  // Whether engines support the graph. All tensors that are not virtual are in `memory`.
  int check() {
    REQUIRE(products() == 2 || products() == 5, kNotSupported);
    std::set<int64_t> made;
    for (const Step& step : steps_) {
      RETURN_STATUS(step.check())
      for (const Tensor& one : step.inputs) {
        REQUIRE(!one.is_virtual || made.count(one.id) != 0, kBadParam); // not made yet
        RETURN_STATUS(add(one))
      }
      REQUIRE(made.insert(step.out().id).second, kDuplicatedEntries);
      REQUIRE(!step.out().is_by_value, kBadParam);
      RETURN_STATUS(add(step.out()))
    }
    for (const auto& [id, one] : tensors_) {
      const bool is_operand = number_bytes(one.type) == 2 && !one.is_virtual;
      REQUIRE(!is_operand || is_loadable(one), kNotSupportedLayout);
      if (one.is_by_value) {
        REQUIRE(one.elements() == 1 && one.type == kFloats, kNotSupported);
      } else if (!one.is_virtual && one.type == kFloats) { // sums and logarithms of rows
        REQUIRE(one.is_dense(), kNotSupportedLayout);
      }
      REQUIRE(one.is_virtual || one.type == kFloats || is_operand, kNotSupported);
    }
    return kSuccess;
  }

  // Executes the graph. `pointers`: of device tensors. `values`: of the others.
  void execute(const std::map<int64_t, char*>& pointers, const std::map<int64_t, float>& values) const {
    std::map<int64_t, Numbers> memory;
    std::set<int64_t> made;
    for (const auto& [id, value] : values) {
      memory[id] = {value};
    }
    for (const Step& step : steps_) {
      for (const Tensor& one : step.inputs) {
        if (!one.is_virtual && !one.is_by_value && made.count(one.id) == 0) {
          memory[one.id] = load(one, pointers.at(one.id));
        }
      }
      step.execute(memory);
      made.insert(step.out().id);
    }
    for (const int64_t id : made) {
      const Tensor& one = tensors_.at(id);
      if (!one.is_virtual) {
        store(one, memory.at(id), pointers.at(id));
      }
    }
  }

  const std::map<int64_t, Tensor>& tensors() const {
    return tensors_;
  }

 private:
  int64_t products() const {
    return std::count_if(steps_.begin(), steps_.end(), [](const Step& one) { return one.kind == kProductOperation; });
  }

  // An identity has one descriptor.
  int add(const Tensor& one) {
    REQUIRE(one.sizes.size() == 4, kNotSupported);
    const Tensor& known = tensors_.emplace(one.id, one).first->second;
    const bool is_same = known.sizes == one.sizes && known.strides == one.strides && known.type == one.type &&
        known.is_virtual == one.is_virtual && known.is_by_value == one.is_by_value;
    return is_same ? kSuccess : kDuplicatedEntries;
  }

  // Engines load and store rows of operands in units of 16 bytes. Masks are the tensors with other rows.
  static bool is_loadable(const Tensor& one) {
    const size_t columns = one.strides[3] == 1 ? 3 : 2; // of a transposed operand
    if (one.strides[columns] != 1 || one.alignment != 16) {
      return false;
    }
    for (size_t d = 0; d < 4; ++d) {
      if (d != columns && one.sizes[d] != 1 && one.strides[d] % 8 != 0 && one.sizes[columns] % 8 == 0) {
        return false;
      }
    }
    return true;
  }

  static Numbers load(const Tensor& from, const char* memory) {
    Numbers found;
    for_each(from.sizes, [&](const std::vector<int64_t>& index) {
      const char* const at = memory + offset(from, index) * number_bytes(from.type);
      found.push_back(
          from.type == kFloats       ? static_cast<double>(read<float>(at))
              : from.type == kHalves ? static_cast<double>(read<_Float16>(at))
                                     : static_cast<double>(read<BFloat16>(at)));
    });
    return found;
  }

  static void store(const Tensor& to, const Numbers& numbers, char* memory) {
    size_t next = 0;
    for_each(to.sizes, [&](const std::vector<int64_t>& index) {
      char* const at = memory + offset(to, index) * number_bytes(to.type);
      const double value = numbers[next++];
      if (to.type == kFloats) {
        write(at, static_cast<float>(value));
      } else if (to.type == kHalves) {
        write(at, rounded<_Float16>(value));
      } else {
        write(at, rounded<BFloat16>(value));
      }
    });
  }

  template <class T>
  static T read(const char* at) {
    T value;
    memcpy(&value, at, sizeof value);
    return value;
  }
  template <class T>
  static void write(char* at, T value) {
    memcpy(at, &value, sizeof value);
  }

  std::vector<Step> steps_;
  std::map<int64_t, Tensor> tensors_;
};
