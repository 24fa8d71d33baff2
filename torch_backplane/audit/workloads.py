"""Operators of every family, at any size, for benchmarks/kernels.py and the audit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

ROW = 1024  # elements of a row, unless the title says otherwise

Body = Callable[[], object]
Make = Callable[[torch.device, int], Body]


@dataclasses.dataclass
class Workload:
    """A case: `make` returns the function to run, for a device and a number of elements.

    Args:
        bytes_per_element: bytes read and written per element, for the bandwidth; None if it is not reported.
    """

    title: str
    make: Make
    bytes_per_element: float | None = None
    family: str = ""


WORKLOADS: list[Workload] = []


def rows_of(family: str) -> Callable[..., Callable[[Make], Make]]:
    """Return a decorator that adds a case of this family. It takes the title and bytes_per_element."""

    def row(title: str, bytes_per_element: float | None = None) -> Callable[[Make], Make]:
        def add(make: Make) -> Make:
            WORKLOADS.append(Workload(title, make, bytes_per_element, family))
            return make

        return add

    return row


def rand(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)


def whole(device: torch.device, most: int, *shape: int) -> torch.Tensor:
    """Return random int64 numbers below `most`."""
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(0)).to(device)


def rows(elements: int, size: int = ROW) -> tuple[int, int]:
    return max(1, elements // size), min(size, elements)


def images(elements: int, channels: int = 16) -> tuple[int, int, int, int]:
    side = max(4, math.isqrt(elements // (4 * channels)))
    return 4, channels, side, side


def like(function: Callable[..., torch.Tensor], *arguments: object) -> Body:
    """Return a function that calls `function` with `out=` of the result's shape."""
    out = torch.empty_like(function(*arguments))
    return lambda: function(*arguments, out=out)


def backward(result: torch.Tensor, *leaves: torch.Tensor) -> Body:
    grad = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True)


row = rows_of("pointwise")


@row("add", 12)
def _(device: torch.device, n: int) -> Body:
    return like(torch.add, rand(device, n), rand(device, n))


@row("add, one operand transposed", 12)
def _(device: torch.device, n: int) -> Body:
    side = math.isqrt(n)
    return like(torch.add, rand(device, side, side).t(), rand(device, side, side))


@row("add of a row, bfloat16", 4)
def _(device: torch.device, n: int) -> Body:
    return like(torch.add, rand(device, *rows(n), dtype=torch.bfloat16), rand(device, ROW, dtype=torch.bfloat16)[:n])


@row("gelu", 8)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    return lambda: F.gelu(x)


@row("where", 13)
def _(device: torch.device, n: int) -> Body:
    return like(torch.where, rand(device, n) > 0.5, rand(device, n), rand(device, n))


row = rows_of("copies")


@row("copy", 8)
def _(device: torch.device, n: int) -> Body:
    source, out = rand(device, n), torch.empty(n, device=device)
    return lambda: out.copy_(source)


@row("cast to float16", 6)
def _(device: torch.device, n: int) -> Body:
    source, out = rand(device, n), torch.empty(n, dtype=torch.float16, device=device)
    return lambda: out.copy_(source)


@row("transposed copy", 8)
def _(device: torch.device, n: int) -> Body:
    side = math.isqrt(n)
    source, out = rand(device, side, side).t(), torch.empty(side, side, device=device)
    return lambda: out.copy_(source)


@row("cat of 4", 8)
def _(device: torch.device, n: int) -> Body:
    parts = rand(device, n).chunk(4)
    return lambda: torch.cat(parts)


row = rows_of("reductions")


@row("sum of all", 4)
def _(device: torch.device, n: int) -> Body:
    source, out = rand(device, n), torch.empty((), device=device)
    return lambda: torch.sum(source, dim=(0,), out=out)


@row("sum of rows", 4)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.sum(1)


@row("sum of columns", 4)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.sum(0)


@row("argmax of rows", 4)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.argmax(1)


@row("variance of rows", 4)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.var(1)


row = rows_of("scans")


@row("cumsum of a vector", 8)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    return lambda: x.cumsum(0)


@row("cumsum of rows", 8)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.cumsum(1)


@row("cummax of columns", 16)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.cummax(0)


row = rows_of("sorting")


@row("sort")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    return lambda: x.sort()


@row("sort of int64")
def _(device: torch.device, n: int) -> Body:
    x = whole(device, 1 << 40, n)
    return lambda: x.sort()


@row("sort of rows")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.sort(1)


@row("topk(50) of rows of 50,257")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n, 50257))
    return lambda: x.topk(50)


@row("topk(2) of rows of 64")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n, 64))
    return lambda: x.topk(2)


@row("median")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    return lambda: x.median()


@row("unique of 1,000 different")
def _(device: torch.device, n: int) -> Body:
    x = whole(device, 1000, n)
    return lambda: x.unique()


@row("randperm")
def _(device: torch.device, n: int) -> Body:
    return lambda: torch.randperm(n, device=device)


row = rows_of("compaction")


@row("nonzero")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n) > 0.5
    return lambda: x.nonzero()


@row("masked_select")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    mask = x > 0.5
    return lambda: x[mask]


