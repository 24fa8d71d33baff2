// C++ version of the launch geometry in torch_backplane/kernels/layouts.py, for concrete sizes. The Python version also
// works on symbols and is used in traces; all other planner calls use this one. Both must give the same results.
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/TensorIterator.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace backplane {
namespace {

using Numbers = c10::SmallVector<int64_t, 8>;

constexpr int64_t kNarrowLimit = INT32_MAX;

struct Dimension {
  int64_t size;
  Numbers steps; // stride of each operand, in elements
};

struct Dimensions {
  std::vector<Dimension> inner_to_outer;

  int64_t count() const {
    return std::accumulate(
        inner_to_outer.begin(), inner_to_outer.end(), int64_t{1},
        [](int64_t count, const Dimension& one) { return count * one.size; });
  }
  // The distance in elements from an operand's first element to its furthest one.
  int64_t reach(size_t operand) const {
    int64_t furthest = 0;
    for (const Dimension& one : inner_to_outer) {
      furthest += (one.size - 1) * one.steps[operand];
    }
    return furthest;
  }
  py::tuple sizes() const {
    py::tuple found(inner_to_outer.size());
    for (size_t i = 0; i < inner_to_outer.size(); ++i) {
      found[i] = inner_to_outer[i].size;
    }
    return found;
  }
  py::tuple strides(size_t operands) const {
    py::tuple found(operands);
    for (size_t operand = 0; operand < operands; ++operand) {
      py::tuple steps(inner_to_outer.size());
      for (size_t i = 0; i < inner_to_outer.size(); ++i) {
        steps[i] = inner_to_outer[i].steps[operand];
      }
      found[operand] = std::move(steps);
    }
    return found;
  }
};

// Drops dimensions of size 1, sorts the rest by stride, and merges adjacent dimensions that every operand traverses
// as one.
Dimensions collapse(std::vector<Dimension> given, bool keep_order) {
  std::erase_if(given, [](const Dimension& one) { return one.size == 1; });
  std::reverse(given.begin(), given.end());
  if (!keep_order) {
    std::stable_sort(given.begin(), given.end(), [](const Dimension& one, const Dimension& other) {
      return std::lexicographical_compare(one.steps.begin(), one.steps.end(), other.steps.begin(), other.steps.end());
    });
  }
  Dimensions merged;
  for (Dimension& one : given) {
    if (!merged.inner_to_outer.empty()) {
      Dimension& last = merged.inner_to_outer.back();
      const bool continues = std::equal(
          one.steps.begin(), one.steps.end(), last.steps.begin(),
          [&](int64_t step, int64_t inner) { return step == inner * last.size; });
      if (continues) {
        last.size *= one.size;
        continue;
      }
    }
    merged.inner_to_outer.push_back(std::move(one));
  }
  return merged;
}

// The tensor's stride in dimension `dim` of the shape that it is broadcast to.
int64_t broadcast_stride(const at::Tensor& tensor, c10::IntArrayRef shape, size_t dim) {
  const size_t missing = shape.size() - tensor.dim();
  if (dim < missing) {
    return 0;
  }
  const auto own = static_cast<int64_t>(dim - missing);
  return tensor.size(own) == 1 && shape[dim] != 1 ? 0 : tensor.stride(own);
}

int64_t positions_stride(std::optional<int64_t> along, c10::IntArrayRef shape, size_t dim) {
  if (!along.has_value()) {
    return std::accumulate(shape.begin() + dim + 1, shape.end(), int64_t{1}, std::multiplies<>());
  }
  const auto rank = static_cast<int64_t>(shape.size());
  if (*along < -rank || *along >= rank) {
    throw py::index_error(c10::str("the position in dimension ", *along, " of ", rank));
  }
  return static_cast<int64_t>(dim) == (*along + rank) % rank ? 1 : 0;
}

bool is_aligned(const at::Tensor& tensor, size_t size) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % size == 0;
}

// A tile over the innermost dimension (width) and dimension `along` (height); see Layout.tile in layouts.py.
struct Tile {
  size_t along = 0; // 0: no tile
  int64_t width = 0;
  int64_t height = 0;
  std::vector<int64_t> inner; // for each operand, as Layout.inner
};

constexpr int64_t kSector = 32;
constexpr int64_t kMinTile = 128;
constexpr int64_t kStaged = 3;

int64_t side(int64_t size, int64_t most) {
  int64_t side = 2;
  while (side < most && side < size) {
    side *= 2;
  }
  return side;
}

int64_t tile_pitch(const Tile& tile, int64_t itemsize) {
  return tile.height + std::max<int64_t>(1, 4 / itemsize) * std::max<int64_t>(1, 32 / tile.width);
}

// `staged`: for each operand, the bytes of an element if it is an input, otherwise 0. `memory`: bytes available for
// tiles. `fixed`: the side of every tile; matrices with a side shorter than half of it get none. 0: chosen from the
// sizes.
Tile find_tile(
    const std::vector<Dimension>& dimensions, const std::vector<int64_t>& staged, int64_t memory, int64_t fixed) {
  Tile tile;
  const auto step = [&](size_t dim, size_t operand) { return dimensions[dim].steps[operand]; };
  for (size_t operand = 0; operand < staged.size() && tile.along == 0; ++operand) {
    if (staged[operand] == 0 || step(0, operand) == 0) {
      continue;
    }
    size_t fastest = 0;
    for (size_t dim = 1; dim < dimensions.size(); ++dim) {
      if (step(dim, operand) > 0 && step(dim, operand) < step(fastest, operand)) {
        fastest = dim;
      }
    }
    if (step(fastest, operand) * staged[operand] < kSector) {
      tile.along = fastest;
    }
  }
  if (tile.along == 0 || 2 * std::min(dimensions[0].size, dimensions[tile.along].size) < fixed) {
    return {};
  }
  int64_t largest = 0;
  for (size_t operand = 0; operand < staged.size(); ++operand) {
    const int64_t along = step(tile.along, operand);
    const bool goes_through =
        staged[operand] > 0 && step(0, operand) > along && along > 0 && along * staged[operand] < kSector;
    tile.inner.push_back(goes_through ? kStaged : std::min<int64_t>(step(0, operand), 2));
    largest = std::max(largest, goes_through ? staged[operand] : 0);
  }
  const std::vector<int64_t> edges = fixed > 0 ? std::vector<int64_t>{fixed} : std::vector<int64_t>{64, 32, 16};
  for (const int64_t edge : edges) {
    if (edge == 64 && largest > 2) { // larger elements fill rows of 64 bytes with smaller edges
      continue;
    }
    const int64_t across = dimensions[0].size;
    const int64_t down = dimensions[tile.along].size;
    tile.width = fixed > 0 ? fixed : side(across, edge);
    tile.height = fixed > 0 ? fixed : side(down, edge);
    if (tile.width < edge) {
      tile.height = side(down, edge * edge / tile.width);
    } else if (tile.height < edge) {
      tile.width = side(across, edge * edge / tile.height);
    }
    if (tile.width * tile.height < kMinTile) {
      return {};
    }
    int64_t needed = 0;
    for (size_t operand = 0; operand < staged.size(); ++operand) {
      if (tile.inner[operand] == kStaged) {
        needed += tile.width * tile_pitch(tile, staged[operand]) * staged[operand];
      }
    }
    if (needed <= memory) {
      return tile;
    }
  }
  return {};
}

py::tuple pointwise_geometry(
    const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& inputs,
    const std::vector<std::optional<int64_t>>& positions,
    int64_t width,
    int64_t shortest_row,
    int64_t max_rows,
    int64_t tile_memory,
    int64_t tile_side) {
  const c10::IntArrayRef shape = outputs.at(0).sizes();
  const size_t operands = outputs.size() + inputs.size() + positions.size();
  std::vector<Dimension> given(shape.size());
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    given[dim].size = shape[dim];
    for (const at::Tensor& output : outputs) {
      given[dim].steps.push_back(output.stride(static_cast<int64_t>(dim)));
    }
    for (const at::Tensor& input : inputs) {
      given[dim].steps.push_back(broadcast_stride(input, shape, dim));
    }
    for (const auto& along : positions) {
      given[dim].steps.push_back(positions_stride(along, shape, dim));
    }
  }
  const Dimensions where = collapse(std::move(given), /*keep_order=*/false);
  const auto& dimensions = where.inner_to_outer;
  const int64_t count = where.count();
  bool wide = count > kNarrowLimit;
  for (size_t operand = 0; operand < operands; ++operand) {
    wide |= where.reach(operand) > kNarrowLimit;
  }
  const bool dense = count <= 1 ||
      (dimensions.size() == 1 &&
       std::all_of(dimensions[0].steps.begin(), dimensions[0].steps.end(), [](int64_t step) { return step == 1; }));
  if (dense) {
    const auto aligned = [&](const at::Tensor& tensor) {
      return is_aligned(tensor, std::min<size_t>(16, width * tensor.itemsize()));
    };
    const bool all =
        std::all_of(outputs.begin(), outputs.end(), aligned) && std::all_of(inputs.begin(), inputs.end(), aligned);
    py::tuple strides(operands);
    for (size_t operand = 0; operand < operands; ++operand) {
      strides[operand] = py::make_tuple(1);
    }
    return py::make_tuple(
        py::make_tuple(0, all ? width : 1, wide, py::tuple(), py::tuple()), py::make_tuple(count), std::move(strides));
  }
  py::tuple inner;
  if (tile_memory > 0) {
    std::vector<int64_t> staged(operands);
    std::transform(inputs.begin(), inputs.end(), staged.begin() + outputs.size(), [](const at::Tensor& input) {
      return static_cast<int64_t>(input.itemsize());
    });
    const Tile tile = find_tile(dimensions, staged, tile_memory, tile_side);
    if (tile.along > 0) {
      inner = py::tuple(operands);
      for (size_t operand = 0; operand < operands; ++operand) {
        inner[operand] = tile.inner[operand];
      }
      return py::make_tuple(
          py::make_tuple(
              dimensions.size(), 1, wide, std::move(inner), py::make_tuple(tile.along, tile.width, tile.height)),
          where.sizes(), where.strides(operands));
    }
  }
  if (dimensions[0].size >= shortest_row && count / dimensions[0].size <= max_rows) {
    inner = py::tuple(operands);
    for (size_t operand = 0; operand < operands; ++operand) {
      inner[operand] = std::min<int64_t>(dimensions[0].steps[operand], 2);
    }
  }
  return py::make_tuple(
      py::make_tuple(dimensions.size(), 1, wide, std::move(inner), py::tuple()), where.sizes(),
      where.strides(operands));
}

