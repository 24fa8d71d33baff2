"""Compares the templates for indexed reads and writes with PyTorch on the CPU, including out-of-range indices."""

from __future__ import annotations

import pytest
import torch
from template_runners import check_cuda, dialect, processors, random, run

from torch_backplane.kernels.templates import errors as error_words
from torch_backplane.kernels.templates.errors import Report
from torch_backplane.kernels.templates.indexing import Index, Places, WriteParams, read, write

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.int32]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def no_errors():
    return torch.zeros(error_words.WORDS, dtype=torch.int32)


def along(self, index, dim):
    """Returns the arguments `kept` and `indices` for gather and scatter."""
    kept = [0 if d == dim else step for d, step in enumerate(self.stride())]
    return kept, [Index(index, index.stride(), self.stride(dim), self.size(dim))]


def random_of(shape, dtype):
    return torch.rand(shape) < 0.5 if dtype == torch.bool else random(shape, dtype)


@processors
@dtypes
def test_gather_and_embedding(processor, dtype):
    target, errors = dialect(processor), no_errors()
    self, index = random_of((6, 7, 40), dtype).transpose(0, 1), torch.randint(0, 6, (7, 3, 9))
    out = torch.empty(7, 3, 9, dtype=dtype)
    run(read(target, out, self, *along(self, index, 1), Report(errors, "gather")))
    torch.testing.assert_close(out, self.gather(1, index))
    table, rows = random_of((50, 70), dtype), torch.randint(0, 50, (4, 5))
    out = torch.empty(4, 5, 70, dtype=dtype)
    indices = [Index(rows, (*rows.stride(), 0), 70, 50)]
    run(read(target, out, table, (0, 0, 1), indices, Report(errors, "embedding")))
    torch.testing.assert_close(out, table[rows])
    assert not errors.any()


@processors
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_advanced_indexing_with_two_tensors_and_negative_indices(processor, index_dtype):
    self = torch.randn(5, 6, 7, 8)
    a, b = torch.randint(-6, 6, (3, 1)).to(index_dtype), torch.randint(-8, 8, (4,)).to(index_dtype)
    out, errors = torch.empty(3, 4, 5, 7), no_errors()
    full = [t.expand(3, 4) for t in (a, b)]
    indices = [Index(t, (*t.stride(), 0, 0), self.stride(d), self.size(d)) for t, d in zip(full, (1, 3), strict=True)]
    kept = (0, 0, self.stride(0), self.stride(2))
    run(read(dialect(processor), out, self, kept, indices, Report(errors, "index.Tensor"), wraps=True))
    torch.testing.assert_close(out, self[:, a.long(), :, b.long()])
    assert errors[0] == 0


@processors
def test_out_of_range_index_is_reported_and_skipped(processor):
    table, errors = torch.randn(5, 4), no_errors()
    for wrong in (5, -1, 2**40, 2**32, -(2**33)):
        rows, out = torch.tensor([0, wrong, 4]), torch.full((3, 4), 9.0)
        indices = [Index(rows, (1, 0), 4, 5)]
        run(read(dialect(processor), out, table, (0, 1), indices, Report(errors, "embedding")))
        torch.testing.assert_close(out, torch.stack([table[0], torch.full((4,), 9.0), table[4]]))
        shown = max(-(2**31), min(wrong, 2**31 - 1))
        assert error_words.message(errors.tolist()) == (
            f"embedding: index {shown} is out of bounds for dimension with size 5"
        )
        errors.zero_()
        self = torch.zeros(5, 4)
        places = Places((3, 4), (0, 1), out.stride(), indices)
        run(write(dialect(processor), self, out, places, Report(errors, "put"), WriteParams("add")))
        assert errors[0] == 1
        torch.testing.assert_close(self[[0, 4]], out[[0, 2]])
        assert not self[1:4].any()
        errors.zero_()


