"""torch_backplane.elementwise on a device that runs kernels. tests/planning/test_elementwise.py tests its errors."""

from __future__ import annotations

import threading
from collections.abc import Sized
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, had, need, plans_from_the_start

import torch_backplane
from torch_backplane import _C, plans
from torch_backplane.kernels import functions as f


@torch_backplane.elementwise
def leaky(x: Any, y: Any, slope: float = 0.01) -> Any:
    return f.where(x > 0, x, x * slope) + y


@torch_backplane.elementwise
def parts(x: Any) -> Any:
    """Three results of two dtypes."""
    return torch.floor(x), x - torch.floor(x), x < 0


@torch_backplane.elementwise
def steps(x: Any) -> Any:
    """Counts how often x is halved until it is at most 1, in a separate loop for each element."""
    _, count = f.while_loop(lambda x, n: x > 1.0, lambda x, n: (x / 2.0, n + 1.0), (x, x * 0.0))
    return count


cube = torch_backplane.elementwise(
    lambda x, y, scale=1.0: scale * x**3 * y,
    backward=lambda grad, x, y, scale: (grad * scale * 3 * x**2 * y, grad * scale * x**3),
    name="cube",
)


def counts(prefix: str) -> list[dict[str, Any]]:
    return [one for name, one in plans.stats().items() if name.startswith(f"backplane::elementwise_{prefix}")]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8]
)
def test_results_agree_with_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(5, 7) * 20).to(dtype), torch.randn(7).to(dtype)
    agrees(leaky, x, y)
    agrees(leaky, x.t(), 2)
    agrees(lambda x: leaky(2.5, x, slope=3), x[::2, 1:])
    agrees(leaky, x, torch.randn(5, 1).to(torch.float16))
    agrees(lambda x: leaky(x, torch.tensor(2.5)), x)  # a zero-dim CPU tensor, which PyTorch accepts


def test_several_results() -> None:
    agrees(parts, torch.randn(3, 50) * 10)
    for dtype in had((torch.float32, torch.float64)):
        agrees(parts, torch.randn(3, 50, dtype=dtype).t()[1:])


def test_loops_end_separately_for_each_element() -> None:
    agrees(steps, torch.rand(100) * 1000)


def test_empty_and_zero_dimensional_tensors() -> None:
    agrees(leaky, torch.randn(0, 3), torch.randn(3))
    agrees(leaky, torch.tensor(-3.0), torch.tensor(1.0))
    agrees(parts, torch.randn(2, 0))


def test_plans_and_kernels_are_reused_for_other_numbers() -> None:
    x = torch.linspace(-1, 1, 9, device=DEVICE)
    with plans_from_the_start():
        for slope in (0.1, 0.2, 0.3):
            torch.testing.assert_close(leaky(x, 1.0, slope=slope).cpu(), leaky(x.cpu(), 1.0, slope=slope))
        (found,) = counts("leaky")
    assert found["planner_calls"] == 1
    assert found["replays"] == 2
    before = len(_kernels())
    leaky(torch.linspace(-1, 1, 1000, device=DEVICE), 7.0, 0.7)
    assert len(_kernels()) == before


def _kernels() -> Sized:
    from torch_backplane.planning.launch import _compiled

    return _compiled


def test_replays_call_no_python() -> None:
    x = torch.ones(4, device=DEVICE)
    with plans_from_the_start():
        assert "planned" in plans.explain(leaky, x, x)
        plan_text = plans.explain(leaky, x, x)
    assert "replayed" in plan_text
    assert "launch bp_leaky" in plan_text


def test_gradients() -> None:
    def gradients(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, y = (t.detach().requires_grad_() for t in (x, y))
        result = cube(x, y, scale=2.0)
        return result.detach(), *torch.autograd.grad(result.square().sum(), [x, y])

    agrees(gradients, torch.randn(4, 5), torch.randn(5))


def test_gradients_agree_with_finite_differences() -> None:
    need(torch.float64)
    x = torch.randn(6, device=DEVICE, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: cube(x, 2.0), (x,))


def test_gradients_in_threads() -> None:
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        x = torch.full((6,), float(number), device=DEVICE, requires_grad=True)
        for _ in range(10):
            cube(x, 1.0).sum().backward()
        results[number] = x.grad.cpu()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: grad.tolist() for n, grad in results.items()} == {n: [30.0 * n * n] * 6 for n in range(3)}


def test_inference_mode_and_no_grad() -> None:
    with torch.inference_mode():
        agrees(leaky, torch.randn(4, 5), torch.randn(5))
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    with torch.no_grad():
        assert not leaky(x, 1).requires_grad
    with pytest.raises(RuntimeError, match="leaky has no derivative, but its argument x requires grad"):
        leaky(x, 1)


def test_formulas_convert_integers_where_they_need_floats() -> None:
    half = torch_backplane.elementwise(lambda x: x / 2)
    agrees(half, torch.arange(5))
    agrees(torch_backplane.elementwise(lambda a: a * 2), torch.tensor([True, False]))
    assert half(torch.arange(5, device=DEVICE)).dtype == torch.float32


def test_dtypes_without_kernels_are_an_error() -> None:
    x = torch.ones(3, device=DEVICE).to(torch.float8_e5m2)
    with pytest.raises(TypeError, match=r"leaky does not support torch\.float8_e5m2: kernels have"):
        leaky(x, 1)


def test_check_mode() -> None:
    with plans_from_the_start():
        plans.set_mode("check")
        agrees(leaky, torch.randn(5, 6), torch.randn(6))


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for x, y in ((torch.randn(4, 3).t(), torch.randn(3, 1)), (torch.randn(2, 3, 4)[..., ::2], 2.0)):
        real = leaky(x.to(DEVICE), y.to(DEVICE) if isinstance(y, torch.Tensor) else y)
        with FakeTensorMode() as mode:
            fake = leaky(mode.from_tensor(x), mode.from_tensor(y) if isinstance(y, torch.Tensor) else y)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert _C.fallback_counts().get("backplane::elementwise_leaky_0.TTS", 0) == 0
