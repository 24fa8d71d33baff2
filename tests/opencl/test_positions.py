"""Positions in formulas: f.index(dim) is an element's index along a dimension, without an index tensor."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from agreement import DEVICE, plans_from_the_start

import torch_backplane
from torch_backplane import plans
from torch_backplane.kernels import CudaCpp, Layout, OpenCLC, Reduction, Target, pointwise
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.multi_tensor import multi_tensor
from torch_backplane.planning import run_pointwise, run_reduction

launch = importlib.import_module("torch_backplane.planning.launch")  # the package has a function of this name

SHAPES = [(5,), (1,), (), (3, 4), (7, 40), (4, 1, 6), (2, 3, 33, 17), (2, 0, 3), (70_001,)]


@contextmanager
def processor(kind: Any) -> Iterator[None]:
    """Generates kernels for this kind of device."""
    index = torch.device(DEVICE).index
    own = launch.dialect_of(index)
    launch._generated.clear()
    launch._dialects[index] = type(own)(Target.of_kind(kind, float64=own.target.float64))
    try:
        yield
    finally:
        launch._generated.clear()
        launch._dialects[index] = own


def outputs_of(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Contiguous and transposed outputs, and outputs with gaps."""
    yield torch.empty(shape, dtype=dtype, device=DEVICE)
    yield torch.empty(shape[::-1], dtype=dtype, device=DEVICE).permute(list(reversed(range(len(shape)))))
    yield torch.empty((*shape, 2), dtype=dtype, device=DEVICE)[..., 0]


def along(shape: tuple[int, ...], dim: int) -> torch.Tensor:
    return torch.arange(shape[dim]).view([-1 if at == dim % len(shape) else 1 for at in range(len(shape))])


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_positions_in_every_layout(kind: str) -> None:
    with processor(kind):
        for shape in SHAPES:
            number = torch.arange(math.prod(shape)).view(shape)
            for out in outputs_of(shape, torch.int64):
                run_pointwise(lambda: f.index(), [out], [], key="number", name="number")
                assert torch.equal(out.cpu(), number)
                for dim in range(-len(shape), len(shape)):
                    run_pointwise(lambda dim=dim: f.index(dim), [out], [], key=("position", dim), name="position")
                    assert torch.equal(out.cpu(), along(shape, dim).expand(shape)), (shape, out.stride(), dim)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_positions_with_tensors_and_numbers(kind: str) -> None:
    def formula(x: Any, factor: Any) -> Any:
        place = f.index(-1) - f.index(0) * 3 + f.index()
        return x * factor + place.to(torch.float32), f.index(-1) >= f.index(0)

    with processor(kind):
        for shape in SHAPES[3:-1]:
            x = torch.randn(shape[-1])
            place = along(shape, -1) - along(shape, 0) * 3 + torch.arange(math.prod(shape)).view(shape)
            for out in outputs_of(shape, torch.float32):
                which = torch.empty(shape, dtype=torch.bool, device=DEVICE)
                run_pointwise(
                    formula, [out, which], [x.to(DEVICE)], [(2.0, torch.float32)], key="position", name="position"
                )
                assert torch.equal(out.cpu(), x * 2 + place.float())
                assert torch.equal(which.cpu(), (along(shape, -1) >= along(shape, 0)).expand(shape))


def test_factories_launch_one_kernel_and_allocate_only_the_result() -> None:
    x = torch.ones(20, 30, device=DEVICE)
    with plans_from_the_start():
        for make in (
            lambda: torch.arange(40, device=DEVICE),
            lambda: torch.arange(0, 1, 0.01, device=DEVICE),
            lambda: torch.linspace(0, 1, 50, device=DEVICE),
            lambda: torch.eye(20, 30, device=DEVICE),
            lambda: x.tril(1),
            lambda: x.triu(),
        ):
            plan_text = plans.explain(make)
            assert (plan_text.count("→ launch"), plan_text.count("→ allocate")) == (1, 1), plan_text


def test_invalid_uses_of_positions_are_errors() -> None:
    x, out = torch.ones(3, 4, device=DEVICE), torch.empty(3, device=DEVICE)
    for dim in (2, -3):
        with pytest.raises(IndexError, match=f"position in dimension {dim} of 2"):
            run_pointwise(lambda a, dim=dim: a + f.index(dim).to(a.dtype), [x], [x], key=("beyond", dim))

    def with_position(a: Any, *_: Any) -> Any:
        return a + f.index().to(torch.float32)

    def looped(a: Any) -> Any:
        return f.while_loop(lambda b: b < 3.0, lambda b: (with_position(b),), (a,))[0]

    summed = Reduction([torch.float32], [0.0], with_position, lambda a, b: a + b, lambda s, _: s)
    float32, dialect = torch.float32, OpenCLC()
    for refused in (
        lambda: run_pointwise(looped, [x], [x], key="looped"),
        lambda: run_reduction(summed, [out], [x], [1], key="positions"),
        lambda: multi_tensor(
            "m", with_position, slots=2, inputs=[float32], outputs=[float32], dialect=dialect, compute=float32
        ),
    ):
        with pytest.raises((TypeError, torch_backplane._C.RunOnCPU), match="position of an element"):
            refused()
    with pytest.raises(TypeError, match="position of an element"):
        torch_backplane.elementwise(lambda a: f.index().to(a.dtype) + a, name="positions")


def test_kernel_text_is_the_same_for_every_dimension() -> None:
    def text(dim: int | None, dialect: Any, **layout: Any) -> str:
        options = {"inputs": [], "outputs": [torch.int64], "layout": Layout(**layout), "dialect": dialect}
        return pointwise("position", lambda: f.index(dim), **options).text

    for dialect in (OpenCLC(), OpenCLC(Target.of_kind("cpu")), CudaCpp()):
        for layout in ({"width": 1}, {"width": 4}, {"rank": 2, "width": 1}, {"rank": 2, "width": 1, "inner": (1, 0)}):
            assert text(0, dialect, **layout) == text(-1, dialect, **layout) == text(None, dialect, **layout)
