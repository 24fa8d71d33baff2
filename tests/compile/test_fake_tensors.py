"""Fake tensors describe the results of operators on bp: sizes, strides, dtypes and devices.

Inductor generates code from these descriptions. PyTorch's `CrossRefFakeMode` compares them, for the operator database.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_utils import CrossRefFakeMode, MetadataMismatchError
from torch.testing._internal.common_methods_invocations import op_db

from torch_backplane import drivers

SAMPLES = 12
LEFT_OUT = (
    "sparse.", "to_sparse", "jiterator_",  # not on bp
    # Differs on some devices: the logarithms' strides on host devices, and the device of the seed, which is on the CPU.
    "nn.functional.scaled_dot_product_attention",
)  # fmt: skip
OPERATORS = {
    one.full_name: one
    for one in op_db
    if one.supports_dtype(torch.float32, "cpu") and not one.full_name.startswith(LEFT_OUT)
}

# Operators whose description differs → why.
EVALUATION = "in evaluation, bp saves no statistics, as the CPU; the description is CUDA's"
KNOWN = {
    "native_batch_norm": EVALUATION,
    "_native_batch_norm_legit": EVALUATION,
    "nn.functional.batch_norm": EVALUATION,
    "nn.functional.max_unpool2d.grad": "the description has no channels-last strides, also on the CPU",
}

if not drivers.device(0).properties.dialect:
    KNOWN["nn.functional.embedding_bag"] = "the CPU kernel, which runs for bp, returns an empty offset2bag for sums"


def compare(name: str) -> None:
    """Runs the first samples of an operator, with comparison. Raises MetadataMismatchError."""
    operator: Any = OPERATORS[name]
    for number, sample in enumerate(operator.sample_inputs("bp", torch.float32)):
        if number == SAMPLES:
            return
        with CrossRefFakeMode(ignore_op_fn=lambda function: False, check_strides=True, check_aliasing=False):
            operator(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_descriptions_are_those_of_results(name: str) -> None:
    if name in KNOWN:
        with pytest.raises(MetadataMismatchError):
            compare(name)
    else:
        compare(name)


NEEDS_GRADIENTS = """
import torch
from torch._subclasses import FakeTensorMode

with FakeTensorMode():
    for device in ("bp", "bp:0", "bp:9"):
        weight = torch.ones(4, 3, device=device, requires_grad=True)
        result = torch.nn.functional.linear(torch.ones(2, 3, device=device), weight).sum()
        print(result.device, result.grad_fn.name())
"""


@pytest.mark.parametrize("drivers", ["host", "opencl"])
def test_fake_tensors_may_be_on_devices_that_do_not_exist(
    run_python: Callable[..., subprocess.CompletedProcess[str]], drivers: str
) -> None:
    # Without an OpenCL implementation there is no device at all.
    done = run_python(NEEDS_GRADIENTS, TORCH_BACKPLANE_DRIVERS=drivers, OCL_ICD_VENDORS="/nonexistent")
    lines = [f"{device} SumBackward0" for device in ("bp:0", "bp:0", "bp:9")]
    assert (done.returncode, done.stdout.splitlines()) == (0, lines), done.stderr


def test_streams_of_devices_that_do_not_exist_cannot_be_used() -> None:
    beyond = torch.bp.device_count()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.bp.current_stream(beyond)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.accelerator.set_stream(torch.accelerator.current_stream(beyond))
