"""Kernels for devices with small limits match the CPU: small work groups, little local memory, few arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees
from targets import target

from torch_backplane import planning
from torch_backplane.kernels import LimitExceeded
from torch_backplane.planning import run_kernel

launch = importlib.import_module("torch_backplane.planning.launch")  # the package has a function of this name

TARGETS: dict[str, dict[str, Any]] = {
    "small groups": {"max_group_size": 16},
    "groups of no power of two": {"max_group_size": 48, "group_multiple": 24},
    "wide lanes": {"max_group_size": 256, "group_multiple": 128, "subgroup_size": 128},
    "one item in a group": {"max_group_size": 1},
    "little local memory": {"local_memory": 2 << 10},
    "no local memory": {"local_memory": 0},
    "few arguments": {"max_argument_bytes": 256},
    "no atomics": {"atomics": frozenset()},
}

CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "elements": (lambda a, b: (a + b, a.t() * b.t(), a[:, ::2] - b[:, ::2]), lambda: tuple(torch.randn(2, 70, 33))),
    "sums": (lambda a: (a.sum(), a.sum(0), a.sum(1), a.amax(1), a.std(1)), lambda: (torch.randn(37, 300),)),
    "places of extremes": (lambda a: (a.argmax(1), a.min(0)), lambda: (torch.randn(37, 300),)),
    "products": (lambda a, b: (a @ b, a.t() @ b.t()), lambda: (torch.randn(40, 40), torch.randn(40, 40))),
    "softmax": (lambda a: (a.softmax(1), a.log_softmax(0)), lambda: (torch.randn(37, 130),)),
    "attention": (torch.nn.functional.scaled_dot_product_attention, lambda: tuple(torch.randn(3, 1, 2, 40, 20))),
    "layer norm": (lambda a: torch.nn.functional.layer_norm(a, [130]), lambda: (torch.randn(37, 130),)),
    "sorting": (lambda a: (a.sort(dim=1, stable=True), a.topk(5, 1)[0]), lambda: (torch.randn(7, 130),)),
    "sorting long rows": (
        lambda a: (a.sort(dim=1, stable=True), a.topk(100, 1)[0]),
        lambda: (torch.randn(2, 9000),),
    ),
    "long lines": (lambda a: (a.cumsum(1), a.sum(1), a.cummax(1)), lambda: (torch.randn(2, 20_000).round(),)),
    "few columns": (
        lambda a: (a.sum(0), a.amax(0), a.std(0), a.argmin(0), a.cumsum(0), a.reshape(2, -1, 3).sum(1)),
        lambda: (torch.randn(2500, 3),),
    ),
    "stacks": (
        lambda a, b: (torch.stack([a, b], -1), torch.stack([a, b, a], 1), torch.cat([a.unsqueeze(1), b[:, None]], 1)),
        lambda: tuple(torch.randn(2, 700)),
    ),
    "places of triangles": (
        lambda a: (torch.tril_indices(9, 31, 4, device=a.device), torch.triu_indices(31, 9, -7, device=a.device)),
        lambda: (torch.zeros(1),),
    ),
    "running sums": (lambda a: (a.cumsum(0), a.cumsum(1)), lambda: (torch.randn(37, 33),)),
    "what is not zero": (lambda a: (a.nonzero(), a[a > 0.5]), lambda: (torch.randn(37, 33).relu(),)),
    "indexed": (lambda a, i: (a[i], a.index_add(0, i, a[: len(i)])), lambda: (torch.randn(20, 9), torch.arange(9) % 4)),
    "losses": (
        lambda a, i: [torch.nn.functional.cross_entropy(a, i, reduction=how) for how in ("none", "mean", "sum")],
        lambda: (torch.randn(70, 9), torch.arange(70) % 9),
    ),
    "margins": (torch.nn.functional.multi_margin_loss, lambda: (torch.randn(70, 9), torch.arange(70) % 9)),
    "convolution": (torch.nn.functional.conv2d, lambda: (torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3))),
    "lists": (lambda *a: torch._foreach_add(list(a), 2.0), lambda: tuple(torch.randn(17, 5))),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("kind", "figures"), [*(("gpu", one) for one in TARGETS), ("cpu", "small groups"), ("cpu", "one item in a group")]
)
def test_results_match_the_cpu(kind: str, figures: str, name: str) -> None:
    function, make = CALLS[name]
    with target(kind, **TARGETS[figures]):
        agrees(function, *make(), fallbacks=None, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most", [256, 512, 1024, 4096])
def test_optimizer_steps_with_limited_argument_size(most: int) -> None:
    def stepped(device: str) -> list[torch.Tensor]:
        parameters = [(torch.arange(3.0 + i) + 1).to(device).requires_grad_() for i in range(11)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
        for _ in range(3):
            for one in parameters:
                one.grad = one.detach() * 2
            optimizer.step()
        return [one.detach().cpu() for one in parameters]

    with target("gpu", max_argument_bytes=most):
        torch.testing.assert_close(stepped(DEVICE), stepped("cpu"))


def test_kernels_that_exceed_a_limit_raise_when_planned() -> None:
    x = torch.ones(8, device=DEVICE)
    size = planning.dialect_of(x.device).buffer_bytes  # of an argument that is a tensor

    def give(names: int) -> None:
        inputs = {f"in{i}": x for i in range(names)}
        body = "store_out(item, " + " + ".join(f"load_{name}(item)" for name in inputs) + ");"
        run_kernel("sum_of_many", body, items=8, outputs={"out": out}, inputs=inputs, value=torch.float32)

    out = torch.zeros(8, device=DEVICE)
    with target("gpu", max_argument_bytes=128):
        give(5)
        needed = (128 // size + 1) * size + 4  # one number: the items
        message = rf"^sum_of_many needs {needed} bytes of arguments, and its device takes 128"
        with pytest.raises(LimitExceeded, match=message):
            give(128 // size)
    assert out.tolist() == [5.0] * 8
    with (
        target("gpu", max_group_size=8),
        pytest.raises(LimitExceeded, match=r"^too_many needs 12 work items in a group, and its device takes 8 "),
    ):
        launch.launch(_kernel(), [out], [], [12, 1], [12, 1], name="too_many")
    with (
        target("gpu", local_memory=64),
        pytest.raises(LimitExceeded, match=r"^too_much needs 65 bytes of local memory, and its device takes 64 "),
    ):
        launch.launch(_kernel(local_bytes=65), [out], [], [8], name="too_much")


def _kernel(**more: Any) -> Any:
    from torch_backplane.kernels import Kernel, Parameter

    text = "kernel void bp_nothing(global float* out, ulong offset) {}"
    return Kernel("bp_nothing", text, (Parameter("output", torch.float32),), None, **more)