py::tuple reduction_geometry(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const std::vector<int64_t>& dims) {
  const c10::IntArrayRef shape = inputs.at(0).sizes();
  std::vector<bool> is_reduced(shape.size());
  for (const int64_t dim : dims) {
    is_reduced.at(dim) = true;
  }
  std::vector<Dimension> kept_given;
  std::vector<Dimension> reduced_given;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    Dimension one{shape[dim], {}};
    if (!is_reduced[dim]) {
      for (const at::Tensor& output : outputs) {
        const bool keeps = output.dim() == static_cast<int64_t>(shape.size());
        one.steps.push_back(output.stride(static_cast<int64_t>(keeps ? dim : kept_given.size())));
      }
    }
    for (const at::Tensor& input : inputs) {
      one.steps.push_back(input.stride(static_cast<int64_t>(dim)));
    }
    (is_reduced[dim] ? reduced_given : kept_given).push_back(std::move(one));
  }
  const Dimensions kept = collapse(std::move(kept_given), /*keep_order=*/false);
  const Dimensions reduced = collapse(std::move(reduced_given), /*keep_order=*/true);
  bool wide = inputs[0].numel() > kNarrowLimit;
  for (size_t i = 0; i < outputs.size(); ++i) {
    wide |= kept.reach(i) > kNarrowLimit;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    wide |= kept.reach(outputs.size() + i) + reduced.reach(i) > kNarrowLimit;
  }
  return py::make_tuple(
      wide, kept.sizes(), kept.strides(outputs.size() + inputs.size()), reduced.sizes(),
      reduced.strides(inputs.size()));
}

