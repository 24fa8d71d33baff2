"""hash_tensor, _addmm_activation, several draws, rows' norms, fused steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, on_device, plans_from_the_start, refused_alike

from torch_backplane import plans

aten = torch.ops.aten
REAL = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return (torch.randn(shape) * 4).to(dtype)


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_hashes(dtype: torch.dtype) -> None:
    agrees(lambda x: (torch.hash_tensor(x), torch.hash_tensor(x, 1)), numbers(3, 4, 5, dtype=dtype))
    agrees(lambda x: torch.hash_tensor(x, 0, keepdim=True), numbers(3, 70, dtype=dtype).t())
    agrees(torch.hash_tensor, numbers(dtype=dtype))
    agrees(lambda x: torch.hash_tensor(x, 1), torch.zeros(0, 3, dtype=dtype))


def test_hashes_to_a_result_and_errors() -> None:
    agrees(lambda x, out: torch.hash_tensor(x, 1, out=out), numbers(3, 4), torch.zeros(3, dtype=torch.uint64))
    refused_alike(lambda x: torch.hash_tensor(x, mode=1), numbers(3))
    refused_alike(lambda x: torch.hash_tensor(x, 0), torch.zeros(0, 3))


@pytest.mark.parametrize("use_gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_products_with_an_activation(dtype: torch.dtype, use_gelu: bool) -> None:
    def run(*tensors: torch.Tensor, **given: Any) -> torch.Tensor:
        return torch._addmm_activation(*tensors, use_gelu=use_gelu, **given)

    a, b = numbers(4, 3, dtype=dtype), numbers(3, 5, dtype=dtype)
    agrees(run, numbers(5, dtype=dtype), a, b)
    turned = numbers(3, 4, dtype=dtype)
    agrees(lambda c, x, y: run(c, x.t(), y, beta=0.5, alpha=2), numbers(4, 5, dtype=dtype), turned, b)
    agrees(lambda c, x, y, out: run(c, x, y, out=out), numbers(5, dtype=dtype), a, b, torch.zeros(4, 5, dtype=dtype))
    agrees(run, numbers(5, dtype=dtype), a[:0], b)
    refused_alike(run, numbers(5, dtype=dtype), a, a)


def test_several_draws() -> None:
    weights = torch.tensor([[0.0, 1, 0, 3], [1, 1, 2, 0]])
    for dtype in (torch.float32, torch.float64, torch.float16):
        given = weights.to(dtype).to(DEVICE)
        with plans_from_the_start():
            drawn = torch.multinomial(given, 20000, True)
            assert drawn.dtype == torch.int64
            shares = torch.stack([(drawn == i).double().mean(-1) for i in range(4)], -1).cpu()
            torch.testing.assert_close(shares, weights.double() / 4, atol=0.02, rtol=0)
            assert not shares[weights == 0].any()
            assert not torch.equal(drawn, torch.multinomial(given, 20000, True))
            assert plans.stats()["aten::multinomial"]["planner_calls"] == 1


def test_draws_without_replacement() -> None:
    weights = torch.tensor([[0.0, 1, 0, 3], [1, 0, 2, 0]]).to(DEVICE)
    for _ in range(5):
        drawn = torch.multinomial(weights, 2).sort(-1)[0]
        assert drawn.tolist() == [[1, 3], [0, 2]]
    first = torch.stack([torch.multinomial(weights[0], 2) for _ in range(400)])[:, 0]
    assert 0.6 < (first == 3).double().mean().item() < 0.9
    out = torch.empty(2, 2, dtype=torch.int64, device=DEVICE)
    torch.multinomial(weights, 2, out=out)
    assert out.sort(-1)[0].tolist() == [[1, 3], [0, 2]]


@pytest.mark.parametrize("replacement", [False, True])
def test_draws_that_are_refused(replacement: bool) -> None:
    for shape, count in (((3,), 0), ((3,), -1), ((2, 2, 2), 1), ((), 1), ((2, 3), 0)):
        refused_alike(lambda w: torch.multinomial(w, count, replacement), torch.ones(shape))  # noqa: B023
    refused_alike(lambda w: torch.multinomial(w, 1, replacement), torch.ones(3, dtype=torch.int64))
    refused_alike(lambda w: torch.multinomial(w, 4), torch.ones(3))
    refused_alike(lambda w, out: torch.multinomial(w, 2, replacement, out=out), torch.ones(3), torch.zeros(2))
    for bad in ([0.0, -1], [float("nan"), 1], [float("inf"), 1], [0.0, 0]):
        with pytest.raises(RuntimeError):
            torch.multinomial(torch.tensor(bad), 2, replacement)
        weights = torch.tensor(bad).to(DEVICE)
        with pytest.raises(RuntimeError):
            torch.multinomial(weights, 2, replacement).cpu()


@pytest.mark.parametrize("norm", [1.0, 2.0, 2.5, float("inf")])
def test_norms_of_rows(norm: float) -> None:
    for index in (torch.tensor([[1, 3], [3, 5]]), torch.tensor([2, 2], dtype=torch.int32), torch.empty(0).long()):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            agrees(lambda w, i: torch.embedding_renorm_(w, i, 1.5, norm), numbers(6, 4, dtype=dtype), index)
    agrees(lambda w, i: torch.embedding_renorm_(w.t(), i, 1.5, norm), numbers(4, 6), torch.tensor([0, 5]))


def test_norms_of_rows_that_are_refused() -> None:
    def run(w: torch.Tensor, index: torch.Tensor) -> None:
        torch.embedding_renorm_(w, index, 1.5, 2.0)
        torch.accelerator.synchronize()

    refused_alike(run, numbers(6), torch.tensor([1]))
    refused_alike(run, numbers(6, 4), torch.tensor([1.0]))
    with pytest.raises(IndexError):
        run(*on_device((numbers(6, 4), torch.tensor([1, 6]))))


STEPS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"maximize": True}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.2}),
    (torch.optim.Adagrad, {"maximize": True}),
]


@pytest.mark.parametrize("of_tensor", [None, "cpu", "device"])
@pytest.mark.parametrize(("kind", "options"), STEPS)
def test_fused_steps(kind: Callable[..., Any], options: dict[str, Any], of_tensor: str | None) -> None:
    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        params = [one.detach().clone().requires_grad_() for one in given]
        rate = torch.tensor(0.1, device=params[0].device if of_tensor == "device" else "cpu")
        optimizer = kind(params, fused=True, lr=rate if of_tensor else 0.1, **options)
        for step in range(3):
            for one in params:
                one.grad = one.detach() * 0.3 + step
            optimizer.step()
        return [one.detach() for one in params]

    agrees(run, numbers(5, 3), numbers(7), torch.zeros(0, 3))
    agrees(run, numbers(5, 3, dtype=torch.bfloat16), numbers(2, dtype=torch.float64))


CALLS: dict[str, Callable[[int], object]] = {
    "hash_tensor": lambda n: torch.hash_tensor(numbers(n, 4).to(DEVICE), 0),
    "_addmm_activation": lambda n: torch._addmm_activation(*on_device((numbers(4), numbers(n, 3), numbers(3, 4)))),
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 4, device=DEVICE), 3, n > 0),
    "embedding_renorm_": lambda n: torch.embedding_renorm_(
        numbers(n, 4).to(DEVICE), torch.arange(n, device=DEVICE), 1.5, 2.0
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_plan_for_any_shape(name: str) -> None:
    with plans_from_the_start():
        for size in (5, 6, 7, 9):
            CALLS[name](size)
        stats = plans.stats()[f"aten::{name}"]
        assert stats["any_shape_classes"] == 1, stats
        assert not stats["reasons_for_exact"], stats
        assert stats["any_shape_replays"] >= 1, stats  # a size may have steps of its own
