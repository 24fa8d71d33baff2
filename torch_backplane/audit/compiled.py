"""Graphs of torch.compile, each of which should be one or two fused kernels. On the CPU, they run uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from torch_backplane.audit.operands import distinct_bytes
from torch_backplane.audit.workloads import ROW, Body, Workload, rand, rows, whole

FAMILY = "compiled graphs"
Build = Callable[[torch.device, int], tuple[Callable[..., Any], list[torch.Tensor]]]  # a function and its arguments

COMPILED: list[Workload] = []


@dataclass(frozen=True)
class CompiledBody:
    """A compiled function with its arguments. `writes` has the numbers of the arguments that it modifies."""

    function: Callable[..., Any]
    arguments: list[torch.Tensor]
    writes: tuple[int, ...]

    def __call__(self) -> object:
        return self.function(*self.arguments)

    def min_bytes(self, result: object) -> int:
        """Return the bytes of all arguments, of those that are modified, and of the other results."""
        tensors = (one for one in tree_leaves(result) if isinstance(one, torch.Tensor))
        results = [one for one in tensors if all(one is not other for other in self.arguments)]
        written = [self.arguments[number] for number in self.writes]
        return sum(map(distinct_bytes, [*self.arguments, *written, *results]))


def graph(title: str, writes: tuple[int, ...] = ()) -> Callable[[Build], Build]:
    """Return a decorator that adds a case. `writes`: as in CompiledBody."""

    def add(build: Build) -> Build:
        def make(device: torch.device, n: int) -> Body:
            function, arguments = build(device, n)
            if device.type != "cpu":
                # Dynamo compiles a function for a few devices and sizes only, unless it forgets earlier ones.
                torch.compiler.reset()
                function = torch.compile(function, fullgraph=True)
                function(*(one.clone() for one in arguments))
            return CompiledBody(function, arguments, writes)

        COMPILED.append(Workload(f"compiled: {title}", make, family=FAMILY))
        return build

    return add


@graph("20 elementwise operators")
def _(device: torch.device, n: int) -> Any:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = torch.sigmoid(x * 1.5 + y).abs()
        return x

    return function, [rand(device, n), rand(device, n)]


@graph("bias, GELU and residual, bfloat16")
def _(device: torch.device, n: int) -> Any:
    x, residual = (rand(device, *rows(n), dtype=torch.bfloat16) for _ in range(2))
    bias = rand(device, x.shape[1], dtype=torch.bfloat16)
    return (lambda x, bias, residual: F.gelu(x + bias) + residual), [x, bias, residual]


@graph("RMS norm and SwiGLU")
def _(device: torch.device, n: int) -> Any:
    def function(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return F.silu(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight) * gate

    x, gate = rand(device, *rows(n)), rand(device, *rows(n))
    return function, [x, rand(device, x.shape[1]), gate]


@graph("layer norm and residual")
def _(device: torch.device, n: int) -> Any:
    x, residual = rand(device, *rows(n)), rand(device, *rows(n))
    return (lambda x, residual: F.layer_norm(x + residual, x.shape[1:])), [x, residual]


@graph("softmax with a mask and a scale")
def _(device: torch.device, n: int) -> Any:
    x = rand(device, *rows(n))
    mask = rand(device, *x.shape) > 0.1
    return (lambda x, mask: torch.softmax((x * 0.125).masked_fill(~mask, -1e9), -1)), [x, mask]


@graph("log-softmax and loss")
def _(device: torch.device, n: int) -> Any:
    x = rand(device, *rows(n))
    return (lambda x, target: F.cross_entropy(x, target)), [x, whole(device, x.shape[1], x.shape[0])]


@graph("squared error, mean of all")
def _(device: torch.device, n: int) -> Any:
    return (lambda x, y: ((x - y) ** 2).mean()), [rand(device, n), rand(device, n)]


@graph("gradient of GELU, and its sum over rows")
def _(device: torch.device, n: int) -> Any:
    def function(grad: torch.Tensor, x: torch.Tensor) -> Any:
        passed = torch.ops.aten.gelu_backward(grad, x)
        return passed, passed.sum(0)

    return function, [rand(device, *rows(n)), rand(device, *rows(n))]


@graph("variance of columns")
def _(device: torch.device, n: int) -> Any:
    return (lambda x: torch.var_mean(x * 2, 0)), [rand(device, *rows(n))]


@graph("rotary embedding")
def _(device: torch.device, n: int) -> Any:
    def function(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    count, width = rows(n, 64)
    angles = rand(device, count, width)
    return function, [rand(device, count, width), angles.cos(), angles.sin()]


@graph("transposition of a sum")
def _(device: torch.device, n: int) -> Any:
    x, y = rand(device, *rows(n)), rand(device, *rows(n))
    return (lambda x, y: (x + y).t().contiguous()), [x, y]


@graph("embedding and positions")
def _(device: torch.device, n: int) -> Any:
    count, width = rows(n, ROW)
    return (lambda index, table, at: table[index] + at), [
        torch.arange(count).to(device), rand(device, count, width), rand(device, width),
    ]  # fmt: skip


@graph("step of AdamW, 4 parameters", writes=tuple(range(12)))
def _(device: torch.device, n: int) -> Any:
    def function(*given: torch.Tensor) -> None:
        for p, m, s, g in zip(given[:4], given[4:8], given[8:12], given[12:], strict=True):
            p.mul_(0.999)
            m.lerp_(g, 0.1)
            s.mul_(0.99).addcmul_(g, g, value=0.01)
            p.addcdiv_(m, s.sqrt() + 1e-8, value=-0.01)

    return function, [rand(device, n // 4) + k for k in range(16)]
