"""The geometry of launches: for tensors, the runtime computes the same as `kernels.layouts`, which traces use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_backplane.kernels import OpenCLC, Target
from torch_backplane.planning import geometry

Operands = tuple[list[torch.Tensor], list[torch.Tensor], list[int | None]]

DTYPES = [torch.uint8, torch.float16, torch.float32, torch.float64]


PROCESSOR = Target.of_kind("cpu")
DIALECTS = [OpenCLC(PROCESSOR), OpenCLC(), OpenCLC(Target(local_memory=3 << 10))]


@st.composite
def tensors(draw: st.DrawFn, shape: list[int]) -> torch.Tensor:
    """Tensors of this shape, with any order of dimensions, gaps, expanded dimensions and storage offsets."""
    steps = [0] * len(shape)
    step = draw(st.integers(1, 2))
    for dim in draw(st.permutations(range(len(shape)))):
        steps[dim] = 0 if draw(st.integers(0, 9)) == 0 else step
        step *= shape[dim] + (draw(st.integers(0, 5)) == 0)
    if draw(st.integers(0, 2)) == 0:  # equal layouts are rare otherwise
        steps = list(torch.empty(shape, device="meta").stride())
    offset = draw(st.sampled_from([0, 0, 1, 4]))
    extent = 1 + sum((size - 1) * one for size, one in zip(shape, steps, strict=True))
    return torch.empty(offset + extent, dtype=draw(st.sampled_from(DTYPES))).as_strided(shape, steps, offset)


SHAPES = st.lists(st.sampled_from([1, 1, 2, 3, 4, 16, 65]), max_size=4)


@st.composite
def operands(draw: st.DrawFn) -> Operands:
    """Outputs of one shape, inputs that broadcast to it, and positions along its dimensions."""
    shape = draw(SHAPES)
    outputs = [draw(tensors(shape)) for _ in range(draw(st.integers(1, 2)))]
    inputs = []
    for _ in range(draw(st.integers(0, 3))):
        own = [size if draw(st.integers(0, 4)) else 1 for size in shape]
        inputs.append(draw(tensors(own[draw(st.integers(0, len(own))) if draw(st.integers(0, 3)) == 0 else 0 :])))
    if draw(st.integers(0, 3)) == 0:
        inputs.append(outputs[0])
    dims = st.none() | st.integers(-len(shape), len(shape) - 1) if shape else st.none()
    return outputs, inputs, draw(st.lists(dims, max_size=2))


@settings(max_examples=400, deadline=None)
@given(operands(), st.sampled_from(DIALECTS), st.sampled_from([1, 4]))
def test_pointwise(case: Operands, dialect: OpenCLC, width: int) -> None:
    given = (*case, width, dialect)
    assert geometry.pointwise_geometry(*given) == geometry.pointwise_geometry_of_symbols(*given)


@settings(max_examples=300, deadline=None)
@given(st.data(), SHAPES.filter(bool), st.integers(1, 2), st.integers(1, 2), st.booleans())
def test_reductions(data: st.DataObject, shape: list[int], outputs: int, inputs: int, keep: bool) -> None:
    dims = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1))))
    kept = [1 if dim in dims else size for dim, size in enumerate(shape) if keep or dim not in dims]
    written = [data.draw(tensors(kept)) for _ in range(outputs)]
    given = (written, [data.draw(tensors(shape)) for _ in range(inputs)], dims)
    assert geometry.reduction_geometry(*given) == geometry.reduction_geometry_of_symbols(*given)


def test_indices_of_64_bits() -> None:
    """Needed when an element count or the extent of an operand exceeds int32."""
    element = torch.empty(1, dtype=torch.uint8)
    for size in (2**31 - 1, 2**31):
        expanded = element.expand(size)
        far = torch.empty(0, dtype=torch.uint8, device="meta").as_strided((2, 2), (size, 1))
        given = ([expanded], [element], [None], 1, DIALECTS[0])
        assert geometry.pointwise_geometry(*given) == geometry.pointwise_geometry_of_symbols(*given)
        assert geometry.pointwise_geometry(*given)[0][2] == (size == 2**31)
        of_dims = ([element[0]], [far], [0, 1])
        assert geometry.reduction_geometry(*of_dims) == geometry.reduction_geometry_of_symbols(*of_dims)
        assert geometry.reduction_geometry([element[0]], [expanded], [0]).wide == (size == 2**31)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (1, 1, 2)])
def test_operands_of_incompatible_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"output with shape|The size of tensor"):
        geometry.check_operands([torch.empty(2)], [torch.empty(shape)])


def test_operands_that_overlap() -> None:
    memory = torch.empty(5)
    with pytest.raises(RuntimeError, match="single memory location"):
        geometry.check_operands([memory[:4]], [memory[1:]])
    assert geometry.check_operands([memory[:4]], [memory[:4]])
    assert not geometry.check_operands([memory[:0]], [memory[:0]])