void check_overlaps(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  for (const at::Tensor& output : outputs) {
    at::assert_no_internal_overlap(output);
    for (const at::Tensor& input : inputs) {
      if (!output.is_same(input)) {
        at::assert_no_partial_overlap(output, input);
      }
    }
  }
}

c10::DimVector broadcast_shape(c10::DimVector shape, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    shape = at::infer_size_dimvector(shape, tensor.sizes());
  }
  return shape;
}

bool check_operands(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  const c10::IntArrayRef shape = outputs.at(0).sizes();
  for (const at::Tensor& output : outputs) {
    TORCH_CHECK_VALUE(
        output.sizes() == shape, "outputs must have the same shape, but got ", shape, " and ", output.sizes());
  }
  const auto broadcast = broadcast_shape(c10::DimVector(shape), inputs);
  TORCH_CHECK(
      c10::IntArrayRef(broadcast) == shape, "output with shape ", shape, " doesn't match the broadcast shape ",
      c10::IntArrayRef(broadcast));
  if (outputs[0].numel() == 0) {
    return false;
  }
  check_overlaps(outputs, inputs);
  return true;
}

// The output that TensorIterator allocates for the operands; depends only on their sizes and strides.
at::Tensor elementwise_result(const std::vector<at::Tensor>& operands, const py::object& dtype) {
  TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "dtype must be a torch.dtype");
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false)
      .check_all_same_dtype(false)
      .check_all_same_device(false)
      .declare_static_dtype_and_device(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type, c10::kMeta)
      .add_owned_output(at::Tensor());
  for (const at::Tensor& operand : operands) {
    config.add_const_input(operand);
  }
  return config.build().output();
}

} // namespace

