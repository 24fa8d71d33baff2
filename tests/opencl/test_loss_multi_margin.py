"""Multi-class and multi-label margin losses match the CPU's results, planned and replayed, without fallbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, had, need, refused_alike
from torch.nn import functional as F

from torch_backplane import _C

aten = torch.ops.aten
REDUCTIONS = ["none", "mean", "sum"]
NARROW = [torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return torch.randn(shape).to(dtype)


def labels(*shape: int) -> torch.Tensor:
    """Rows of random classes with duplicates, most of them ended by a -1. Classes after the -1 are ignored."""
    torch.manual_seed(sum(shape))
    classes = shape[-1] if shape else 1
    target = torch.randint(0, classes, shape)
    if shape and classes > 2:
        ends = torch.randint(0, classes + 1, (*shape[:-1], 1))
        target[torch.arange(classes).expand(shape) == ends] = -1
    return target


def with_gradient(loss: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A function that returns the loss and the gradient of a weighted sum of it."""

    def run(x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.detach().requires_grad_()
        out = loss(leaf, *others)
        weights = torch.arange(1, out.numel() + 1, dtype=out.dtype, device=out.device).view(out.shape)
        return out.detach(), torch.autograd.grad(out, leaf, weights)[0]

    return run


def agrees_with_float32(function: Callable[..., Any], dtype: torch.dtype, *arguments: Any) -> None:
    """For dtypes without a CPU kernel: compares with the CPU's result for the same values in float32, rounded."""
    arguments = tuple(a.to(dtype) if a.is_floating_point() else a for a in arguments)
    expected = function(*(a.float() if a.is_floating_point() else a for a in arguments))
    for _ in range(3):
        _C.reset_fallback_counts()
        found = function(*(a.to(DEVICE) for a in arguments))
        assert not _C.fallback_counts()
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other.to(dtype))


