"""Functions that torch.compile compiles. On the CPU, they run uncompiled.

Graphs of the first family should be one or two fused kernels. The others also have products, or results of kernels that
later kernels need.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.adamw import adamw
from torch.utils._pytree import tree_leaves

from torch_backplane.audit.operands import distinct_bytes
from torch_backplane.audit.workloads import ROW, Body, Workload, images, rand, rows, whole

FAMILY, STEPS = "compiled graphs", "compiled steps"
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


def _compiled(function: Callable[..., Any], device: torch.device, dynamic: bool = False) -> Callable[..., Any]:
    if device.type == "cpu":
        return function
    # Dynamo compiles a function for a few devices and sizes only, unless it forgets earlier ones.
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic)


def _add(title: str, family: str, build: Callable[[torch.device, int], CompiledBody]) -> None:
    def make(device: torch.device, n: int) -> Body:
        body = build(device, n)
        if device.type != "cpu":
            body.function(*(one.clone() for one in body.arguments))  # compiles it
        return body

    COMPILED.append(Workload(f"compiled: {title}", make, family=family))


def graph(
    title: str, *, writes: tuple[int, ...] = (), dynamic: bool = False, family: str = FAMILY
) -> Callable[[Build], Build]:
    """Return a decorator that adds a case. `writes`: as in CompiledBody; `dynamic`: as in torch.compile."""

    def add(build: Build) -> Build:
        def body(device: torch.device, n: int) -> CompiledBody:
            function, arguments = build(device, n)
            return CompiledBody(_compiled(function, device, dynamic), arguments, writes)

        _add(title, family, body)
        return build

    return add


def gradient(title: str, count: int) -> Callable[[Build], Build]:
    """Return a decorator that adds a case: a compiled function, and the gradients of its first `count` arguments.

    The last argument is the gradient of the result, and no argument of the function.
    """

    def add(build: Build) -> Build:
        def body(device: torch.device, n: int) -> CompiledBody:
            function, arguments = build(device, n)
            compiled = _compiled(function, device)

            def both(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
                leaves = [one.detach().requires_grad_() for one in given[:count]]
                result = compiled(*leaves, *given[count:-1])
                return (result.detach(), *torch.autograd.grad(result, leaves, given[-1]))

            return CompiledBody(both, arguments, ())

        _add(title, STEPS, body)
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


@graph("bias of each row and GELU")
def _(device: torch.device, n: int) -> Any:
    x = rand(device, *rows(n))
    return (lambda x, bias: F.gelu(x + bias)), [x, rand(device, x.shape[0], 1)]


@graph("GELU, dynamic shapes", dynamic=True)
def _(device: torch.device, n: int) -> Any:
    x = rand(device, *rows(n))
    return (lambda x, bias: F.gelu(x + bias)), [x, rand(device, x.shape[1])]


@graph("sum with a transposed matrix")
def _(device: torch.device, n: int) -> Any:
    side = math.isqrt(n)
    return (lambda x, y: (x.t() * 0.5 + y).relu()), [rand(device, side, side), rand(device, side, side)]


@graph("scaled images, channels last")
def _(device: torch.device, n: int) -> Any:
    def function(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return (x * scale[:, None, None] + shift[:, None, None]).contiguous(memory_format=torch.channels_last)

    x = rand(device, *images(n))
    return function, [x, rand(device, x.shape[1]), rand(device, x.shape[1])]


@graph("casts between float16, bfloat16 and float32")
def _(device: torch.device, n: int) -> Any:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        total = x.float() * y.float() + z
        return total, total.half(), total.bfloat16()

    return function, [rand(device, n).half(), rand(device, n).bfloat16(), rand(device, n)]


@graph("choices by masks")
def _(device: torch.device, n: int) -> Any:
    x, y = rand(device, n), rand(device, n)
    return (lambda x, y, mask: torch.where(mask & (x > 0.2), x * y, y.clamp(max=0.5)).masked_fill(y > 0.9, 0.0)), [
        x, y, rand(device, n) > 0.5,
    ]  # fmt: skip


@graph("joined rows")
def _(device: torch.device, n: int) -> Any:
    return (lambda x, y: torch.cat([x.sigmoid(), y * 2], 0)), [rand(device, *rows(n // 2)), rand(device, *rows(n // 2))]


@graph("joined columns")
def _(device: torch.device, n: int) -> Any:
    return (lambda x, y: torch.cat([x.sigmoid(), y * 2], 1).relu()), [
        rand(device, *rows(n // 2, 512)), rand(device, *rows(n // 2, 512)),
    ]  # fmt: skip


@graph("gathered columns and a factor")
def _(device: torch.device, n: int) -> Any:
    x, y = rand(device, *rows(n)), rand(device, *rows(n))
    return (lambda x, index, y: x.gather(1, index) * y), [x, whole(device, x.shape[1], *x.shape), y]


@graph("dropout and residual")
def _(device: torch.device, n: int) -> Any:
    return (lambda x, residual: F.dropout(x, 0.1) + residual), [rand(device, n), rand(device, n)]


@graph("softmax of rows of 64")
def _(device: torch.device, n: int) -> Any:
    return (lambda x: torch.softmax(x * 0.125, 1)), [rand(device, *rows(n, 64))]


@graph("softmax of rows of 16,384")
def _(device: torch.device, n: int) -> Any:
    return (lambda x: torch.softmax(x, 1) * 2), [rand(device, *rows(n, 16384))]


@graph("softmax of rows, dynamic shapes", dynamic=True)
def _(device: torch.device, n: int) -> Any:
    return (lambda x: torch.softmax(x * 0.125, 1)), [rand(device, *rows(n))]


@graph("layer norm with weight and bias")
def _(device: torch.device, n: int) -> Any:
    x = rand(device, *rows(n))
    weight, bias = rand(device, x.shape[1]), rand(device, x.shape[1])
    return (lambda x, weight, bias: F.layer_norm(x, x.shape[1:], weight, bias)), [x, weight, bias]


@graph("RMS norm of a sum, which is kept")
def _(device: torch.device, n: int) -> Any:
    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        total = x + residual
        return total, F.rms_norm(total, total.shape[1:], weight)

    x, residual = rand(device, *rows(n)), rand(device, *rows(n))
    return function, [x, residual, rand(device, x.shape[1])]


@graph("sum of products of rows")
def _(device: torch.device, n: int) -> Any:
    return (lambda x, y: (x * y).sum(1)), [rand(device, *rows(n)), rand(device, *rows(n))]


@graph("sum of products of columns")
def _(device: torch.device, n: int) -> Any:
    return (lambda x, y: (x * y).sum(0)), [rand(device, *rows(n)), rand(device, *rows(n))]


@graph("sum and maximum of rows")
def _(device: torch.device, n: int) -> Any:
    return (lambda x: (x.sum(1), x.amax(1))), [rand(device, *rows(n))]


@graph("sum and maximum of all")
def _(device: torch.device, n: int) -> Any:
    return (lambda x: (x.sum(), x.amax())), [rand(device, *rows(n))]


@graph("cumulative sum of rows, scaled")
def _(device: torch.device, n: int) -> Any:
    return (lambda x, y: (x.cumsum(1) * y).relu()), [rand(device, *rows(n)), rand(device, *rows(n))]


@graph("step of AdamW, 4 parameters", writes=tuple(range(12)))
def _(device: torch.device, n: int) -> Any:
    def function(*given: torch.Tensor) -> None:
        for p, m, s, g in zip(given[:4], given[4:8], given[8:12], given[12:], strict=True):
            p.mul_(0.999)
            m.lerp_(g, 0.1)
            s.mul_(0.99).addcmul_(g, g, value=0.01)
            p.addcdiv_(m, s.sqrt() + 1e-8, value=-0.01)

    return function, [rand(device, n // 4) + k for k in range(16)]


@graph("step of AdamW, 4 parameters, foreach", writes=tuple(range(12)), family=STEPS)
def _(device: torch.device, n: int) -> Any:
    def function(*given: torch.Tensor) -> None:
        p, m, s, g, steps = (list(given[k : k + 4]) for k in range(0, 20, 4))
        adamw(
            p, g, m, s, [], steps, foreach=True, capturable=device.type != "cpu", amsgrad=False,
            beta1=0.9, beta2=0.99, lr=0.01, weight_decay=0.01, eps=1e-8, maximize=False,
        )  # fmt: skip

    return function, [*(rand(device, n // 4) + k for k in range(16)), *(rand(device) for _ in range(4))]


@graph("RMS norm, SwiGLU and their products", family=STEPS)
def _(device: torch.device, n: int) -> Any:
    def function(x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, passed = (F.rms_norm(x, x.shape[1:], weight) @ up).chunk(2, 1)
        return x + (F.silu(gate) * passed) @ down

    x = rand(device, *rows(n // 4, 256))
    width = x.shape[1]
    return function, [x, rand(device, width), rand(device, width, 4 * width), rand(device, 2 * width, width)]


@gradient("GELU with bias, and gradients", 2)
def _(device: torch.device, n: int) -> Any:
    x, grad = rand(device, *rows(n)), rand(device, *rows(n))
    return (lambda x, bias: F.gelu(x + bias)), [x, rand(device, x.shape[1]), grad]


@gradient("layer norm and gradients", 3)
def _(device: torch.device, n: int) -> Any:
    x, grad = rand(device, *rows(n)), rand(device, *rows(n))
    weight, bias = rand(device, x.shape[1]), rand(device, x.shape[1])
    return (lambda x, weight, bias: F.layer_norm(x, x.shape[1:], weight, bias)), [x, weight, bias, grad]


@gradient("cross entropy and gradient", 1)
def _(device: torch.device, n: int) -> Any:
    x = rand(device, *rows(n))
    return F.cross_entropy, [x, whole(device, x.shape[1], x.shape[0]), rand(device)]
