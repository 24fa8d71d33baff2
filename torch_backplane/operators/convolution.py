"""Convolution in 1 to 3 dimensions, as a matrix product of the weight and patches of the image (im2col).

Three functions compute everything: `_correlate`, `_spread` (gradient of the image) and `_weight_grad`. A transposed
convolution is the gradient of another convolution, so it uses the same functions.

- Where work items run in lockstep, products read patches directly from the image (`kernels/templates/convolution.py`),
  except in the gradient of the image with a stride above 1.
- Elsewhere, patches are stored in memory, for a part of a large batch at a time.
- Tuning also tries Winograd's algorithm (`kernels/templates/winograd.py`) for 3 × 3 windows.
- PyTorch's CPU kernels are a candidate if the host can access the device's memory and oneDNN supports the dtype.
- A library of the device's driver is a candidate if there is one (`library_convolutions.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from torch_backplane import tuning
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates import winograd
from torch_backplane.kernels.templates.convolution import Sums, can_gather, forward, gathered, of_image, of_weight
from torch_backplane.kernels.templates.fused_operations import Operations
from torch_backplane.kernels.templates.unfold import Windows, fold, unfold
from torch_backplane.operators import library_convolutions
from torch_backplane.operators.linear_algebra import host_refuses, on_host, product
from torch_backplane.planning import (
    Call,
    Candidate,
    Candidates,
    Convolution,
    RunOnCPU,
    call_on_cpu,
    costs,
    dialect_of,
    operator,
    run_template,
    try_library,
    workspace,
)

_MAX_PATCHES = 64 << 20  # bytes; a smaller workspace limits patches further

# The dtypes that oneDNN supports on every CPU. For others PyTorch uses plain loops, often slower than our kernels.
_ONEDNN_DTYPES = (torch.float32, torch.bfloat16)


@operator("convolution_overrideable", variants=False)
def convolution(
    call: Call,
    self: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> torch.Tensor:
    _check(self, weight, bias)
    if min(dilation) <= 0:
        raise RunOnCPU("dilation is not positive")  # PyTorch's kernel raises the error
    if transposed and any(size >= max(steps) for size, *steps in zip(output_padding, stride, dilation, strict=False)):
        raise RunOnCPU("output padding is not smaller than stride or dilation")  # likewise
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    meta = torch.ops.aten.convolution(_meta(self), _meta(weight), None if bias is None else _meta(bias), *settings)
    if transposed and (0 in meta.shape[2:] or (self.numel() and not weight.numel())):
        raise RunOnCPU("a transposed convolution with an empty result or an empty weight")
    layout = _layout(self, weight)
    operands = {"input": self, "weight": weight, "bias": bias}
    kind = Convolution.IMAGE if transposed else Convolution.VALUES
    library, form = "", ""
    if meta.numel() and self.numel():
        sides = (meta, self) if transposed else (self, meta)
        library, form, described = _choose("Convolution", operands, settings, sides, (kind,))
        if library == "driver":
            out = torch.empty(meta.shape, dtype=self.dtype, device=self.device, memory_format=layout)
            compute = partial(library_convolutions.compute, described, kind, out, self, weight)
            if try_library(compute):
                return out if bias is None else out.add_(bias.view(-1, *(1 for _ in meta.shape[2:])))
    if library == "host":
        out = torch.empty(meta.shape, dtype=self.dtype, device=self.device, memory_format=layout)
        call_on_cpu(torch.ops.aten.convolution.out, self, weight, bias, *settings, out=out)
        return out
    out = self.new_empty(meta.shape)
    if not out.numel():
        return out.contiguous(memory_format=layout)
    self, weight = self.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    image, values = (out, self) if transposed else (self, out)
    windows = _windows(image, values, weight, stride, padding, dilation)
    if not self.numel():
        out.zero_()
        if bias is not None:
            out.add_(bias.view(-1, *(1 for _ in windows.image)))
    elif transposed:
        _spread(out, self, weight, bias, groups, windows, form)
    else:
        _correlate(out, self, weight, bias, groups, windows, form)
    return out.contiguous(memory_format=layout)


@operator("convolution_backward_overrideable", variants=False)
def convolution_backward(
    call: Call,
    grad: torch.Tensor,
    self: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    _check(self, weight, None)
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    torch._check(min(dilation) > 0, lambda: f"expected dilations greater than zero, but got {list(dilation)}")
    wanted = torch.ops.aten.convolution(_meta(self), _meta(weight), None, *settings).shape
    torch._check(grad.shape == wanted, lambda: f"expected a gradient of {list(wanted)}, but got {list(grad.shape)}")
    layout = _layout(self, weight)
    operands = {"grad": grad, "input": self, "weight": weight}
    library, form = "", ""

    def empty_results(made_in: torch.memory_format) -> tuple[torch.Tensor | None, ...]:
        return (
            torch.empty_like(self, memory_format=made_in) if output_mask[0] else None,
            torch.empty_like(weight, memory_format=made_in) if output_mask[1] else None,
            grad.new_empty(grad.shape[1]) if output_mask[2] else None,
        )

    if grad.numel() and self.numel():
        sides = (grad, self) if transposed else (self, grad)
        of_self = Convolution.VALUES if transposed else Convolution.IMAGE
        kinds = [kind for kind, wanted in zip((of_self, Convolution.WEIGHT), output_mask, strict=False) if wanted]
        library, form, described = _choose("ConvolutionBackward", operands, settings, sides, kinds, output_mask)
        if library == "driver":
            results = empty_results(layout)
            compute = partial(_backward_by_driver, results, described, grad, self, weight, transposed)
            if try_library(compute):
                return results
    results = empty_results(layout if library == "host" else torch.contiguous_format)
    if library == "host":
        of = dict(zip(("of_input", "of_weight", "of_bias"), results, strict=True))
        call_on_cpu(torch.ops.backplane.host_convolution_backward.default, grad, self, weight, *settings, **of)
        return results
    grad, self, weight = grad.contiguous(), self.contiguous(), weight.contiguous()
    self_grad, weight_grad, bias_grad = results
    if not grad.numel() or not self.numel():
        for result in (self_grad, weight_grad):
            if result is not None:
                result.zero_()
    else:
        image, values = (grad, self) if transposed else (self, grad)
        windows = _windows(image, values, weight, stride, padding, dilation)
        if self_grad is not None and transposed:
            _correlate(self_grad, grad, weight, None, groups, windows, form)
        elif self_grad is not None:
            _spread(self_grad, grad, weight, None, groups, windows, form)
        if weight_grad is not None:
            _weight_grad(weight_grad, values, image, groups, windows)
    if bias_grad is not None:
        _sum_to_bias(bias_grad, grad)
    return (
        None if self_grad is None else self_grad.contiguous(memory_format=layout),
        None if weight_grad is None else weight_grad.contiguous(memory_format=layout),
        bias_grad,
    )


def _sum_to_bias(bias_grad: torch.Tensor, grad: torch.Tensor) -> None:
    torch.sum(grad, [0, *range(2, grad.dim())], out=bias_grad)


def _backward_by_driver(
    results: Sequence[torch.Tensor | None],
    described: library_convolutions.Described,
    grad: torch.Tensor,
    self: torch.Tensor,
    weight: torch.Tensor,
    transposed: bool,
) -> None:
    self_grad, weight_grad, bias_grad = results
    if self_grad is not None:
        kind = Convolution.VALUES if transposed else Convolution.IMAGE
        library_convolutions.compute(described, kind, self_grad, grad, weight)
    if weight_grad is not None:
        values, image = (self, grad) if transposed else (grad, self)
        library_convolutions.compute(described, Convolution.WEIGHT, weight_grad, values, image)
    if bias_grad is not None:
        _sum_to_bias(bias_grad, grad)


def _host_refuses(self: torch.Tensor) -> str | None:
    if self.dtype not in _ONEDNN_DTYPES or not torch.backends.mkldnn.is_available():
        return f"does not support {self.dtype} in oneDNN".replace("torch.", "")
    return host_refuses(self)


def _forms(self: torch.Tensor, weight: torch.Tensor, groups: int, w: Windows, *rest: Any) -> Sequence[str]:
    """Alternative forms of the generated kernels."""
    return [_WINOGRAD] if winograd.takes(w.window, w.stride, w.dilation) else []


def _workspace(form: str, self: torch.Tensor, weight: torch.Tensor, groups: int, w: Windows, *rest: Any) -> int:
    """Bytes of intermediate results that kernels need for one image."""
    dtype = value_dtype(self.dtype)
    of_values, of_group = weight.shape[0], weight.shape[1]
    if form == _WINOGRAD:
        tiles = max(math.prod(winograd.tiles(one)) for one in (w, w.transposed()))
        return winograd.POINTS * (of_values * of_group + (of_values + of_group * groups) * tiles) * dtype.itemsize
    if w.trivial or _gathers(self):
        return 0
    return of_group * groups * math.prod(w.window) * math.prod(w.places) * dtype.itemsize


_WINOGRAD = "winograd"
_SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _multiplications(self: torch.Tensor, weight: torch.Tensor, groups: int, w: Windows, *rest: Any) -> int:
    return self.shape[0] * math.prod(w.places) * weight.numel()


convolutions = Candidates(
    "convolutions",
    Candidate(
        "host",
        lambda self, *described: _host_refuses(self),
        cost=lambda self, *described: costs.on_host("convolutions", self.dtype, _multiplications(self, *described)),
    ),
    Candidate(
        "driver",
        lambda self, *described: library_convolutions.why_not(self, *described[-1:]),
        cost=lambda self, *described: library_convolutions.cost(self, *described[-1:]),
        workspace=lambda form, self, *described: library_convolutions.workspace(self, described[-1]),
    ),
    Candidate(
        "generated",
        lambda *described: None,
        _forms,
        workspace=_workspace,
    ),
)


def _choose(
    name: str,
    operands: Mapping[str, torch.Tensor | None],
    settings: Sequence[Any],
    sides: tuple[torch.Tensor, torch.Tensor],
    kinds: Iterable[Convolution],
    mask: Sequence[bool] = (),
) -> tuple[str, str, library_convolutions.Described]:
    """The library that computes the call, its form ("" for the default one), and the call for a library of the driver.

    Args:
        sides: tensors of the shapes of the image and of the values.
        kinds: what is computed.
    """
    input, weight = operands["input"], operands["weight"]
    assert input is not None
    assert weight is not None

    named = dict(zip(_SETTINGS, settings, strict=True)) | ({"mask": mask} if mask else {})
    problem = partial(tuning.Problem.of, name, input.dtype, **operands, **named)
    description = _description(kinds, *sides, input, weight, settings)
    library, _, form = convolutions.choose(input, *description, problem=problem).partition("/")
    return library, form, description[-1]


def _description(
    kinds: Iterable[Convolution],
    image: torch.Tensor,
    values: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    settings: Sequence[Any],
) -> tuple[torch.Tensor, int, Windows, library_convolutions.Described]:
    """What candidates get besides the input: the weight, groups, windows, and the call for a library of the driver."""
    windows, groups = _windows(image, values, weight, *settings[:3]), settings[-1]
    channels = (image.shape[1], values.shape[1])
    layout = _layout(input, weight)
    return (
        weight,
        groups,
        windows,
        library_convolutions.Described(tuple(kinds), image.shape[0], *channels, groups, windows, layout),
    )


def _settings(operands: tuning.Operands) -> tuple[Any, ...]:
    """The settings of a convolution, in the order of its arguments."""
    stride, padding, dilation, transposed, padded, groups = (operands.integers(name) for name in _SETTINGS)
    return stride, padding, dilation, bool(transposed[0]), padded, groups[0]


@tuning.trial("Convolution")
def _trial(operands: tuning.Operands) -> Callable[[], torch.Tensor]:
    given = (operands.given("input"), operands.given("weight"), operands.tensor("bias"), *_settings(operands))
    return lambda: torch.ops.aten.convolution_overrideable(*given)


@tuning.trial("ConvolutionBackward")
def _trial_backward(operands: tuning.Operands) -> Callable[[], tuple[torch.Tensor | None, ...]]:
    tensors = (operands.given(name) for name in ("grad", "input", "weight"))
    given = (*tensors, *_settings(operands), [bool(one) for one in operands.integers("mask")])
    return lambda: torch.ops.aten.convolution_backward_overrideable(*given)


def _layout(self: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The memory format of the results: channels last if either operand has it, as in PyTorch. Generated kernels still
    compute on contiguous tensors."""
    asked = (suggest_memory_format(self), suggest_memory_format(weight))
    return next((layout for layout in asked if layout != torch.contiguous_format), torch.contiguous_format)