# One class per row


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_multi_margin_loss(reduction: str, p: int, weighted: bool) -> None:
    function = with_gradient(
        lambda x, target, *weight: F.multi_margin_loss(x, target, p, 0.7, *weight, reduction=reduction)
    )
    for shape in ((6, 5), (130, 3), (2, 300), (1, 1), (7,)):
        classes, x = shape[-1], random(*shape)
        target = torch.arange(x.numel() // classes) * 7 % classes
        weight = (random(classes),) if weighted else ()
        for dtype in had((torch.float32, torch.float64)):
            agrees(function, x.to(dtype), target, *(one.to(dtype) for one in weight))
        for dtype in NARROW:
            agrees_with_float32(function, dtype, x, target, *weight)


@pytest.mark.parametrize("reduction", range(3))
def test_multi_margin_loss_of_zero_and_one_dimensional_operands(reduction: int) -> None:
    function = with_gradient(lambda x, target: aten.multi_margin_loss(x, target, 2, 1, None, reduction))
    for x, target in ((random(5), 3), (random(5), [3]), (random(), 0), (random(), [0]), (random(1, 5), 3)):
        agrees(function, x, torch.tensor(target))


@pytest.mark.parametrize("reduction", range(3))
def test_strides_of_multi_margin_loss(reduction: int) -> None:
    function = with_gradient(lambda x, target, weight: aten.multi_margin_loss(x, target, 1, 1, weight, reduction))
    x, target, weight = random(5, 6).t(), torch.arange(12).remainder(5)[::2], random(10)[::2]
    agrees(function, x, target, weight)
    agrees(function, random(6, 10)[:, ::2], target, weight)
    grad = random(6) if reduction == 0 else random()
    agrees(
        lambda grad, x, target: aten.multi_margin_loss_backward(grad, x, target, 2, 1, None, reduction),
        grad.repeat_interleave(2)[::2] if grad.dim() else grad,
        x,
        target,
    )


def test_margin_can_change_between_calls() -> None:
    x, target = random(6, 5), torch.arange(6) % 5
    for margin in (1, 0.5, -2, 3.25, True):
        agrees(with_gradient(lambda x, target, margin=margin: F.multi_margin_loss(x, target, 2, margin)), x, target)


def test_nan_and_infinite_inputs() -> None:
    x = torch.tensor([[torch.nan, 1, 2], [torch.inf, 1, 2], [-torch.inf, 1, torch.nan]])
    for reduction in range(3):
        for p in (1, 2):
            agrees(
                with_gradient(lambda x, t, p=p, r=reduction: aten.multi_margin_loss(x, t, p, 1, None, r)),
                x,
                torch.tensor([1, 2, 1]),
            )
        agrees(
            with_gradient(lambda x, t, r=reduction: aten.multilabel_margin_loss_forward(x, t, r)[0]),
            x,
            torch.tensor([[1, -1, 0], [2, 1, -1], [1, 1, -1]]),
        )


def test_multi_margin_loss_out_variants() -> None:
    x, target, grad = random(6, 5), torch.arange(6) % 5, random(6)
    for reduction in range(3):
        size, given = ((6,) if reduction == 0 else ()), grad if reduction == 0 else grad[0]
        agrees(
            lambda x, t, o, r=reduction: aten.multi_margin_loss(x, t, 1, 1, None, r, out=o),
            x,
            target,
            torch.empty(size).fill_(9),
        )
        agrees(lambda x, t, r=reduction: aten.multi_margin_loss(x, t, 1, 1, None, r, out=x.new_empty(0)), x, target)
        agrees(
            lambda g, x, t, o, r=reduction: aten.multi_margin_loss_backward(g, x, t, 1, 1, None, r, grad_input=o),
            given,
            x,
            target,
            torch.full((6, 5), 9.0),
        )
    agrees(lambda x, t, o: aten.multi_margin_loss(x, t, 1, 1, None, 0, out=o), x, target, torch.full((12,), 9.0)[::2])


# A set of labels per row


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_multilabel_margin_loss(reduction: str) -> None:
    function = with_gradient(lambda x, target: F.multilabel_margin_loss(x, target, reduction=reduction))
    for shape in ((6, 5), (130, 3), (2, 100), (1, 1), (7,), ()):
        x, target = random(*shape), labels(*shape)
        for dtype in had((torch.float32, torch.float64)):
            agrees(function, x.to(dtype), target)
        for dtype in NARROW:
            agrees_with_float32(function, dtype, x, target)


@pytest.mark.parametrize("reduction", range(3))
def test_multilabel_margin_loss_returns_is_target(reduction: int) -> None:
    for x, target in (
        (random(6, 5), labels(6, 5)),
        (random(5, 6).t(), labels(5, 6).clamp(max=4).t()),
        (random(6, 10)[:, ::2], labels(6, 10).clamp(max=4)[:, 1::2]),
        (random(7), labels(7)),
        (random(), torch.tensor(0)),
        (random(), torch.tensor(-1)),
        (random(), torch.tensor([0])),
        (random(1), torch.tensor(0)),
        (random(3, 4), torch.full((3, 4), -1)),
        (random(2, 3), torch.arange(6).view(2, 3) % 3),
    ):
        agrees(lambda x, target: aten.multilabel_margin_loss_forward(x, target, reduction), x, target)


def test_multilabel_margin_loss_out_variants() -> None:
    x, target, grad = random(6, 5), labels(6, 5), random(6)
    is_target = aten.multilabel_margin_loss_forward(x, target, 0)[1]
    for reduction in range(3):
        size, given = ((6,) if reduction == 0 else ()), grad if reduction == 0 else grad[0]
        agrees(
            lambda x, t, o, i, r=reduction: aten.multilabel_margin_loss_forward(x, t, r, output=o, is_target=i),
            x,
            target,
            torch.full(size, 9.0),
            torch.full((6, 5), 9.0),
        )
        agrees(
            lambda x, t, r=reduction: aten.multilabel_margin_loss_forward(
                x, t, r, output=x.new_empty(0), is_target=x.new_empty(0)
            ),
            x,
            target,
        )
        agrees(lambda x, t, r=reduction: aten.multilabel_margin_loss(x, t, r, out=x.new_empty(0)), x, target)
        agrees(
            lambda g, x, t, i, o, r=reduction: aten.multilabel_margin_loss_backward(g, x, t, r, i, grad_input=o),
            given,
            x,
            target,
            is_target,
            torch.full((6, 5), 9.0),
        )


# Both losses

EMPTY = {
    "multi_margin_loss": lambda x, t, r: aten.multi_margin_loss(x, t[:, 0], 1, 1, None, r),
    "multilabel_margin_loss": lambda x, t, r: aten.multilabel_margin_loss_forward(x, t, r)[0],
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_batch(name: str) -> None:
    function = EMPTY[name]
    x, target = torch.empty(0, 5), torch.empty(0, 5, dtype=torch.int64)
    agrees(with_gradient(lambda x, t: function(x, t, 0)), x, target)
    # PyTorch's CPU kernels leave the result uninitialized, so 0 is expected instead.
    for reduction in (1, 2):
        for _ in range(2):
            _C.reset_fallback_counts()
            leaf = x.to(DEVICE).requires_grad_()
            out = function(leaf, target.to(DEVICE), reduction)
            out.backward()
            assert not _C.fallback_counts()
            assert out.shape == ()
            assert out.item() == 0
            assert leaf.grad is not None
            assert leaf.grad.shape == (0, 5)


def test_overlapping_results_are_errors() -> None:
    x, target, grad = random(6, 5).to(DEVICE), (torch.arange(6) % 5).to(DEVICE), random().to(DEVICE)
    with pytest.raises(RuntimeError, match="single memory location"):
        aten.multi_margin_loss_backward(grad, x, target, 1, 1, None, 1, grad_input=x)
    with pytest.raises(RuntimeError, match="single memory location"):
        aten.multi_margin_loss(x, target, 1, 1, None, 0, out=x[0].expand(6, 5)[:, 0])


def _one(x: torch.Tensor, **changes: Any) -> Any:
    arguments = {"target": torch.zeros(3, dtype=torch.int64), "p": 1, "margin": 1, "weight": None, "reduction": 1}
    moved = [v.to(x.device) if isinstance(v, torch.Tensor) else v for v in (arguments | changes).values()]
    return aten.multi_margin_loss(x, *moved)


def _set(x: torch.Tensor, target: torch.Tensor, **given: torch.Tensor) -> Any:
    named = {name: tensor.to(x.device) for name, tensor in given.items()}
    return aten.multilabel_margin_loss_forward(x, target.to(x.device), 0, **named)


zeros = torch.zeros
WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "p": lambda x: _one(x, p=3),
    "a small target": lambda x: _one(x, target=zeros(2, dtype=torch.int64)),
    "a target of two dimensions": lambda x: _one(x, target=zeros(3, 1, dtype=torch.int64)),
    "a target of int32": lambda x: _one(x, target=zeros(3, dtype=torch.int32)),
    "three dimensions": lambda x: _one(x[None]),
    "no classes": lambda x: _one(x[:, :0]),
    "a weight of another dtype": lambda x: _one(x, weight=zeros(5, dtype=torch.float64)),
    "integers": lambda x: _one(x.int()),
    "complex numbers": lambda x: _one(x * 1j),
    "a result of another dtype": lambda x: aten.multi_margin_loss(
        x, zeros(3, dtype=torch.int64, device=x.device), out=zeros((), dtype=torch.float64, device=x.device)
    ),
    "labels: a small target": lambda x: _set(x, zeros(2, 5, dtype=torch.int64)),
    "labels: a target of one dimension": lambda x: _set(x, zeros(15, dtype=torch.int64)),
    "labels: a target of int32": lambda x: _set(x, zeros(3, 5, dtype=torch.int32)),
    "labels: three dimensions": lambda x: _set(x[None], zeros(1, 3, 5, dtype=torch.int64)),
    "labels: no classes": lambda x: _set(x[:, :0], zeros(3, 0, dtype=torch.int64)),
    "labels: integers": lambda x: _set(x.int(), zeros(3, 5, dtype=torch.int64)),
    "labels: a result of another dtype": lambda x: _set(
        x, zeros(3, 5, dtype=torch.int64), output=zeros(3, dtype=torch.float64), is_target=zeros(3, 5)
    ),
    "labels: another result of another dtype": lambda x: _set(
        x, zeros(3, 5, dtype=torch.int64), output=zeros(3), is_target=zeros(3, 5, dtype=torch.float64)
    ),
    "labels: is_target of another shape": lambda x: aten.multilabel_margin_loss_backward(
        x[:, 0], x, zeros(3, 5, dtype=torch.int64, device=x.device), 0, x[:2]
    ),
    "labels: is_target of another dtype": lambda x: aten.multilabel_margin_loss_backward(
        x[:, 0], x, zeros(3, 5, dtype=torch.int64, device=x.device), 0, zeros(3, 5, device=x.device).double()
    ),
    "labels: a gradient of another dtype": lambda x: aten.multilabel_margin_loss_backward(
        x[:, 0].double(), x, zeros(3, 5, dtype=torch.int64, device=x.device), 0, x * 0
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_input_raises_the_cpus_error(name: str) -> None:
    if "another dtype" in name:
        need(torch.float64)
    refused_alike(WRONG[name], torch.ones(3, 5))


def test_gradient_of_another_shape_is_an_error() -> None:
    x, target = random(3, 5).to(DEVICE), zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"size of the tensor|expanded size"):
        aten.multi_margin_loss_backward(random(2).to(DEVICE), x, target, 1, 1, None, 0)
    with pytest.raises(RuntimeError, match=r"size of the tensor|expanded size|Expected a tensor of dimension 1"):
        aten.multilabel_margin_loss_backward(random(2).to(DEVICE), x, target[:, None].expand(3, 5), 0, x * 0)


OUT_OF_RANGE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "multi_margin_loss": lambda x, t: aten.multi_margin_loss(x, t[:, 0], 1, 1, x[0], 1),
    "multi_margin_loss_backward": lambda x, t: aten.multi_margin_loss_backward(x[0, 0], x, t[:, 0], 1, 1, x[0], 1),
    "multilabel_margin_loss_forward": lambda x, t: aten.multilabel_margin_loss_forward(x, t, 1),
    "multilabel_margin_loss_backward": lambda x, t: aten.multilabel_margin_loss_backward(x[0, 0], x, t, 1, x * 0),
}


@pytest.mark.parametrize("index", [4, 1 << 40, -5])
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_target_out_of_range_is_an_error_and_writes_no_memory(name: str, index: int) -> None:
    x = torch.arange(12.0, device=DEVICE).view(3, 4)
    target = torch.tensor([[0, 1, -1, 2], [index, -1, 0, 0], [1, 1, 1, 1]], device=DEVICE)
    torch.accelerator.synchronize(torch.device(DEVICE))
    for _ in range(2):
        OUT_OF_RANGE[name](x, target)
        error = IndexError if name.startswith("nll") else RuntimeError  # as on the CPU
        with pytest.raises(error, match=rf"{name}: index -?[0-9]+ is out of bounds for dimension with size 4"):
            torch.accelerator.synchronize(torch.device(DEVICE))
    assert x.flatten().tolist() == list(map(float, range(12)))


def test_label_out_of_range_after_the_end_is_an_error() -> None:
    x = torch.arange(4.0)
    for index in (4, -2):
        target = torch.tensor([0, -1, index, 2])
        with pytest.raises(RuntimeError, match="out of range"):
            F.multilabel_margin_loss(x, target)
        F.multilabel_margin_loss(x.to(DEVICE), target.to(DEVICE))
        with pytest.raises(RuntimeError, match=rf"multilabel_margin_loss_forward: index {index} is out of bounds"):
            torch.accelerator.synchronize(torch.device(DEVICE))


@pytest.mark.parametrize("target", [(2, 2, 2), (2, 0, 2), (2, 1, 2), (0, 2, 2), (2, 2), (2, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("weight", [None, (3,), (2,), (3, 1), (0,)], ids=str)
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_nll_loss2d_rejects_the_same_shapes_as_the_cpu(
    target: tuple[int, ...], weight: tuple[int, ...] | None, reduction: int
) -> None:
    """PyTorch's meta functions check few of these shapes, and kernels would read out of bounds."""

    def outcomes(device: str) -> list[Any]:
        x, targets = torch.rand(2, 3, 2, 2).to(device), torch.zeros(target, dtype=torch.long, device=device)
        weights = None if weight is None else torch.ones(weight, device=device)
        found: list[Any] = []
        total = torch.ones((), device=device)
        for shape in (None, (), (1,), (2, 2), (2, 1, 2), (2, 2, 2)):
            try:
                if shape is None:
                    result = torch.ops.aten.nll_loss2d_forward(x, targets, weights, reduction, -100)[0]
                else:
                    grad = torch.ones(shape, device=device)
                    result = torch.ops.aten.nll_loss2d_backward(grad, x, targets, weights, reduction, -100, total)
                found.append(result.shape)
            except RuntimeError as error:
                found.append(str(error))
        return found

    assert outcomes(DEVICE) == outcomes("cpu")
