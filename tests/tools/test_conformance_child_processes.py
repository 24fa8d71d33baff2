"""Tests the serialization of results that child processes send."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from torch_backplane.conformance import child_processes


def sent(tree: Any) -> Any:
    memory = io.BytesIO()
    child_processes.send(memory, tree)
    memory.seek(0)
    return child_processes.received(memory)


def test_tensors_of_one_storage_share_it_after_transfer() -> None:
    whole = torch.arange(12.0)
    numbers, bits, row = sent((whole, whole.view(torch.int32)[::2], whole.view(3, 4)[1:, 1:].mT))
    assert torch.equal(numbers, whole)
    assert torch.equal(bits, whole.view(torch.int32)[::2])
    assert torch.equal(row, whole.view(3, 4)[1:, 1:].mT)
    assert (row.stride(), row.storage_offset()) == ((1, 4), 5)
    numbers.zero_()
    assert not bits.any()
    assert not row.any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3.0).to(torch.complex64).mul(1 + 2j).conj(), torch.arange(3.0).mul(1j).conj().imag,
        torch._efficientzerotensor((2, 3)), torch.zeros(0, 2), torch.tensor(True), torch.arange(3.0).expand(2, 3),
        torch.arange(3.0).bfloat16(),
    ],
)  # fmt: skip
def test_tensor_properties_are_kept(tensor: torch.Tensor) -> None:
    found = sent([tensor])[0]
    assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert (found.is_conj(), found.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert found._is_zerotensor() == tensor._is_zerotensor()
    assert torch.equal(found + 0, tensor + 0)


def test_sparse_tensors_and_other_objects() -> None:
    found, numbers, error = sent((torch.eye(2).to_sparse(), (1, "two"), ValueError("three")))
    assert torch.equal(found.to_dense(), torch.eye(2))
    assert numbers == (1, "two")
    assert str(error) == "three"


def test_truncated_data_is_received_as_none() -> None:
    memory = io.BytesIO()
    child_processes.send(memory, torch.arange(100))
    assert child_processes.received(io.BytesIO(memory.getvalue()[:-1])) is None
    assert child_processes.received(io.BytesIO()) is None
