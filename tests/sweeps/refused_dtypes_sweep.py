"""Finds dtypes that bp supports, but the CPU refuses ("not implemented for") and CUDA lacks in PyTorch's database.

Values are not compared, so any driver with planners works.

    TORCH_BACKPLANE_DRIVERS=opencl python tests/sweeps/sweep_process.py refused_dtypes_sweep.py --match pool
"""

from __future__ import annotations

import random
import re
from typing import Any

import sweep_process
import torch

from torch_backplane.conformance.check import SEED
from torch_backplane.conformance.cuda_dtypes import Converted
from torch_backplane.conformance.database import load
from torch_backplane.conformance.settings import OP_DB
from torch_backplane.conformance.transfer import Transfer, tensors

DEVICE, CPU = torch.device("bp", 0), torch.device("cpu")
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def refused(error: Exception | None) -> bool:
    """Whether PyTorch's kernels raise this error for an unsupported dtype."""
    return isinstance(error, NotImplementedError) or "not implemented for" in str(error)


def error_of(op: Any, given: Any, device: torch.device) -> Exception | None:
    transfer = Transfer(device)
    try:
        with torch.no_grad():
            op.op(transfer(given[0]), *transfer(given[1]), **transfer(given[2]))
    except Exception as error:
        return error
    return None


def served(op: Any, samples: int) -> list[torch.dtype]:
    """Returns the dtypes that neither CPU nor CUDA supports, and that bp accepts in a sample that the CPU refuses."""
    source = next((dtype for dtype in DTYPES if dtype in op.dtypes), None)
    if source is None:
        return []
    random.seed(SEED)
    torch.manual_seed(SEED)
    examples = [
        sample
        for sample in op.sample_inputs("cpu", source)
        if all(one.layout == torch.strided for one in tensors((sample.input, sample.args, sample.kwargs)))
    ]
    examples = random.sample(examples, min(samples, len(examples)))
    found = []
    for dtype in DTYPES:
        if dtype in op.supported_dtypes("cpu") | op.supported_dtypes("cuda"):
            continue
        for sample in examples:
            try:
                given = Converted(source, dtype)((sample.input, tuple(sample.args), dict(sample.kwargs)))
            except Exception:  # complex numbers cannot be converted
                break
            sweep_process.call(f"{op.full_name} {dtype}")
            if refused(error_of(op, given, CPU)) and error_of(op, given, DEVICE) is None:
                found.append(dtype)
                break
    return found


def names(pattern: str) -> list[str]:
    return [name for name in load(OP_DB) if re.search(pattern, name)]


def sweep(op: Any, samples: int) -> None:
    for dtype in served(op, samples):
        sweep_process.found(f"{op.full_name} {dtype}".replace("torch.", ""))


if __name__ == "__main__":
    sweep_process.over_database(__doc__, sweep, samples=3)
