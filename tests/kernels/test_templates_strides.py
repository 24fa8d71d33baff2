"""Tests that templates check strides: tensors must be contiguous or declared as strided, and indices must match."""

from __future__ import annotations

import pytest
import torch

from torch_backplane.kernels import CudaCpp
from torch_backplane.kernels.templates import errors as error_words
from torch_backplane.kernels.templates.errors import Report
from torch_backplane.kernels.templates.indexing import Index, Places, WriteParams, read, write
from torch_backplane.kernels.templates.source import Launch, LaunchSpec

SPACED = torch.zeros(3, 4, 2)[..., 0]


def copy(out: torch.Tensor, self: torch.Tensor, **options: object) -> Launch:
    body = "store_out(item, load_self(item));"
    tensors = {"outputs": {"out": out}, "inputs": {"self": self}}
    spec = LaunchSpec("copy", CudaCpp(), **tensors, integers={}, items=12, value=self.dtype, body=body, **options)
    return spec.launch()


def test_tensors_must_be_contiguous_unless_declared_as_strided() -> None:
    plain = torch.zeros(3, 4)
    copy(plain, plain)
    copy(plain[:0], SPACED[:0])  # nothing to read
    copy(plain[:, :1], SPACED[:1, :1], strided={"out"})
    with pytest.raises(AssertionError, match="copy: self must be contiguous"):
        copy(plain, SPACED)
    with pytest.raises(AssertionError, match="copy: out must be contiguous"):
        copy(plain.t(), plain)
    copy(SPACED, plain, strided={"out"})
    with pytest.raises(AssertionError, match="copy: self must be contiguous"):
        copy(SPACED, SPACED, strided={"out"})


def test_index_strides_must_match_the_tensors() -> None:
    table, errors = torch.zeros(5, 4), torch.zeros(error_words.WORDS, dtype=torch.int32)
    rows = torch.zeros(3, 2, dtype=torch.int64)[:, 0]

    def call(stride: int, kept: int = 1) -> None:
        indices, out = [Index(rows, (stride, 0), 4, 5)], torch.zeros(3, 4)
        read(CudaCpp(), out, table, (0, kept), indices, Report(errors, "embedding"))
        places = Places((3, 4), (0, kept), (4, 1), indices)
        write(CudaCpp(), table, out, places, Report(errors, "put"), WriteParams("add"))

    call(2)
    for stride in (0, 1, 4):
        with pytest.raises(AssertionError, match="index 0 has strides"):
            call(stride)
    with pytest.raises(AssertionError, match="self has strides"):
        call(2, kept=2)
    places = Places((3, 4), (0, 1), (5, 1), [Index(rows, (2, 0), 4, 5)])
    with pytest.raises(AssertionError, match="source has strides"):
        write(CudaCpp(), table, torch.zeros(3, 4), places, Report(errors, "put"))
