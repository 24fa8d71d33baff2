"""Deferred operators compared with the CPU: sizes, strides and dtypes of results, values, missing results, errors.

Runs PyTorch's operator database on asynchronous host devices: its samples, the same with channels-last images, the
gradients of each argument alone and of all, and the error inputs.

    TORCH_BACKPLANE_DRIVERS=host TORCH_BACKPLANE_HOST_ASYNC=1 python -W ignore tests/sweeps/deferred_sweep.py --part 1/2

prints a line for each finding, and the number of calls.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map_only

DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool, torch.bfloat16)

# Their results are uninitialized memory or random numbers.
UNDETERMINED = re.compile(
    r"empty|^bernoulli|^cauchy|dropout|^exponential|^geometric|^log_normal|^multinomial|^normal|^rand|^uniform|rrelu|fractional_max_pool|_lowrank|multi_head_attention|^nn.functional.scaled_dot"
)

# Known differences: only strides differ, or all devices except the CPU refuse the call.
KNOWN = {
    r"^fft\.": "PyTorch's meta kernels give transforms CUDA's strides",
    r"^nan(sum|mean) .* gradient": "strides of dimensions of size 1",
    r"sparse": "bp has no sparse tensors",
    r"^nn.functional.embedding_bag .* gradient .*Sparse": "bp has no sparse tensors",
    r"^tensor_split": "PyTorch requires these indices on the CPU",
    r"^(abs|histc|nan(sum|mean)|trace|stft|_upsample_bilinear2d_aa) .*, which the CPU lacks": "CUDA supports the dtype",
    r"^nn.functional.(softsign|avg_pool3d|multi(label)?_margin_loss) .*, which the CPU lacks": "or such targets",
    r"^nn.functional.linear_cross_entropy.chunked": "sums of bfloat16 in another order",
}


def on(device: str, value: Any) -> Any:
    """Copies arguments to a device. Each tensor gets its own memory and keeps its strides."""

    def move(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor.to(device)
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return made.copy_(tensor.detach().resolve_conj().resolve_neg()).to(device)

    return tree_map_only(Tensor, move, value)


def channels_last(value: Any) -> Any:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}

    def change(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous(memory_format=formats[tensor.dim()]) if tensor.dim() in formats else tensor

    return tree_map_only(Tensor, change, value)


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype), value)


def tensors(value: Any) -> list[Tensor | None]:
    return [leaf for leaf in tree_flatten(value)[0] if leaf is None or isinstance(leaf, Tensor)]


def described(tensor: Tensor | None) -> Any:
    """The metadata of a tensor, without its device."""
    if tensor is None:
        return None
    strides = [
        stride for stride, size in zip(tensor.stride(), tensor.size(), strict=True) if size > 1 and tensor.numel() > 0
    ]
    return tensor.dtype, tuple(tensor.shape), strides, tensor.is_conj(), tensor.is_neg()


def outcome(call: Callable[[], Any]) -> Any:
    """Returns the results of a call or its error, after a synchronization with the device."""
    try:
        results = tensors(call())
        torch.bp.synchronize()
        return [None if one is None else one.detach() for one in results]
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # a consequence of the first error
            torch.bp.synchronize()
        return error


def differ(expected: Any, found: Any, values: bool) -> str | None:
    """Returns how two outcomes differ, or None."""
    if isinstance(expected, Exception) or isinstance(found, Exception):
        kinds = [type(one) if isinstance(one, Exception) else None for one in (expected, found)]
        if kinds[0] is kinds[1]:
            return None
        texts = [repr(one)[:200] if isinstance(one, Exception) else "a result" for one in (expected, found)]
        return f"{texts[0]} on the CPU, {texts[1]} on bp"
    looks = [[described(one) for one in outcome] for outcome in (expected, found)]
    if looks[0] != looks[1]:
        return f"{looks[0]} on the CPU, {looks[1]} on bp"
    if values:
        for one, other in zip(expected, found, strict=True):
            try:
                if one is not None:
                    torch.testing.assert_close(other.cpu(), one, equal_nan=True)
            except AssertionError as error:
                return str(error).replace("\n", " ")[:200]
    return None


def gradients(op: Any, sample: Any, chosen: int) -> list[Tensor | None]:
    """Gradients of the sum of all results for the `chosen`th floating-point argument, or for all if it is -1."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]
    wanted = places if chosen < 0 else places[chosen : chosen + 1]
    for place in wanted:
        leaves[place] = leaves[place].detach().requires_grad_()
    given, args, kwargs = torch.utils._pytree.tree_unflatten(leaves, spec)
    result = op(given, *args, **kwargs)
    if sample.output_process_fn_grad is not None:
        result = sample.output_process_fn_grad(result)
    totals = [one for one in tensors(result) if one is not None and one.requires_grad]
    if not totals:
        return []
    weights = [torch.ones(one.shape, dtype=one.dtype, device=one.device) for one in totals]
    return list(torch.autograd.grad(totals, [leaves[place] for place in wanted], weights, allow_unused=True))


