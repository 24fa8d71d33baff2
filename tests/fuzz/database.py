"""Calls from the sample inputs of PyTorch's operator database. Their small tensors are written as literals."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import torch

from fuzz.calls import attempt
from fuzz.moves import move
from fuzz.operators import function
from fuzz.random_arguments import RandomArguments

LARGEST = 24  # maximum number of elements of a tensor literal
SAMPLES = 30  # maximum number of samples of an operator and dtype
_DTYPES = [torch.float32, torch.float32, torch.int64, torch.float16, torch.bool, torch.complex64, torch.bfloat16]
# Operators with random or uninitialized results, with results that are unique only up to a sign or an order, or that
# concern only the host. A name with a dot at the end matches as a prefix, a name with a star at the end as a substring.
_LEFT_OUT_NAMES = """
empty* rand randn randint rand_like randn_like randint_like normal* bernoulli multinomial dropout* jiterator*
linalg. svd* pca_lowrank eig qr geqrf ormqr lu lu_solve lu_unpack sparse. to_sparse item resize* new_empty*
exponential* cauchy* geometric* log_normal* uniform* nn.functional.rrelu fractional_max_pool* poisson*
multi_head_attention* topk kthvalue sort argsort msort mode median nanmedian cholesky* triangular_solve
as_strided* fft. stft istft logdet slogdet nn.functional.gumbel_softmax tensor_split set set_ masked.
nn.functional.ctc_loss histogramdd nonzero_static polygamma* igamma igammac bitwise_left_shift
bitwise_right_shift quantile nanquantile cov corrcoef to type byte char short int long bincount scaled_dot*
isin searchsorted gradient nn.functional.linear_cross_entropy
"""
_LEFT_OUT = _LEFT_OUT_NAMES.split()


def _is_left_out(name: str) -> bool:
    return any(
        name.startswith(word) if word.endswith(".") else word[:-1] in name if word.endswith("*") else name == word
        for word in _LEFT_OUT
    )


@cache
def _operators() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [
        op for op in op_db if function(op.name) is not None and not op.variant_test_name and not _is_left_out(op.name)
    ]


@cache
def _samples(at: int, dtype: torch.dtype) -> list[Any]:
    op = _operators()[at]
    if dtype not in op.supported_dtypes("cpu"):
        return []
    state = torch.get_rng_state()
    torch.manual_seed(at)
    try:
        found = list(itertools.islice(op.sample_inputs("cpu", dtype, False), SAMPLES))
    finally:
        torch.set_rng_state(state)
    return [
        sample for sample in found
        if "device" not in sample.kwargs and _spellable((sample.input, sample.args, sample.kwargs))
    ]  # fmt: skip


def _spellable(tree: Any) -> bool:
    if isinstance(tree, torch.Tensor):
        return tree.numel() <= LARGEST and tree.layout == torch.strided
    if isinstance(tree, (list, tuple)):
        return all(_spellable(item) for item in tree)
    if isinstance(tree, dict):
        return all(_spellable(item) for item in tree.values())
    return tree is None or isinstance(tree, (bool, int, float, complex, str, torch.dtype))


def _written(draw: RandomArguments, tree: Any, layouts: bool) -> str:
    """Returns a tree of arguments as code. Adds lines for its tensors, sometimes with another layout."""
    if isinstance(tree, torch.Tensor):
        return _tensor(draw, tree, layouts)
    if isinstance(tree, torch.Size):
        return str(tuple(tree))
    if isinstance(tree, (list, tuple)):
        parts = [_written(draw, item, layouts) for item in tree]
        return f"[{', '.join(parts)}]" if isinstance(tree, list) else f"({''.join(part + ', ' for part in parts)})"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {_written(draw, item, layouts)}" for key, item in tree.items()) + "}"
    return repr(tree)


def _tensor(draw: RandomArguments, tensor: torch.Tensor, layouts: bool) -> str:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype.is_floating_point and tensor.numel():
        same = draw.tensors(lambda other: other.shape == tensor.shape and other.dtype == tensor.dtype)
        if same and draw.chance(0.25) and bool((tensor.min() < 0).item()):
            return draw.one(same)[0]
    name = draw.assign(f"torch.tensor({tensor.tolist()}, dtype={tensor.dtype}, device=d)", "tensor")
    if 0 in tensor.shape:
        name = draw.assign(f"{name}.reshape({tuple(tensor.shape)})", "reshape")
    if layouts and tensor.dim():
        if draw.chance(0.4):
            base = draw.assign(f"torch.stack([{name}, {name}], -1)", "stack")
            return draw.assign(f"{base}[..., {draw.one([0, 1])}]", "slice")
        if draw.chance(0.3):
            base = draw.assign(f"torch.cat([{name}.reshape(-1)[:1], {name}.reshape(-1)])", "cat")
            return draw.assign(f"{base}[1:].view({tuple(tensor.shape)})", "slice")
        if tensor.dim() > 1 and draw.chance(0.4):
            base = draw.assign(f"{name}.mT.contiguous()", "contiguous")
            return draw.assign(f"{base}.mT", "mT")
    return name


@move
def sample(draw: RandomArguments) -> None:
    """Calls an operator with samples one to three times: unchanged, with other layouts, in-place, or with gradients."""
    at = draw.random.randrange(len(_operators()))
    op = _operators()[at]
    found = _samples(at, draw.one(_DTYPES)) or _samples(at, torch.float32)
    if not found:
        return
    for turn in range(draw.one([1, 2, 3])):
        item = draw.one(found) if draw.chance(0.7) else found[0]
        layouts = turn > 0 or draw.chance(0.4)
        first = _written(draw, item.input, layouts)
        rest = [_written(draw, argument, layouts) for argument in item.args]
        words = [f"{key}={_written(draw, argument, layouts)}" for key, argument in item.kwargs.items()]
        if draw.chance(0.2) and op.get_inplace() is not None and "." not in op.name and not item.broadcasts_input:
            draw.line(f"{first}.{op.name}_({', '.join([*rest, *words])})", f"{op.name}_")
            continue
        if draw.chance(0.2) and op.supports_out:
            draw_out(draw, op.name, [first, *rest], words)
            continue
        text = f"torch.{op.name}({', '.join([first, *rest, *words])})"
        name = first if isinstance(item.input, torch.Tensor) else None
        if name and draw.chance(0.3) and op.supports_autograd and item.input.is_floating_point():
            leaf = draw.assign(f"{name}.detach().requires_grad_()", "leaf")
            text = f"torch.{op.name}({', '.join([leaf, *rest, *words])})"
            value = draw.assign(text, op.name)
            out = draw.get(value)
            if value in draw.run.cpu and isinstance(out, torch.Tensor) and out.requires_grad:
                cotangent = draw.new(out.shape, out.dtype)
                draw.assign(
                    f"torch.autograd.grad({value}, [{leaf}], {cotangent}, allow_unused=True)", f"{op.name} backward"
                )
            continue
        draw.assign(text, op.name)


def draw_out(draw: RandomArguments, name: str, arguments: list[str], words: list[str]) -> None:
    result = attempt(draw, f"torch.{name}({', '.join([*arguments, *words])})")
    if isinstance(result, torch.Tensor):
        draw.line(f"torch.{name}({', '.join([*arguments, *words, 'out=' + draw.out(result)])})", f"{name} out=")