void bind_geometry(py::module_& module) {
  module.def(
      "check_overlaps", &check_overlaps, py::arg("outputs"), py::arg("inputs"),
      "Raise PyTorch's error if an output overlaps itself or partially overlaps an input.");
  module.def(
      "check_broadcast", [](const std::vector<at::Tensor>& tensors) { broadcast_shape({}, tensors); },
      py::arg("tensors"), "Raise PyTorch's error if the tensors do not broadcast to one shape.");
  module.def(
      "elementwise_result", &elementwise_result, py::arg("operands"), py::arg("dtype"),
      "Return a meta tensor of the operands' broadcast shape, with the strides that TensorIterator chooses. Raises "
      "PyTorch's error if the operands do not broadcast.");
  module.def(
      "check_operands", &check_operands, py::arg("outputs"), py::arg("inputs"),
      "Raise PyTorch's error if the inputs do not broadcast to the outputs' shape, or an output overlaps itself or "
      "partially overlaps an input. Returns whether the outputs have any elements.");
  module.def(
      "pointwise_geometry", &pointwise_geometry, py::arg("outputs"), py::arg("inputs"), py::arg("positions"),
      py::arg("width"), py::arg("shortest_row"), py::arg("max_rows"), py::arg("tile_memory"), py::arg("tile_side"),
      "Return (the arguments of a Layout, sizes, strides), as in kernels.layouts.geometry, for inputs that broadcast "
      "to the outputs' shape. `positions`: one entry for each operand that is an element's index rather than memory: "
      "the dimension that it counts along, or None for the linear index.");
  module.def(
      "reduction_geometry", &reduction_geometry, py::arg("outputs"), py::arg("inputs"), py::arg("dims"),
      "Return (wide, sizes and strides of the kept dimensions, sizes and strides of the reduced dimensions), as in "
      "kernels.layouts.reduction_geometry. `dims`: not negative, without duplicates.");
}

} // namespace backplane