row = rows_of("indexing")


@row("gather of rows")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    index = whole(device, x.shape[1], *x.shape)
    return lambda: x.gather(1, index)


@row("embedding of rows of 256")
def _(device: torch.device, n: int) -> Body:
    table, index = rand(device, 10_000, 256), whole(device, 10_000, max(1, n // 256))
    return lambda: F.embedding(index, table)


@row("embedding of rows of 256, backward")
def _(device: torch.device, n: int) -> Body:
    table, index = rand(device, 10_000, 256).requires_grad_(), whole(device, 10_000, max(1, n // 256))
    return backward(F.embedding(index, table), table)


@row("index_add of rows of 64")
def _(device: torch.device, n: int) -> Body:
    x, index = rand(device, *rows(n, 64)), whole(device, 100, max(1, n // 64))
    out = torch.zeros(100, 64, device=device)
    return lambda: out.index_add_(0, index, x)


@row("bincount of 1,000 different")
def _(device: torch.device, n: int) -> Body:
    x = whole(device, 1000, n)
    return lambda: x.bincount()


row = rows_of("rows")


@row("softmax of rows", 8)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    out = torch.empty_like(x)
    return lambda: torch.softmax(x, -1, out=out)


@row("softmax of one row", 8)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    out = torch.empty_like(x)
    return lambda: torch.softmax(x, -1, out=out)


@row("layer norm of rows", 8)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    weight, bias = rand(device, x.shape[1]), rand(device, x.shape[1])
    return lambda: F.layer_norm(x, x.shape[1:], weight, bias)


@row("layer norm of rows, backward")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n)).requires_grad_()
    weight, bias = (rand(device, x.shape[1]).requires_grad_() for _ in range(2))
    return backward(F.layer_norm(x, x.shape[1:], weight, bias), x, weight, bias)


@row("batch norm in training")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n))
    norm = torch.nn.BatchNorm2d(x.shape[1]).to(device)
    return lambda: norm(x)


@row("cross entropy of rows")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    target = whole(device, x.shape[1], x.shape[0])
    return lambda: F.cross_entropy(x, target)


row = rows_of("images")


@row("max_pool2d(2)")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n))
    return lambda: F.max_pool2d(x, 2)


@row("max_pool2d(3, 2), backward")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n)).requires_grad_()
    return backward(F.max_pool2d(x, 3, 2), x)


@row("avg_pool2d(2), backward")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n)).requires_grad_()
    return backward(F.avg_pool2d(x, 2), x)


@row("reflection pad by 2")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n))
    return lambda: F.pad(x, (2, 2, 2, 2), "reflect")


@row("upsampling to twice the size, nearest")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n // 4))
    return lambda: F.interpolate(x, scale_factor=2)


@row("upsampling to twice the size, bilinear")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n // 4))
    return lambda: F.interpolate(x, scale_factor=2, mode="bilinear")


@row("upsampling to twice the size, bilinear, backward")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n // 4)).requires_grad_()
    return backward(F.interpolate(x, scale_factor=2, mode="bilinear"), x)


row = rows_of("products")


@row("product of square matrices")
def _(device: torch.device, n: int) -> Body:
    side = math.isqrt(n) // 2  # halved to save time: the work grows with the third power
    return like(torch.mm, rand(device, side, side), rand(device, side, side))


@row("products of 64 × 64 matrices")
def _(device: torch.device, n: int) -> Body:
    count = max(1, n // 4096)
    return like(torch.bmm, rand(device, count, 64, 64), rand(device, count, 64, 64))


@row("product of a matrix and a vector", 4)
def _(device: torch.device, n: int) -> Body:
    return like(torch.mv, rand(device, *rows(n)), rand(device, min(ROW, n)))


@row("convolution, 3 × 3, 16 to 16 channels")
def _(device: torch.device, n: int) -> Body:
    x, weight = rand(device, *images(n)), rand(device, 16, 16, 3, 3)
    return lambda: F.conv2d(x, weight, padding=1)


@row("convolution, 3 × 3, depthwise")
def _(device: torch.device, n: int) -> Body:
    x, weight = rand(device, *images(n)), rand(device, 16, 1, 3, 3)
    return lambda: F.conv2d(x, weight, padding=1, groups=16)


@row("attention, causal, heads of 64")
def _(device: torch.device, n: int) -> Body:
    length = min(512, max(16, n // 512))
    q, k, v = (rand(device, max(1, n // (512 * length)), 8, length, 64) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


row = rows_of("random")


@row("normal numbers", 4)
def _(device: torch.device, n: int) -> Body:
    out = torch.empty(n, device=device)
    return lambda: out.normal_()


@row("dropout")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    return lambda: F.dropout(x, 0.1)


row = rows_of("optimizers")


@row("a fused step of AdamW, 8 tensors")
def _(device: torch.device, n: int) -> Body:
    parameters = [torch.nn.Parameter(one.clone()) for one in rand(device, n).chunk(8)]
    for one in parameters:
        one.grad = torch.ones_like(one)
    return torch.optim.AdamW(parameters, fused=True).step