def _check(self: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    others = [one.dtype for one in (weight, bias) if one is not None]
    if set(others) != {self.dtype} or not self.is_floating_point():
        raise RunOnCPU(f"an input of {self.dtype} with weight and bias of {others}".replace("torch.", ""))


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _windows(
    image: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Windows:
    rank = image.dim() - 2

    def each(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(numbers) * rank if len(numbers) == 1 else tuple(numbers)

    return Windows(
        tuple(image.shape[2:]),
        tuple(values.shape[2:]),
        tuple(weight.shape[2:]),
        each(stride),
        each(padding),
        each(dilation),
    )


def _chunks(image: torch.Tensor, windows: Windows, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of the batch whose patches of `dtype` stay below the limit; one slice for a small batch."""
    batch, channels = image.shape[:2]
    of_one = channels * math.prod(windows.window) * math.prod(windows.places) * dtype.itemsize
    return _parts(batch, 0 if windows.trivial else of_one)


def _parts(batch: int, of_one: int, of_all: int = 0) -> Iterator[slice]:
    """Slices of a batch that fit the workspace, if each image takes `of_one` bytes, and all of them `of_all` more."""
    limit = workspace()
    most = _MAX_PATCHES if limit is None else min(limit - of_all, _MAX_PATCHES)
    step = max(1, min(batch, most // of_one)) if of_one else batch
    return (slice(part * step, min(part * step + step, batch)) for part in range(-(-batch // step)))


def _patches(image: torch.Tensor, windows: Windows, *, rows_first: bool = False) -> torch.Tensor:
    """The patches as (batch, rows, columns). With `rows_first`, they are stored as (rows, batch, columns)."""
    batch, channels = image.shape[:2]
    columns = math.prod(windows.places)
    if windows.trivial and not rows_first:
        return image.view(batch, channels, columns)
    rows = channels * math.prod(windows.window)
    shape = (rows, batch, columns) if rows_first else (batch, rows, columns)
    patches = image.new_empty(shape)
    patches = patches.transpose(0, 1) if rows_first else patches
    run_template(unfold, image.device, patches, image, windows, name="convolution")
    return patches


def _grouped(values: torch.Tensor, groups: int) -> torch.Tensor:
    """(batch, channels, …) as (batch, groups, channels of a group, places)."""
    return values.reshape(values.shape[0], groups, values.shape[1] // groups, -1)


def _matrix(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """The weight (channels of values, …) as (groups, channels of values in a group, rows of patches)."""
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def _gathers(out: torch.Tensor) -> bool:
    """Whether products read patches directly from images."""
    return not on_host(out) and can_gather(dialect_of(out.device), out.dtype)


def _by_group(values: torch.Tensor, groups: int) -> torch.Tensor:
    """(batch, channels, …) as (groups, channels of a group, batch, places)."""
    batch, channels, *sizes = values.shape
    return values.view(batch, groups, channels // groups, math.prod(sizes)).permute(1, 2, 0, 3)


def _gather(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sums: Sums, bias: torch.Tensor | None
) -> None:
    limit = workspace()
    run_template(gathered, out.device, out, (a, b), sums, bias, name="convolution", workspace=limit)


def convolution_takes_operations(values: torch.Tensor, self: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `convolution_with_operations` accepts the operands; `values` has the sizes of the results."""
    return 0 not in (*values.shape, *self.shape, *weight.shape) and can_gather(dialect_of(self.device), self.dtype)


def convolution_gathers(
    values: torch.Tensor, self: torch.Tensor, weight: torch.Tensor, settings: Sequence[Any]
) -> bool:
    """Whether `convolution` uses the same kernel as `convolution_with_operations`, which must accept the operands."""
    description = _description([Convolution.VALUES], self, values, self, weight, settings)
    _, _, windows, _ = description
    return not windows.trivial and convolutions.choose(self, *description) == "generated"


def convolution_with_operations(
    values: torch.Tensor,
    self: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    settings: Sequence[Any],
    epilogue: Operations,
) -> None:
    """Computes a convolution that is not transposed, and uses the results in the kernel that computes them.

    Args:
        values: the results; only sizes, strides and dtype count. The epilogue's `place` follows the strides.
        self, weight, bias, settings: the arguments of the convolution. None of the tensors is empty.
        epilogue: what becomes of the results.
    """
    self, weight = self.contiguous(), weight.contiguous()
    bias, groups = None if bias is None else bias.contiguous(), settings[-1]
    sums = forward(values, self, weight, groups, _windows(self, values, weight, *settings[:3]))
    operands = (_by_group(values, groups), (weight, self), sums, bias, workspace(), epilogue)
    run_template(gathered, self.device, *operands, name="convolution")


def _correlate(
    values: torch.Tensor,
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: int,
    w: Windows,
    form: str,
) -> None:
    """values = weight × patches of the image + bias."""
    if form == _WINOGRAD:
        _by_winograd(values, image, weight, bias, groups, w)
        return
    if not w.trivial and _gathers(values):
        _gather(_by_group(values, groups), weight, image, forward(values, image, weight, groups, w), bias)
        return
    matrix = _matrix(weight, groups)
    for part in _chunks(image, w, image.dtype):
        out = _grouped(values[part], groups)
        patches = _grouped(_patches(image[part], w), groups)
        added = None if bias is None else bias.view(1, groups, -1, 1).expand(out.shape)
        product(out, matrix.expand(out.shape[0], *matrix.shape), patches, added, 1)
        del patches  # frees them before the next ones are allocated; likewise below


def _spread(
    image: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: int,
    w: Windows,
    form: str,
) -> None:
    """image = bias + the sum of the patches weightᵀ × values at their positions. Half precision is summed in float32:
    sums of rounded patches have errors 20 times as large."""
    if form == _WINOGRAD:
        _by_winograd(image, values, weight, bias, groups, w.transposed(), of_image=True)
        return
    if all(step == 1 for step in w.stride) and _gathers(image):
        _gather(_by_group(image, groups), weight, values, of_image(image, values, weight, groups, w), bias)
        return
    dtype = value_dtype(image.dtype)
    matrix = _matrix(weight, groups).mT.to(dtype)
    for part in _chunks(image, w, dtype):
        given = _grouped(values[part], groups).to(dtype)
        batch, rows, columns = given.shape[0], image.shape[1] * math.prod(w.window), given.shape[3]
        patches = image.new_empty(batch, rows, columns, dtype=dtype)
        product(_grouped(patches, groups), matrix.expand(batch, *matrix.shape), given)
        run_template(fold, image.device, image[part], patches, w, bias, name="convolution")
        del given, patches


def _by_winograd(
    out: torch.Tensor,
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: int,
    w: Windows,
    *,
    of_image: bool = False,
) -> None:
    """out = weight × patches of the image + bias. `of_image` uses the weight as for the gradient of the image.
    Intermediate results have the dtype of sums."""
    rows, depth, places = out.shape[1] // groups, image.shape[1] // groups, math.prod(winograd.tiles(w))
    points, dtype = winograd.POINTS * groups, value_dtype(out.dtype)
    weights = out.new_empty(points, rows, depth, dtype=dtype)
    run_template(winograd.transform_weight, out.device, weights, weight, groups, of_image, name="convolution")
    of_one = points * (rows + depth) * places * dtype.itemsize
    for part in _parts(out.shape[0], of_one, weights.numel() * dtype.itemsize):
        given, made = image[part], out[part]
        columns = given.shape[0] * places
        transformed = out.new_empty(points, depth, columns, dtype=dtype)
        run_template(winograd.transform_image, out.device, transformed, given, w, name="convolution")
        sums = out.new_empty(points, rows, columns, dtype=dtype)
        product(sums, weights, transformed)
        run_template(winograd.transform_results, out.device, made, sums, w, bias, name="convolution")
        del transformed, sums


def _weight_grad(weight_grad: torch.Tensor, values: torch.Tensor, image: torch.Tensor, groups: int, w: Windows) -> None:
    """The sum over the batch of values × patchesᵀ: one product that sums over all positions of all images."""
    if _gathers(weight_grad):
        channels, of_group, *window = weight_grad.shape
        results = weight_grad.view(groups, channels // groups, of_group, math.prod(window))
        sums = of_weight(weight_grad, values, image, groups, w)
        _gather(results, values, image, sums, None)
        return
    # The results of several slices of the batch are summed in float32 (float64 for float64).
    parts = list(_chunks(image, w, image.dtype))
    total = weight_grad if len(parts) == 1 else torch.zeros_like(weight_grad, dtype=value_dtype(weight_grad.dtype))
    of_part = weight_grad if len(parts) == 1 else torch.empty_like(weight_grad)
    for part in parts:
        left = values[part].transpose(0, 1).contiguous().view(groups, values.shape[1] // groups, -1)
        patches = _patches(image[part], w, rows_first=True).transpose(0, 1)
        right = patches.view(groups, patches.shape[0] // groups, -1).mT
        product(_matrix(of_part, groups), left, right)
        del left, patches, right
        if total is not of_part:
            total.add_(of_part)
    if total is not weight_grad:
        weight_grad.copy_(total)