class Sample:
    def __init__(self, sample: Any) -> None:
        self.input, self.args, self.kwargs = sample.input, sample.args, sample.kwargs
        self.output_process_fn_grad = getattr(sample, "output_process_fn_grad", None)

    def on(self, device: str, change: Callable[[Any], Any] = lambda value: value) -> Sample:
        moved = Sample(self)
        moved.output_process_fn_grad = self.output_process_fn_grad
        moved.input, moved.args, kwargs = on(device, change((self.input, self.args, self.kwargs)))
        moved.kwargs = {
            name: torch.device(device) if isinstance(value, torch.device) or name == "device" else value
            for name, value in kwargs.items()
        }
        return moved

    def call(self, op: Any) -> Any:
        return op(self.input, *self.args, **self.kwargs)


def forms(op: Any, sample: Sample, dtype: torch.dtype, everything: bool) -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Yields each way to call a sample: (name, function of a device that returns the results)."""
    changes: dict[str, Callable[[Any], Any]] = {"": lambda value: value}
    if any(one is not None and one.dim() in (4, 5) for one in tensors((sample.input, sample.args, sample.kwargs))):
        changes["channels last"] = channels_last
    for name, change in changes.items():

        def forward(device: str, change: Callable[[Any], Any] = change) -> Any:
            return sample.on(device, change).call(op)

        yield name, forward
        if not everything or not (dtype.is_floating_point or dtype.is_complex) or not op.supports_autograd:
            continue
        floats = sum(
            one is not None and (one.is_floating_point() or one.is_complex())
            for one in tensors((sample.input, sample.args, sample.kwargs))
        )
        for chosen in range(-1, floats if floats > 1 else 0):

            def backward(device: str, change: Callable[[Any], Any] = change, chosen: int = chosen) -> Any:
                return gradients(op, sample.on(device, change), chosen)

            yield f"{name} gradient {'of all' if chosen < 0 else chosen}".strip(), backward


def sweep(ops: list[Any], samples: int, dtypes: tuple[torch.dtype, ...]) -> tuple[list[str], int]:
    """Returns the findings and the number of calls."""
    findings: list[str] = []
    calls = 0
    for op in ops:
        name = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}"

        def check(what: str, call: Callable[[str], Any], values: bool, name: str = name) -> None:
            nonlocal calls
            calls += 1
            difference = differ(outcome(lambda: call("cpu")), outcome(lambda: call("bp")), values)
            if difference is not None:
                findings.append(f"{name} {what}: {difference}")

        supported = [dtype for dtype in dtypes if dtype in op.supported_dtypes("cpu")]
        for number, dtype in enumerate(supported):
            torch.manual_seed(0)
            for which, drawn in enumerate(op.sample_inputs("cpu", dtype)):
                if which >= samples:
                    break
                for form, call in forms(op, Sample(drawn), dtype, everything=number == 0):
                    check(f"{dtype} sample {which} {form}".strip(), call, values=not UNDETERMINED.search(op.name))
        for dtype in dtypes:
            if not supported or dtype in supported:
                continue
            sample = next((Sample(one) for one in op.sample_inputs("cpu", supported[0])), None)
            if sample is None:
                continue

            def unsupported(device: str, op: Any = op, sample: Sample = sample, dtype: torch.dtype = dtype) -> Any:
                return sample.on(device, lambda value: to_dtype(value, dtype)).call(op)

            check(f"{dtype}, which the CPU lacks", unsupported, values=False)
        for which, wrong in enumerate(op.error_inputs("cpu") if op.error_inputs_func is not None else ()):
            sample = Sample(wrong.sample_input)
            check(f"error input {which}", lambda d, op=op, sample=sample: sample.on(d).call(op), values=False)
    return findings, calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="1/1", help="part of the operators: 2/4 is the second quarter")
    parser.add_argument("--ops", help="regular expression of operator names (default: all)")
    parser.add_argument("--samples", type=int, default=12, help="maximum per operator and dtype (default: 12)")
    parser.add_argument("--dtypes", default=",".join(str(one).partition(".")[2] for one in DTYPES))
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    chosen = [op for op in op_db if not options.ops or re.search(options.ops, op.name)]
    dtypes = tuple(getattr(torch, name) for name in options.dtypes.split(","))
    if os.environ.get("TORCH_BACKPLANE_HOST_ASYNC") != "1":
        sys.exit("set TORCH_BACKPLANE_DRIVERS=host TORCH_BACKPLANE_HOST_ASYNC=1")
    torch.set_num_threads(1)
    findings, calls = sweep(chosen[part - 1 :: parts], options.samples, dtypes)
    findings = [one for one in findings if not any(re.search(known, one) for known in KNOWN)]
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings in {calls} calls of {len(chosen[part - 1 :: parts])} operators")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
