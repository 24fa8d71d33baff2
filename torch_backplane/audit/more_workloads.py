"""Cases for the audit only, of operators that benchmarks/kernels.py does not time."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from torch_backplane.audit.workloads import ROW, Body, Make, Workload, backward, images, rand, rows, whole
from torch_backplane.tuning.choosing import forcing

MORE: list[Workload] = []

name: str
call: Any
shape: Any
shapes: Any


def case(family: str, title: str, make: Make) -> None:
    MORE.append(Workload(title, make, family=family))


def on(shape: Any, call: Any) -> Make:
    """Return a `make` that calls `call` with random numbers of shape(n)."""

    def make(device: torch.device, n: int) -> Body:
        x = rand(device, *shape(n))
        return lambda: call(x)

    return make


def gradient(shape: Any, call: Any) -> Make:
    """Return a `make` that runs the backward pass of `call` with random numbers of shape(n)."""

    def make(device: torch.device, n: int) -> Body:
        x = rand(device, *shape(n)).requires_grad_()
        result = call(x)
        # Not ones: where the sum of the results is constant (softmax), all gradients would be 0 but for rounding. Not x
        # either, for which the same holds with norms.
        grad = rand(device, *result.shape).square()
        return lambda: torch.autograd.grad(result, x, grad, retain_graph=True)

    return make


def vector(n: int) -> tuple[int, ...]:
    return (n,)


def square(n: int) -> tuple[int, ...]:
    side = math.isqrt(n)
    return side, side


def long_rows(n: int) -> tuple[int, ...]:
    return rows(n, 50257)


def tall(n: int) -> tuple[int, ...]:
    return max(1, n // 64), 64


def few_columns(n: int) -> tuple[int, ...]:
    return max(1, n // 4), 4


def volumes(n: int) -> tuple[int, ...]:
    side = max(4, round((n / 16) ** (1 / 3)))
    return 2, 8, side, side, side


# Reductions

for name, call in {
    "mean of all": lambda x: x.mean(),
    "product of all": lambda x: x.prod(),
    "any of all": lambda x: x.any(),
    "argmax of all": lambda x: x.argmax(),
    "max of all": lambda x: x.max(),
    "norm of all": lambda x: torch.linalg.vector_norm(x),
    "variance of all": lambda x: x.var(),
    "logsumexp of all": lambda x: x.logsumexp(0),
    "aminmax of all": lambda x: torch.aminmax(x),
    "count_nonzero of all": lambda x: torch.count_nonzero(x),
    "equality of all": lambda x: torch.equal(x, x),
    "mean squared error": lambda x: F.mse_loss(x, x),
    "Huber loss": lambda x: F.huber_loss(x, x),
    "smooth L1 loss": lambda x: F.smooth_l1_loss(x, x),
    "binary cross entropy": lambda x: F.binary_cross_entropy(x, x),
    "binary cross entropy of logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "soft margin loss": lambda x: F.soft_margin_loss(x, x),
    "dot product": lambda x: torch.dot(x, x),
    "hash of all": lambda x: torch.hash_tensor(x),
}.items():
    case("reductions", name, on(vector, call))
for name, call in {
    "amax of rows": lambda x: x.amax(1),
    "maximum of rows, with indices": lambda x: x.max(1),
    "logsumexp of rows": lambda x: x.logsumexp(1),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, dim=1),
    "product of columns": lambda x: x.prod(0),
    "variance of columns": lambda x: x.var(0),
    "argmin of columns": lambda x: x.argmin(0),
    "minimum of columns, with indices": lambda x: x.min(0),
}.items():
    case("reductions", name, on(rows, call))
case("reductions", "sum of rows of 64", on(tall, lambda x: x.sum(1)))
case("reductions", "sum of rows of 4", on(few_columns, lambda x: x.sum(1)))
case("reductions", "sum of 4 columns", on(few_columns, lambda x: x.sum(0)))
case("reductions", "sum of a middle dimension", on(lambda n: (max(1, n // 4096), 64, 64), lambda x: x.sum(1)))
case("reductions", "sum of outer dimensions", on(lambda n: (max(1, n // 4096), 64, 64), lambda x: x.sum((0, 2))))
case("reductions", "trace", on(square, lambda x: x.trace()))


# Scans

for name, shape, call in (
    ("cumprod of a vector", vector, lambda x: x.cumprod(0)),
    ("cummax of a vector", vector, lambda x: x.cummax(0)),
    ("logcumsumexp of a vector", vector, lambda x: x.logcumsumexp(0)),
    ("cumsum of columns", rows, lambda x: x.cumsum(0)),
    ("cumsum of 4 columns", few_columns, lambda x: x.cumsum(0)),
    ("cumsum of rows of 64", tall, lambda x: x.cumsum(1)),
    ("cummin of rows", rows, lambda x: x.cummin(1)),
    ("logcumsumexp of rows", rows, lambda x: x.logcumsumexp(1)),
):
    case("scans", name, on(shape, call))


# Copies

for name, shape, call in (
    ("flip of rows", rows, lambda x: x.flip(1)),
    ("flip of columns", rows, lambda x: x.flip(0)),
    ("roll of rows", rows, lambda x: x.roll(7, 1)),
    ("roll of all", vector, lambda x: x.roll(1000)),
    ("lower triangle", square, lambda x: x.tril()),
    ("upper triangle", square, lambda x: x.triu()),
    ("every second element", vector, lambda x: x[::2].contiguous()),
    ("every second row", rows, lambda x: x[::2].contiguous()),
    ("copy to channels last", images, lambda x: x.permute(0, 2, 3, 1).contiguous()),
    ("copy to heads first", lambda n: (max(1, n // (64 * 8)), 8, 64), lambda x: x.transpose(0, 1).contiguous()),
    ("copy of an expanded row", lambda n: (ROW,), lambda x: x.expand(4096, ROW).contiguous()),
    ("repeat of rows", tall, lambda x: x.repeat(2, 2)),
    ("cat of 2, by columns", tall, lambda x: torch.cat([x, x], 1)),
    ("stack of 2, by elements", vector, lambda x: torch.stack([x, x], 1)),
    ("pixel shuffle", images, lambda x: F.pixel_shuffle(x, 2)),
    ("pixel unshuffle", lambda n: (1, 16, 64, max(2, n // 1024 // 2 * 2)), lambda x: F.pixel_unshuffle(x, 2)),
    ("channel shuffle", images, lambda x: torch.channel_shuffle(x, 4)),
    ("padding by a constant", images, lambda x: F.pad(x, (2, 2, 2, 2))),
    ("fill", vector, lambda x: x.fill_(3)),
    ("masked_fill by a comparison", vector, lambda x: x.masked_fill(x > 2, 1.0)),
    ("complex of two operands", vector, lambda x: torch.complex(x, x)),
    ("float32 to int64", vector, lambda x: x.long()),
    ("float32 to bool", vector, lambda x: x.bool()),
    ("diag_embed of rows", rows, lambda x: torch.diag_embed(x[:, :64])),
):
    case("copies", name, on(shape, call))
case("copies", "arange", lambda device, n: lambda: torch.arange(n, device=device))
case("copies", "linspace", lambda device, n: lambda: torch.linspace(0, 1, n, device=device))
case("copies", "eye", lambda device, n: lambda: torch.eye(math.isqrt(n), device=device))
case("copies", "indices of a lower triangle", lambda device, n: lambda: torch.tril_indices(*square(n), device=device))


# Sorting and compaction

for name, shape, call in (
    ("sort of columns", lambda n: (max(1, n // 64), 64), lambda x: x.sort(0)),
    ("sort of rows of 64", tall, lambda x: x.sort(1)),
    ("sort, descending", vector, lambda x: x.sort(descending=True)),
    ("topk(100) of a vector", vector, lambda x: x.topk(100)),
    ("kthvalue(10) of rows", rows, lambda x: x.kthvalue(10, 1)),
    ("median of rows", rows, lambda x: x.median(1)),
    ("nanmedian of a vector", vector, lambda x: x.nanmedian()),
):
    case("sorting", name, on(shape, call))


def _whole_of(most: int, call: Any) -> Make:
    def make(device: torch.device, n: int) -> Body:
        x = whole(device, most, n)
        return lambda: call(x)

    return make


case("sorting", "sort of int8", _whole_of(100, lambda x: x.to(torch.int8).sort()))
case("sorting", "unique of distinct values", _whole_of(1 << 40, lambda x: x.unique()))
case("sorting", "unique, with counts and inverse", _whole_of(1000, lambda x: x.unique(False, True, True)))
case("compaction", "consecutive unique values", _whole_of(2, lambda x: x.unique_consecutive()))
case("compaction", "nonzero of rows", on(rows, lambda x: (x > 0.5).nonzero()))


def _masked_scatter(device: torch.device, n: int) -> Body:
    x, source = rand(device, n), rand(device, n)
    mask = x > 0.5
    return lambda: x.masked_scatter(mask, source)


case("compaction", "masked_scatter", _masked_scatter)


def _repeat_interleave(device: torch.device, n: int) -> Body:
    counts = whole(device, 3, n)
    return lambda: torch.repeat_interleave(counts)


case("compaction", "repeat_interleave", _repeat_interleave)


# Gather and scatter


def _by_index(call: Any, distinct: bool = False) -> Make:
    """Return a `make` that calls `call` with a vector, indices into it, and values for them.

    Indices must be distinct if the order of writes to the same element is unspecified.
    """

    def make(device: torch.device, n: int) -> Body:
        x, y = rand(device, n), rand(device, n)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).to(device)
        index = order if distinct else whole(device, n, n)
        return lambda: call(x, index, y)

    return make


for name, call in {
    "take": lambda x, index, y: x.take(index),
    "index of a vector": lambda x, index, y: x[index],
    "put_": lambda x, index, y: x.put_(index, y),
    "index_put with accumulate": lambda x, index, y: x.index_put_((index,), y, accumulate=True),
    "scatter": lambda x, index, y: x.scatter(0, index, y),
    "scatter_add": lambda x, index, y: x.scatter_add(0, index, y),
    "scatter_reduce by amax": lambda x, index, y: x.scatter_reduce(0, index, y, "amax"),
    "index_fill": lambda x, index, y: x.index_fill(0, index, 3),
    "bucketize": lambda x, index, y: torch.bucketize(x, torch.linspace(0, 1, 1000, device=x.device)),
    "isin of 100": lambda x, index, y: torch.isin(index, index[:100]),
    "histc": lambda x, index, y: x.histc(100),
    "bincount with weights": lambda x, index, y: (index % 1000).bincount(y),
}.items():
    case("indexing", name, _by_index(call, distinct=name in ("put_", "scatter")))


def _of_rows(call: Any, size: int = ROW) -> Make:
    """Return a `make` that calls `call` with rows, indices of rows, and rows for these indices."""

    def make(device: torch.device, n: int) -> Body:
        shape = rows(n, size)
        x, index, y = rand(device, *shape), whole(device, shape[0], shape[0]), rand(device, *shape)
        return lambda: call(x, index, y)

    return make


for name, call in {
    "index_select of rows": lambda x, index, y: x.index_select(0, index),
    "index_select of columns": lambda x, index, y: x.index_select(1, index % x.shape[1]),
    "index_reduce of rows": lambda x, index, y: x.index_reduce(0, index, y, "amax"),
    "index of rows": lambda x, index, y: x[index],
    "searchsorted in rows": lambda x, index, y: torch.searchsorted(x.cumsum(1), y),
}.items():
    case("indexing", name, _of_rows(call))


def _index_copy(device: torch.device, n: int) -> Body:
    x, y = rand(device, *rows(n)), rand(device, *rows(n))
    index = torch.arange(x.shape[0]).flip(0).to(device)  # distinct: the order of writes is unspecified
    return lambda: x.index_copy(0, index, y)


case("indexing", "index_copy of rows", _index_copy)


def _gather_columns(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    index = whole(device, x.shape[0], *x.shape)
    return lambda: x.gather(0, index)


case("indexing", "gather of columns", _gather_columns)


# Rows

for name, shape, call in (
    ("log_softmax of rows", rows, lambda x: x.log_softmax(1)),
    ("softmax of rows of 50,257", long_rows, lambda x: x.softmax(1)),
    ("softmax of rows of 64", tall, lambda x: x.softmax(1)),
    ("softmax of columns", rows, lambda x: x.softmax(0)),
    ("RMS norm of rows", rows, lambda x: F.rms_norm(x, x.shape[1:])),
    ("layer norm of one row", vector, lambda x: F.layer_norm(x, x.shape)),
    ("layer norm of rows of 64", tall, lambda x: F.layer_norm(x, x.shape[1:])),
    ("group norm", images, lambda x: F.group_norm(x, 4)),
    ("renorm", rows, lambda x: x.renorm(2, 0, 1.0)),
    ("weight norm", rows, lambda x: torch._weight_norm(x, x[:, :1], 0)),
    ("gated linear unit", rows, lambda x: F.glu(x)),
):
    case("rows", name, on(shape, call))
for name, shape, call in (
    ("softmax of rows, backward", rows, lambda x: x.softmax(1)),
    ("log_softmax of rows, backward", rows, lambda x: x.log_softmax(1)),
    ("RMS norm of rows, backward", rows, lambda x: F.rms_norm(x, x.shape[1:])),
    ("group norm, backward", images, lambda x: F.group_norm(x, 4)),
    ("batch norm, backward", images, lambda x: F.batch_norm(x, None, None, training=True)),
    ("gated linear unit, backward", rows, lambda x: F.glu(x)),
    ("cross entropy of rows, backward", rows, lambda x: F.cross_entropy(x, x.detach().argmax(1))),
):
    case("rows", name, gradient(shape, call))


def _batch_norm(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n))
    norm = torch.nn.BatchNorm2d(x.shape[1]).to(device).eval()
    return lambda: norm(x)


case("rows", "batch norm in evaluation", _batch_norm)


def _margin(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    target = whole(device, x.shape[1], x.shape[0])
    return lambda: F.multi_margin_loss(x, target)


case("rows", "multi margin loss", _margin)


# Images

_POOLS: dict[str, tuple[Any, Any]] = {
    "avg_pool2d(2)": (images, lambda x: F.avg_pool2d(x, 2)),
    "avg_pool2d(3, 1)": (images, lambda x: F.avg_pool2d(x, 3, 1)),
    "max_pool2d(3, 2)": (images, lambda x: F.max_pool2d(x, 3, 2)),
    "max_pool3d(2)": (volumes, lambda x: F.max_pool3d(x, 2)),
    "avg_pool3d(2)": (volumes, lambda x: F.avg_pool3d(x, 2)),
    "adaptive_avg_pool2d(1)": (images, lambda x: F.adaptive_avg_pool2d(x, 1)),
    "adaptive_avg_pool2d(7)": (images, lambda x: F.adaptive_avg_pool2d(x, 7)),
    "adaptive_max_pool2d(7)": (images, lambda x: F.adaptive_max_pool2d(x, 7)),
    "reflection pad": (images, lambda x: F.pad(x, (1, 1, 1, 1), "reflect")),
    "replication pad": (images, lambda x: F.pad(x, (2, 2, 2, 2), "replicate")),
    "upsampling, bicubic": (lambda n: images(n // 4), lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")),
    "upsampling, trilinear": (lambda n: volumes(n // 8), lambda x: F.interpolate(x, scale_factor=2, mode="trilinear")),
    "upsampling, nearest": (lambda n: images(n // 4), lambda x: F.interpolate(x, scale_factor=2)),
    "upsampling, linear, 1d": (
        lambda n: (4, 64, max(2, n // 512)),
        lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    ),
    "unfold, 3 × 3": (lambda n: images(n // 8), lambda x: F.unfold(x, 3, padding=1)),
}
_KNOWN = {"avg_pool2d(2), backward", "max_pool2d(3, 2), backward", "reflection pad, backward", "upsampling, nearest"}
for name, (shape, call) in _POOLS.items():
    if name not in _KNOWN:
        case("images", name, on(shape, call))
    if f"{name}, backward" not in _KNOWN:
        case("images", f"{name}, backward", gradient(shape, call))


def _grid(device: torch.device, n: int, differentiated: bool) -> Body:
    x = rand(device, *images(n)).requires_grad_(differentiated)
    grid = rand(device, x.shape[0], *x.shape[2:], 2) * 2 - 1
    if differentiated:
        return backward(F.grid_sample(x, grid, align_corners=False), x)
    return lambda: F.grid_sample(x, grid, align_corners=False)


case("images", "grid_sample", lambda device, n: _grid(device, n, False))
case("images", "grid_sample, backward", lambda device, n: _grid(device, n, True))


# Products


def _matrices(call: Any, *shapes: Any) -> Make:
    def make(device: torch.device, n: int) -> Body:
        given = [rand(device, *shape(n)) for shape in shapes]
        return lambda: call(*given)

    return make


def _half_square(n: int) -> tuple[int, ...]:
    return math.isqrt(n) // 2, math.isqrt(n) // 2


def _long(n: int) -> tuple[int, ...]:
    return 64, max(1, n // 64)


for name, call, shapes in (
    ("linear layer", lambda x, w: F.linear(x, w), (_half_square, _half_square)),
    ("product of transposed matrices", lambda x, y: x.t() @ y.t(), (_half_square, _half_square)),
    ("product of few rows of many columns", lambda x, y: x @ y.t(), (_long, _long)),
    ("product of many rows of few columns", lambda x, y: x @ y[:64], (tall, tall)),
    ("product of a transposed matrix and a vector", lambda x, y: x.t() @ y[0, :1].expand(x.shape[0]), (rows, rows)),
    ("outer product added", lambda x, y: torch.addr(x, y[0], y[1]), (square, square)),
    ("cross products", lambda x, y: torch.linalg.cross(x, y), (lambda n: (n // 3, 3), lambda n: (1, 3))),
    ("distances", lambda x: torch.cdist(x, x), (lambda n: (max(2, math.isqrt(n)), 32),)),
    ("distances of order 1", lambda x: torch.cdist(x, x, p=1.0), (lambda n: (max(2, math.isqrt(n)), 32),)),
    ("distances of pairs", lambda x: torch.pdist(x), (lambda n: (max(2, math.isqrt(n)), 32),)),
    (
        "1d convolution, 7",
        lambda x: F.conv1d(x, x[:1, :16, :7].expand(16, 16, 7), padding=3),
        (lambda n: (4, 16, max(8, n // 64)),),
    ),
    (
        "convolution, 1 × 1",
        lambda x: F.conv2d(x, x[:1, :, :1, :1].expand(16, 16, 1, 1)),
        (images,),
    ),
    (
        "transposed convolution, 2 × 2",
        lambda x: F.conv_transpose2d(x, x[:1, :, :2, :2].expand(16, 16, 2, 2), stride=2),
        (lambda n: images(n // 4),),
    ),
):
    case("products", name, _matrices(call, *shapes))


def _convolution_backward(device: torch.device, n: int) -> Body:
    x, weight = rand(device, *images(n // 16)).requires_grad_(), rand(device, 16, 16, 3, 3).requires_grad_()
    return backward(F.conv2d(x, weight, padding=1), x, weight)


case("products", "convolution, 3 × 3, 1/16 of the size, backward", _convolution_backward)


def _heads(device: torch.device, n: int, most: int) -> list[torch.Tensor]:
    """Return query, key and value with n elements each, in heads of 64, with sequences of up to `most` tokens."""
    length = min(most, max(16, n // 512))
    return [rand(device, max(1, n // (512 * length)), 8, length, 64) for _ in range(3)]


def _with_dropout(device: torch.device, n: int) -> Body:
    query, key, value = _heads(device, n, 512)
    return lambda: F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)


def _mask_backward(device: torch.device, n: int) -> Body:
    query, key, value = _heads(device, n // 16, 256)
    mask = rand(device, query.shape[2], key.shape[2]).requires_grad_()
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    grad = rand(device, *result.shape).square()
    return lambda: torch.autograd.grad(result, mask, grad, retain_graph=True)


def _one_query(device: torch.device, n: int) -> Body:
    query, key, value = _heads(device, n, 16384)
    query = query[:, :, :1].contiguous()
    return lambda: F.scaled_dot_product_attention(query, key, value)


case("products", "attention with dropout, heads of 64", _with_dropout)
case("products", "attention, gradient of a mask, 1/16 of the size", _mask_backward)
case("products", "attention of one query and 16,384 keys", _one_query)


# Fourier transforms of n / 2 complex numbers: in local memory, in several passes, and of a prime length by convolution


def _transposed(length: int) -> Make:
    def make(device: torch.device, n: int) -> Body:
        x = torch.view_as_complex(rand(device, max(1, n // 2 // length), length, 2))
        return lambda: torch.fft.fft(x)

    return make


case("transforms", "Fourier transform of rows of 1,024", _transposed(1024))
case("transforms", "Fourier transform of rows of 30,030", _transposed(30030))
case("transforms", "Fourier transform of rows of 1,009", _transposed(1009))
case("transforms", "Fourier transform of real rows of 1,000", on(lambda n: (n // 1000, 1000), torch.fft.rfft))
case("transforms", "Fourier transform of images of 64 × 64", on(lambda n: (n // 4096, 64, 64), torch.fft.rfft2))


# Candidates, each forced. "usual" is the one that is chosen without tuning.


def _by_form(family: str, form: str, make: Make) -> Make:
    def forced(device: torch.device, n: int) -> Body:
        body = make(device, n)
        if form == "usual" or device.type == "cpu":
            return body

        def by_form() -> object:
            with forcing(family, f"generated/{form}"):
                return body()

        return by_form

    return forced


FORMS = ("usual", "tile=32", "tile=16", "tile=64/whole", "tile=32/whole", "tile=16/whole")
PRODUCTS: dict[str, Any] = {  # rows, depth, columns, for n elements of the larger operand
    "square matrices": lambda n: (math.isqrt(n) // 4,) * 3,
    "few sums of many products": lambda n: (64, n // 64, 64),
    "many sums of few products": lambda n: (n // 1024, 64, 1024),
    "rows of a small batch": lambda n: (16, math.isqrt(n), math.isqrt(n)),
}


def _product(sizes: Any) -> Make:
    def make(device: torch.device, n: int) -> Body:
        rows, depth, columns = sizes(n)
        a, b = rand(device, rows, depth), rand(device, depth, columns)
        return lambda: torch.mm(a, b)

    return make


for name, shape in PRODUCTS.items():
    for form in FORMS:
        case("candidates", f"{name}: {form}", _by_form("products", form, _product(shape)))


def _layer(channels: int, side: int) -> Make:
    """Return a `make` for a 3 × 3 convolution of images with n elements in total, which keeps the channels."""

    def make(device: torch.device, n: int) -> Body:
        x = rand(device, max(1, n // (channels * side * side)), channels, side, side)
        weight = rand(device, channels, channels, 3, 3)
        return lambda: F.conv2d(x, weight, padding=1)

    return make


for channels, side in ((16, 112), (64, 56), (256, 14)):
    for form in ("usual", "winograd"):
        name = f"convolution of 3 × 3, {channels} channels of {side} × {side}"
        case("candidates", f"{name}: {form}", _by_form("convolutions", form, _layer(channels, side)))


# Steps of recurrent layers. States have n / 4 elements, so that the widest operands have n.


def _step(call: Any, outputs: tuple[int, ...], inputs: tuple[int, ...], gates: int) -> Make:
    """Return a `make` for a step of a recurrent layer.

    `outputs` and `inputs` are the widths of the operands, relative to the state's. There are two biases for all gates.
    """

    def make(device: torch.device, n: int) -> Body:
        batch, hidden = rows(n // 4)
        written = [torch.empty(batch, times * hidden, device=device) for times in outputs]
        read = [rand(device, batch, times * hidden) for times in inputs]
        biases = [rand(device, gates * hidden) for _ in range(2)]

        def body() -> object:
            call(written, read, biases)
            return written

        return body

    return make


backplane = torch.ops.backplane
for name, call, outputs, inputs, gates in (
    ("LSTM", lambda out, x, b: backplane.lstm_step(*out, *x[:2], *b, x[2]), (1, 1, 4), (4, 4, 1), 4),
    ("LSTM, backward", lambda out, x, b: backplane.lstm_step_backward(*out, *x), (4, 1), (1, 1, 1, 1, 1, 4), 4),
    ("GRU", lambda out, x, b: backplane.gru_step(*out, *x[:2], *b, x[2]), (1, 4), (3, 3, 1), 3),
    ("GRU, backward", lambda out, x, b: backplane.gru_step_backward(*out, *x), (3, 3, 1), (1, 1, 1, 4), 3),
    ("RNN", lambda out, x, b: backplane.rnn_step(*out, *x, *b, False), (1,), (1, 1), 1),
    ("RNN, backward", lambda out, x, b: backplane.rnn_step_backward(*out, *x, False), (1,), (1, 1, 1), 1),
):
    case("pointwise", f"step of a recurrent layer: {name}", _step(call, outputs, inputs, gates))


# Random numbers, optimizers

for name, call in {
    "uniform numbers": lambda x: x.uniform_(),
    "exponential numbers": lambda x: x.exponential_(),
    "Cauchy numbers": lambda x: x.cauchy_(),
    "log-normal numbers": lambda x: x.log_normal_(),
    "geometric numbers": lambda x: x.geometric_(0.5),
    "random integers": lambda x: x.random_(0, 100),
    "Bernoulli numbers": lambda x: x.bernoulli_(0.5),
    "Bernoulli numbers of given probabilities": lambda x: torch.bernoulli(x),
    "randomized leaky ReLU": lambda x: F.rrelu(x, training=True),
}.items():
    case("random", name, on(vector, call))


def _optimizer(kind: Any, **options: Any) -> Make:
    def make(device: torch.device, n: int) -> Body:
        parameters = [torch.nn.Parameter(one.clone()) for one in rand(device, n).chunk(8)]
        for one in parameters:
            one.grad = torch.ones_like(one)
        return kind(parameters, fused=True, **options).step

    return make


case("optimizers", "a fused step of SGD with momentum, 8 tensors", _optimizer(torch.optim.SGD, lr=0.1, momentum=0.9))
case("optimizers", "a fused step of Adagrad, 8 tensors", _optimizer(torch.optim.Adagrad))


def _lists(call: Any) -> Make:
    def make(device: torch.device, n: int) -> Body:
        parts = [one.contiguous() for one in rand(device, n).chunk(8)]
        return lambda: call(parts)

    return make


for name, call in {
    "sums of lists": lambda parts: torch._foreach_add(parts, parts),
    "products of lists by a number": lambda parts: torch._foreach_mul_(parts, 0.5),
    "norms of lists": lambda parts: torch._foreach_norm(parts),
}.items():
    case("optimizers", name, _lists(call))
