"""Fake tensors describe the results of operators on bp: sizes, strides, dtypes and devices.

Inductor generates code from these descriptions. PyTorch's `CrossRefFakeMode` compares them, for the operator database.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_utils import CrossRefFakeMode, MetadataMismatchError
from torch.testing._internal.common_methods_invocations import op_db

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
    "nn.functional.embedding_bag": "the CPU kernel, which runs for bp, returns an empty offset2bag for sums",
    "nn.functional.max_unpool2d.grad": "the description has no channels-last strides, also on the CPU",
}


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