REDUCTIONS = {"add": "sum", "multiply": "prod", "amin": "amin", "amax": "amax"}


@processors
@dtypes
@pytest.mark.parametrize("combine", ["assign", *REDUCTIONS])
def test_scatter(processor, dtype, combine):
    if dtype == torch.bool and combine != "assign":
        pytest.skip("PyTorch does not reduce bools by scattering")
    target, errors = dialect(processor), no_errors()
    self, index = random_of((30, 20), dtype), torch.randint(0, 30, (25, 20))
    if combine == "assign":
        index = torch.stack([torch.randperm(30)[:25] for _ in range(20)], 1)
    source = random_of((20, 25), dtype).t()
    if combine == "multiply" and dtype.is_floating_point:
        source = (source.sign() * 2).to(dtype)
    expected = self.clone()
    if combine == "assign":
        expected.scatter_(0, index, source)
    else:
        expected = expected.double() if dtype.is_floating_point else expected
        expected.scatter_reduce_(0, index, source.to(expected.dtype), REDUCTIONS[combine])
    kept, indices = along(self, index, 0)
    places = Places(index.shape, kept, source.stride(), indices)
    run(write(target, self, source, places, Report(errors, "scatter"), WriteParams(combine)))
    tolerance = None if dtype.itemsize > 2 or not dtype.is_floating_point else 3e-2
    torch.testing.assert_close(self, expected.to(dtype), rtol=tolerance, atol=tolerance)
    assert errors[0] == 0


@processors
def test_deterministic_writes_keep_the_last_value(processor):
    self, index, errors = torch.zeros(10), torch.randint(0, 10, (1000,)), no_errors()
    values = torch.arange(1000.0)
    indices = [Index(index, (1,), 1, 10)]
    places = Places((1000,), (0,), (1,), indices)
    run(write(dialect(processor), self, values, places, Report(errors, "put"), WriteParams(deterministic=True)))
    expected = torch.zeros(10)
    for i, v in zip(index.tolist(), values.tolist(), strict=True):
        expected[i] = v
    torch.testing.assert_close(self, expected)


@processors
def test_embedding_backward_index_fill_and_index_add(processor):
    target, errors = dialect(processor), no_errors()
    rows, grad = torch.randint(0, 9, (4, 50)), torch.randn(4, 50, 33)
    out, indices = torch.zeros(9, 33), [Index(rows, (50, 1, 0), 33, 9)]
    arguments = Places((*rows.shape, 33), (0, 0, 1), grad.stride(), indices), Report(errors, "embedding_dense_backward")
    run(write(target, out, grad, *arguments, WriteParams("add", skip=3)))
    expected = torch.ops.aten.embedding_dense_backward(grad, rows, 9, 3, False)
    torch.testing.assert_close(out, expected)
    self, index = torch.randn(5, 6), torch.tensor([4, 0])
    arguments = Places((2, 6), (0, 1), (), [Index(index, (1, 0), 6, 5)]), Report(errors, "index_fill")
    run(write(target, self, 2.5, *arguments))
    assert (self[index] == 2.5).all()
    source, before = torch.randn(2, 6), self.clone()
    arguments = Places((2, 6), (0, 1), (6, 1), [Index(index, (1, 0), 6, 5)]), Report(errors, "index_add")
    run(write(target, self, source, *arguments, WriteParams("add", alpha=-2)))
    torch.testing.assert_close(self, before.index_add(0, index, source, alpha=-2))


@dtypes
def test_cuda_compiles(dtype):
    self, index, errors = random_of((5, 6), dtype), torch.randint(0, 5, (3, 6)), no_errors()
    kept, indices = along(self, index, 0)
    check_cuda(read, self[:3], self, kept, indices, Report(errors, "gather"))
    for combine in ("assign", *REDUCTIONS):
        places = Places((3, 6), kept, (6, 1), indices)
        check_cuda(write, self, self, places, Report(errors, "scatter"), WriteParams(combine))
