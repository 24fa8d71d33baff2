"""grid_sample: images sampled at the locations of a grid, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from agreement import DEVICE, agrees, had, plans_from_the_start, refused_alike
from targets import target
from torch.nn import functional as F

from torch_backplane import plans

Pair = tuple[torch.Tensor, torch.Tensor]


def sampled(mode: str, padding: str, corners: bool) -> Callable[..., object]:
    """A function that returns the sampled images and both gradients."""

    def run(image: torch.Tensor, grid: torch.Tensor) -> object:
        image, grid = image.detach().requires_grad_(), grid.detach().requires_grad_()
        out = F.grid_sample(image, grid, mode, padding, corners)
        out.pow(2).sum().backward()
        return out.detach(), image.grad, grid.grad

    return run


def given(*shape: int, dtype: torch.dtype = torch.float32) -> Pair:
    """Images, and a grid with locations outside them."""
    torch.manual_seed(sum(shape))
    images, channels, height, width, rows, columns = shape
    image = torch.randn(images, channels, height, width, dtype=dtype)
    return image, torch.randn(images, rows, columns, 2, dtype=dtype) * 1.5


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize(
    ("mode", "padding"), [*product(["bilinear", "nearest", "bicubic"], ["zeros", "border", "reflection"])]
)
def test_values_and_gradients(mode: str, padding: str, corners: bool) -> None:
    run = sampled(mode, padding, corners)
    agrees(run, *given(2, 3, 5, 4, 3, 6), atol=1e-4, rtol=1e-5)
    for dtype in had([torch.float64]):
        agrees(run, *given(1, 2, 1, 4, 3, 2, dtype=dtype))


@pytest.mark.parametrize("corners", [False, True])
def test_bicubic_gradients_are_as_accurate_as_the_cpus(corners: bool) -> None:
    image, grid = given(1, 4, 90, 130, 20, 30)
    run = sampled("bicubic", "border", corners)
    *_, exact = run(image.double(), grid.double())
    *_, on_cpu = run(image, grid)
    *_, found = run(image.to(DEVICE), grid.to(DEVICE))
    ours, theirs = ((one.cpu().double() - exact).square().mean().sqrt() for one in (found, on_cpu))
    assert ours <= theirs


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_gradients_on_gpu_targets(mode: str, deterministic: bool) -> None:
    """Many grid locations share one image element. With deterministic algorithms, repeated results are equal."""
    run = sampled(mode, "border", False)
    image, grid = given(2, 3, 4, 3, 40, 50)
    torch.use_deterministic_algorithms(deterministic)
    try:
        with target("gpu"):
            agrees(run, image, grid, atol=1e-2, rtol=1e-5)
            for dtype in had([torch.float64]):
                agrees(run, *given(1, 2, 5, 4, 3, 2, dtype=dtype))
            if deterministic:
                first, second = (run(image.to(DEVICE), grid.to(DEVICE)) for _ in range(2))
                assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
        with target("gpu", atomics=frozenset()):
            agrees(run, image, grid, atol=1e-2, rtol=1e-5)
    finally:
        torch.use_deterministic_algorithms(False)


def test_strided_and_empty_operands() -> None:
    image, grid = given(2, 3, 5, 4, 3, 6)
    for run in (sampled("bilinear", "zeros", False), sampled("bicubic", "reflection", True)):
        agrees(run, image.to(memory_format=torch.channels_last), grid.transpose(1, 2), atol=1e-4, rtol=1e-5)
        agrees(run, *given(2, 3, 5, 4, 0, 6))
        agrees(run, image[:, :0], grid)
        agrees(run, image[:0], grid[:0])


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_locations_far_outside_the_image(padding: str) -> None:
    places = torch.tensor([-1e9, -3.0, -1.0, 1.0, 5.0, 1e9])
    grid = torch.stack(torch.meshgrid(places, places, indexing="ij"), -1)[None]
    for mode in ("bilinear", "nearest") if padding == "reflection" else ("bilinear", "nearest", "bicubic"):
        agrees(lambda x, g: F.grid_sample(x, g, mode, padding, False), torch.randn(1, 1, 4, 4), grid)  # noqa: B023


def test_grid_gradient_alone() -> None:
    def of_grid(gradient: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.grid_sampler_2d_backward(gradient, *rest, 0, 0, False, [False, True])[1]

    agrees(of_grid, torch.randn(2, 3, 3, 6), *given(2, 3, 5, 4, 3, 6))


def test_errors_are_pytorchs() -> None:
    image, grid = given(2, 3, 5, 4, 3, 6)
    for first, second in (
        (image[:1], grid), (image, grid[..., :1]), (image[0], grid), (image[:, :, :0], grid), (image, grid.half()),
    ):  # fmt: skip
        refused_alike(lambda x, g: torch.grid_sampler_2d(x, g, 0, 0, False), first, second)


def test_one_dynamic_shape_plan() -> None:
    with plans_from_the_start():
        for size in (4, 5, 6, 7):
            image, grid = given(2, 3, size, 4, 3, size)
            found = torch.grid_sampler_2d(image.to(DEVICE), grid.to(DEVICE), 0, 1, False)
            expected = torch.grid_sampler_2d(image, grid, 0, 1, False)
            torch.testing.assert_close(found.cpu(), expected)
        stats = plans.stats()["aten::grid_sampler_2d"]
        assert stats["dynamic_shape_classes"] == 1, stats
        assert not stats["reasons_for_exact"], stats
        assert stats["planner_calls"] == 2, stats
