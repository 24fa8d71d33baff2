"""Operators on bp read zero-dim CPU tensors, but refuse to write to them and leave them unchanged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

# PyTorch's composite operators have other messages.
REFUSAL = re.compile(r"on the same device|(have|expected) (device )?bp|different from other tensors on")

EXAMPLES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "exp": lambda x, cpu: torch.exp(x, out=cpu),
    "add": lambda x, cpu: torch.add(x, 1, out=cpu),
    "mean": lambda x, cpu: torch.mean(x, out=cpu),
    "mean of another size": lambda x, cpu: torch.mean(x.expand(2, 3), 0, out=cpu),
    "nonzero": lambda x, cpu: torch.nonzero(x, out=cpu),
    "max": lambda x, cpu: torch.max(x.expand(2), 0, out=(torch.empty((), device="bp"), cpu)),
    "add_": lambda x, cpu: cpu.add_(x),
    "lerp_": lambda x, cpu: cpu.lerp_(x, x),
    "index_add_": lambda x, cpu: cpu.index_add_(0, torch.zeros(1, dtype=torch.long, device="bp"), x.view(1)),
    "foreach": lambda x, cpu: torch._foreach_add_([cpu], [x]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_writes_are_refused(name: str) -> None:
    cpu = torch.tensor(3, dtype=torch.long) if name in ("nonzero", "max") else torch.tensor(3.0)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        EXAMPLES[name](torch.tensor(2.0, device="bp"), cpu)
    assert (cpu.shape, cpu.item()) == ((), 3)


def test_reads_are_accepted() -> None:
    x = torch.tensor(2.0, device="bp")
    assert torch.add(x, torch.tensor(3.0)).item() == 5
    assert x.add_(torch.tensor(3.0)).item() == 5
    assert torch.tensor(1.0).copy_(x).item() == 5


# These have a device argument, copy between devices, replace the tensor itself, or read the values.
EXCLUDED = re.compile(
    r"aten::(\w+_like|new_\w+|_?to_copy|copy|copy_|set_data|shallow_copy_data_|resize_as|resize_as_|linspace|logspace)(\.\w+)?$"
)
# PyTorch's kernels crash with these generated arguments, on the CPU, too.
CRASHING = (
    "aten::_chunk_cat.out",
    "aten::_nnpack_spatial_convolution.out",
    "aten::_slow_conv2d_backward.output_mask_out",
)

VALUES: dict[str, Callable[[], Any]] = {
    "Tensor": lambda: torch.full((), 0.5, device="bp"),
    "Optional[Tensor]": lambda: torch.full((), 0.5, device="bp"),
    "List[Tensor]": lambda: [torch.full((), 0.5, device="bp")],
    "List[Optional[Tensor]]": lambda: [torch.zeros((), dtype=torch.long, device="bp")],
    "int": lambda: 1,
    "float": lambda: 0.5,
    "bool": lambda: False,
    "number": lambda: 1,
    "str": lambda: "none",
    "List[int]": list,
    "List[float]": list,
    "List[bool]": lambda: [True, True, True],
    "Device": lambda: torch.device("bp"),
}


def is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def overloads() -> Iterator[tuple[str, Any]]:
    """PyTorch's overloads that write to a tensor and read another one."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        base, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or name in CRASHING or EXCLUDED.match(name):
            continue
        op = getattr(getattr(torch.ops.aten, base), overload or "default", None)
        arguments = op._schema.arguments if op is not None else ()
        writes = [is_written(one) for one in arguments if str(one.type) in ("Tensor", "Optional[Tensor]")]
        if any(writes) and not all(writes):
            yield name, op


def is_composed(name: str) -> bool:
    """Whether the overload is composite. Composite operators can resize their result before they raise."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return not has(name, "PrivateUse1") and (
        has(name, "CompositeImplicitAutograd") or has(name, "CompositeExplicitAutograd")
    )


@pytest.mark.filterwarnings("ignore")
def test_all_overloads() -> None:
    findings, refused = [], 0
    for name, op in overloads():
        written: list[Tensor] = []
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for argument in op._schema.arguments:
            kind = str(argument.type)
            if is_written(argument) and kind in ("Tensor", "Optional[Tensor]"):
                value = torch.full((), 0.5)
                written.append(value)
            elif argument.has_default_value() and "Tensor" not in kind:
                value = argument.default_value
            elif kind in VALUES:
                value = 0 if "dim" in argument.name and kind == "int" else VALUES[kind]()
            else:
                value = None
            if argument.kwarg_only:
                named[argument.name] = value
            else:
                positional.append(value)
        try:
            op(*positional, **named)
            findings.append(f"{name} did not raise")
        except Exception as error:  # generated arguments can be invalid
            refused += REFUSAL.search(str(error)) is not None
        if any(one.shape or one.item() != 0.5 for one in written) and not is_composed(name):
            findings.append(f"{name} changed the tensor")
    assert not findings
    assert refused > 700


def on_bp(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("bp"), value)


def without_dimensions(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.flatten()[0] if tensor.numel() else tensor.new_ones(()), value)


def attempts(op: Any, sample: Any) -> Iterator[tuple[str, list[Tensor], Callable[[], Any]]]:
    """Yields (form, written tensors, call) for the out= and the in-place form."""
    given, args, kwargs = on_bp((sample.input, sample.args, sample.kwargs))
    has_tensor = any(isinstance(leaf, Tensor) for leaf in tree_leaves((given, args, kwargs)))
    if op.supports_out and has_tensor:
        results = op(sample.input, *sample.args, **sample.kwargs)
        outs = [torch.ones((), dtype=one.dtype) for one in tree_leaves(results)]
        out = tuple(outs) if isinstance(results, tuple) else outs if isinstance(results, list) else outs[0]
        yield "out=", outs, lambda: op(given, *args, **kwargs, out=out)
    args, kwargs = on_bp(without_dimensions((sample.args, sample.kwargs)))
    has_tensor = any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
    if op.inplace_variant is not None and has_tensor and isinstance(sample.input, Tensor):
        own = torch.ones((), dtype=sample.input.dtype)
        yield "in place", [own], lambda: op.inplace_variant(own, *args, **kwargs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_operator_database() -> None:
    findings, refused = [], 0
    names = set(torch._C._dispatch_get_all_op_names())
    for op in op_db:
        name = op.aten_name
        supported = op.supported_dtypes("cpu")
        dtype = next((one for one in (torch.float32, torch.int64, torch.bool) if one in supported), None)
        if dtype is None or re.match(r"equal$|lu$|sparse|nonzero$", op.name) or EXCLUDED.match(f"aten::{name}"):
            continue  # lu is Python code; the first samples of the others do not support out=
        sample = next(iter(op.sample_inputs("cpu", dtype)), None)
        for form, written, call in attempts(op, sample) if sample is not None else ():
            try:
                call()
                findings.append(f"{op.name} {form} did not raise")
            except Exception as error:
                refused += REFUSAL.search(str(error)) is not None
            full = f"aten::{name}.out" if form == "out=" else f"aten::{name}_"
            changed = any(one.shape or one.item() != 1 for one in written)
            if changed and full in names and not is_composed(full):
                findings.append(f"{op.name} {form} changed the tensor")
    assert not findings
    assert refused > 300
