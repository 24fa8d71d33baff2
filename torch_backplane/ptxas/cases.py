"""The programs whose kernels are compiled: the audit's cases, PyTorch's operator database, and training steps."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from torch_backplane.audit.cases import cases as audit_cases
from torch_backplane.audit.workloads import Workload
from torch_backplane.conformance.calls import SampleCall
from torch_backplane.conformance.database import load
from torch_backplane.conformance.settings import Settings
from torch_backplane.conformance.transfer import tensors
from torch_backplane.ptxas.models import MODELS

# Operators that read an error of LAPACK through kernels.
_READS_ERRORS = re.compile(r"op: (?:linalg\.|cholesky|lu|inverse|pinverse|logdet|ormqr|geqrf|svd|pca)")

# Of the operator database. Other dtypes have kernels like one of these.
DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64),
    *(torch.int64, torch.bool),
)
SAMPLES = 12  # per operator and dtype: kernels depend on layouts and dtypes, not on sizes
AUDIT_ELEMENTS = 1 << 22  # per operand; with fewer, reductions and products do not fill a GPU and choose other kernels


@dataclass(frozen=True)
class Program:
    """Something to run on a device.

    Args:
        value: what its planners read from memory that a kernel would have written: the number of results of `nonzero`,
            say, or 0 for no error.
    """

    run: Callable[[torch.device], object]
    value: int


def programs() -> dict[str, Program]:
    """Return all programs by title. Titles begin with `audit: `, `op: ` or `model: `."""
    found: dict[str, Callable[[torch.device], object]] = {}
    for title, case in audit_cases().items():
        found[f"audit: {title}"] = functools.partial(_run_case, case)
    found |= {f"model: {title}": run for title, run in MODELS.items()}
    for name, op in _operators().items():
        for dtype in DTYPES:
            if dtype in op.supported_dtypes("cpu"):
                found[f"op: {name} {str(dtype).removeprefix('torch.')}"] = functools.partial(_run_operator, op, dtype)
    return {title: Program(run, 0 if _READS_ERRORS.match(title) else 1) for title, run in found.items()}


def _run_case(case: Workload, device: torch.device) -> None:
    case.make(device, AUDIT_ELEMENTS)()


@functools.cache
def _operators() -> dict[str, Any]:
    return load(Settings.database)


def _run_operator(op: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Call an operator with its first samples, with contiguous and other tensors, and with gradients.

    Raises:
        Exception: the first error of a sample, after all samples have been tried.
    """
    errors: list[Exception] = []
    gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    for number, call in enumerate(_calls(op, dtype, gradients)):
        for each in [call, *(call.strided() if number < 3 else [])]:
            first, args, kwargs = each.copied_to(device)
            try:
                result = op.op(first, *args, **kwargs)
                if gradients:
                    _differentiate(call.output_process(result))
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0]


def _calls(op: Any, dtype: torch.dtype, gradients: bool) -> Iterator[SampleCall]:
    torch.manual_seed(0)
    for number, sample in enumerate(list(islice(op.sample_inputs("cpu", dtype, gradients), SAMPLES))):
        arguments = (sample.input, tuple(sample.args), dict(sample.kwargs))
        yield SampleCall(op.op, arguments, "forward", number, sample.output_process_fn_grad)


def _differentiate(result: Any) -> None:
    roots = [one for one in tensors(result) if one.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
