"""Strides of results and gradients for images, compared with the CPU's.

Runs all samples of the database with 3 to 5 dimensions, batched and not, with channels-last arguments, forward and
backward. Values are not compared, so any driver works.

    TORCH_BACKPLANE_DRIVERS=opencl python tests/sweeps/sweep_process.py image_layouts_sweep.py --match pool
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import sweep_process
import torch
from torch.utils._pytree import tree_map_only

from torch_backplane.conformance import comparison
from torch_backplane.conformance.calls import _brief
from torch_backplane.conformance.check import _ARGUMENTS_STAY_ON_CPU, SEED
from torch_backplane.conformance.database import load
from torch_backplane.conformance.settings import OP_DB
from torch_backplane.conformance.transfer import Transfer, tensors

DEVICE, CPU = torch.device("bp", 0), torch.device("cpu")

# These are like torch.cuda, with other layouts than the CPU.
AS_CUDA = {
    "_batch_norm_with_update": "gradients have the layout of the images, in any order of dimensions",
    "_native_batch_norm_legit": "gradients have the layout of the images, in any order of dimensions",
    "native_batch_norm": "gradients have the layout of the images, in any order of dimensions",
    "nn.functional.batch_norm": "gradients have the layout of the images, in any order of dimensions",
    "nn.functional.channel_shuffle": "contiguous: composed of views and a copy",
    "nn.functional.conv_transpose3d": "channels-last, as cuDNN has them",
    "nn.functional.pixel_shuffle": "contiguous: composed of views and a copy",
    "nn.functional.scaled_dot_product_attention": "depends on the selected implementation",
    "nn.functional.soft_margin_loss": "gradients for operands with different layouts",
}
Arguments = tuple[Any, tuple[Any, ...], dict[str, Any]]


def channels_inside(tensor: torch.Tensor, spatial: int) -> torch.Tensor:
    """Returns the tensor with the channels, the dimension before `spatial` ones, innermost in memory."""
    if tensor.dim() not in (spatial + 1, spatial + 2) or tensor.layout != torch.strided:
        return tensor
    channel = tensor.dim() - 1 - spatial
    moved = tensor.detach().movedim(channel, -1).contiguous().movedim(-1, channel)
    return moved.requires_grad_(tensor.requires_grad)


def layouts(given: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Yields arguments with channels-last images of 2 or 3 spatial dimensions: all images, and only the first."""
    for spatial in (2, 3):
        if given[0].dim() in (spatial + 1, spatial + 2):
            inside = tree_map_only(torch.Tensor, partial(channels_inside, spatial=spatial), given)
            yield f"channels-last {spatial}d", inside
            yield f"first channels-last {spatial}d", (inside[0], *given[1:])


def outcome(op: Any, call: Arguments, device: torch.device) -> tuple[Any, str]:
    """Returns (results and gradients, error)."""
    torch.manual_seed(SEED)
    transfer = Transfer(device)
    rest = Transfer(CPU) if op.full_name in _ARGUMENTS_STAY_ON_CPU else transfer
    try:
        given = transfer(call[0]), rest(call[1]), rest(call[2])
        result = op.op(given[0], *given[1], **given[2])
        roots = [one for one in tensors((result,)) if one.requires_grad]
        leaves = [one for one in tensors(given) if one.requires_grad]
        gradients: Any = ()
        if roots and leaves:
            ones = [torch.ones_like(root) for root in roots]
            gradients = torch.autograd.grad(roots, leaves, ones, allow_unused=True)
        return tree_map_only(torch.Tensor, torch.Tensor.detach, (result, gradients)), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def sweep(op: Any, samples: int) -> None:
    random.seed(SEED)
    torch.manual_seed(SEED)
    differentiable = op.supports_autograd
    examples = [
        sample
        for sample in op.sample_inputs("cpu", torch.float32, requires_grad=differentiable)
        if isinstance(sample.input, torch.Tensor) and 3 <= sample.input.dim() <= 5 and sample.input.numel() > 1
    ]
    seen = set()
    for sample in random.sample(examples, min(samples, len(examples))):
        given = (sample.input, tuple(sample.args), dict(sample.kwargs))
        for name, call in layouts(given):
            words = [_brief(value) for value in (call[0], *call[1])]
            words += [f"{key}={_brief(value)}" for key, value in call[2].items()]
            text = f"{op.full_name}({', '.join(words)}), {name}"
            if text in seen:
                continue
            seen.add(text)
            expected, refusal = outcome(op, call, CPU)
            if refusal:
                continue
            sweep_process.call(text)
            actual, error = outcome(op, call, DEVICE)
            if error:
                continue  # an error in values, which a device without memory does not have
            for kind, message in comparison.compare(expected, actual, DEVICE, values=False):
                if kind == "layout":
                    sweep_process.found(f"{text}: {message}")


def names(pattern: str) -> list[str]:
    return [
        name
        for name, op in load(OP_DB).items()
        if re.search(pattern, name) and torch.float32 in op.dtypes and name not in AS_CUDA
    ]


if __name__ == "__main__":
    sweep_process.over_database(__doc__, sweep, samples=8)
