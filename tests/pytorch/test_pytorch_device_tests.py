"""Tests that PyTorch's device-generic test classes can be instantiated and run for bp.

Tests of the form `class TestX(TestCase): def test_y(self, device, dtype)`, also PyTorch's, run on bp with
`PYTORCH_TESTING_DEVICE_ONLY_FOR=bp` and `instantiate_device_type_tests`. PyTorch's wheel does not contain its `test/`
directory, but the operator, module and optimizer databases and the classes that instantiate tests.
"""

# ruff: noqa: PT009, PT027 - the classes are PyTorch's TestCase, whose assertEqual compares tensors

from __future__ import annotations

import os
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch.testing import make_tensor
from torch.testing._internal.common_device_type import (
    PrivateUse1TestBase,
    deviceCountAtLeast,
    dtypes,
    instantiate_device_type_tests,
)
from torch.testing._internal.common_utils import TestCase, parametrize


class TestOperators(TestCase):
    """Operators whose generic kernels support few device types. test_operators.py tests the operator database."""

    def test_operators_whose_generic_kernel_knows_few_device_types(self, device: str) -> None:
        values = make_tensor((3, 4), dtype=torch.complex64, device=device)
        self.assertEqual(values.clone().conj_physical_().cpu(), values.cpu().conj_physical())
        integers = make_tensor((3, 4), dtype=torch.int64, device=device, high=3)
        out = (torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.int64, device=device))
        torch.mode(integers, out=out)
        self.assertEqual(tuple(tensor.cpu() for tensor in out), tuple(torch.mode(integers.cpu())))
        mantissas, exponents = torch.tensor([0.0, 2.0**-149, 1.0, -3.0]), torch.tensor([2000, 276, 2**32 + 1, -150])
        expected = torch.ldexp(mantissas, exponents)
        found = torch.ldexp(mantissas.to(device), exponents.to(device))
        given = torch.empty(4, device=device)
        torch.ldexp(mantissas.to(device), exponents.to(device), out=given)
        for one in (found, given, mantissas.to(device).ldexp_(exponents.to(device))):
            self.assertEqual(one.cpu(), expected, rtol=0, atol=0)


class TestViews(TestCase):
    """Views alias their base and have the same strides and offsets as on the CPU."""

    VIEWS: ClassVar = {
        "view": lambda t: t.view(-1), "transpose": lambda t: t.t(), "slice": lambda t: t[1:, ::2],
        "select": lambda t: t.select(0, 2), "diagonal": lambda t: t.diagonal(), "unfold": lambda t: t.unfold(1, 3, 2),
        "unsqueeze": lambda t: t.unsqueeze(1), "as_strided": lambda t: t.as_strided((2, 2), (7, 3), 1),
        "bytes": lambda t: t.view(torch.uint8), "split": lambda t: t.split(2, dim=1)[1], "detach": lambda t: t.detach(),
    }  # fmt: skip

    @dtypes(torch.float32, torch.int64, torch.bool, torch.complex64)
    @parametrize("kind", sorted(VIEWS))
    def test_view_aliases_its_base(self, device: str, dtype: torch.dtype, kind: str) -> None:
        view = self.VIEWS[kind]
        base = make_tensor((4, 6), dtype=dtype, device=device)
        seen, on_cpu = view(base), view(base.cpu())
        self.assertEqual(seen.stride(), on_cpu.stride())
        self.assertEqual(seen.storage_offset(), on_cpu.storage_offset())
        self.assertEqual(seen.cpu(), on_cpu)
        self.assertEqual(seen.untyped_storage().data_ptr(), base.untyped_storage().data_ptr())
        seen.zero_()
        copy = base.cpu()
        self.assertEqual(view(copy).count_nonzero(), 0)
        base.fill_(1)
        self.assertEqual(seen.cpu(), view(base.cpu()))

    def test_writing_through_expanded_and_overlapping_views_raises(self, device: str) -> None:
        column = torch.zeros(3, 1, device=device)
        with self.assertRaisesRegex(RuntimeError, "more than one element of the written-to tensor"):
            column.expand(3, 4).add_(1)

    def test_conjugate_and_negative_views_are_lazy(self, device: str) -> None:
        values = make_tensor((3, 4), dtype=torch.complex64, device=device)
        self.assertTrue(values.conj().is_conj())
        self.assertTrue(values.conj().imag.is_neg())
        self.assertEqual(values.conj().imag.cpu(), -values.cpu().imag)
        self.assertEqual((values.conj() @ values.t()).cpu(), values.cpu().conj() @ values.cpu().t())

    def test_out_tensor_is_conjugated_as_lazily_as_on_the_cpu(self, device: str) -> None:
        factors, pivots = torch.linalg.lu_factor(make_tensor((3, 3), dtype=torch.complex64, device="cpu"))
        right = make_tensor((4, 3), dtype=torch.complex64, device="cpu")
        expected = torch.linalg.lu_solve(factors, pivots, right, left=False, adjoint=True)
        out = torch.empty(0, dtype=torch.complex64, device=device)
        moved = (tensor.to(device) for tensor in (factors, pivots, right))
        torch.linalg.lu_solve(*moved, left=False, adjoint=True, out=out)
        self.assertEqual(out.cpu(), expected)


class TestIndexing(TestCase):
    """Reads and writes with every kind of index."""

    INDICES: ClassVar = {
        "integer": (2,), "slice": (slice(1, None, 2),), "ellipsis": (..., 0), "newaxis": (None, 1),
        "tensor": ([3, 0, 3],), "tensors": ([0, 1, 2], [2, 1, 0]),
        "mixed": (slice(None), [1, 3]), "mask": "mask", "negative": ([-1, -2],),
        "empty": (slice(2, 2),),
    }  # fmt: skip

    def index(self, name: str, device: str) -> tuple[Any, ...]:
        parts = self.INDICES[name]
        if parts == "mask":
            return (torch.arange(24, device=device).reshape(4, 6) % 3 == 0,)
        return tuple(torch.tensor(part, device=device) if isinstance(part, list) else part for part in parts)

    @dtypes(torch.float32, torch.int64, torch.bfloat16)
    @parametrize("kind", sorted(INDICES))
    def test_get_and_set(self, device: str, dtype: torch.dtype, kind: str) -> None:
        on_cpu = make_tensor((4, 6), dtype=dtype, device="cpu")
        tensor = on_cpu.to(device)
        index, cpu_index = self.index(kind, device), self.index(kind, "cpu")
        self.assertEqual(tensor[index].cpu(), on_cpu[cpu_index])
        tensor[index] = 7
        on_cpu[cpu_index] = 7
        self.assertEqual(tensor.cpu(), on_cpu)
        tensor[index] += tensor[index]
        on_cpu[cpu_index] += on_cpu[cpu_index]
        self.assertEqual(tensor.cpu(), on_cpu)

    def test_accumulating_put_adds_repeated_positions(self, device: str) -> None:
        tensor = torch.zeros(3, device=device)
        where = torch.tensor([1, 1, 2], device=device)
        tensor.index_put_((where,), torch.tensor([1.0, 2.0, 4.0], device=device), accumulate=True)
        self.assertEqual(tensor.tolist(), [0.0, 3.0, 4.0])

    def test_out_of_range_index_raises(self, device: str) -> None:
        with self.assertRaisesRegex(IndexError, "out of bounds"):
            torch.zeros(3, device=device)[5]


class TestTypePromotion(TestCase):
    """Binary operators follow PyTorch's promotion rules for tensors, 0-d tensors and numbers."""

    DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64)

    @dtypes(*DTYPES)
    def test_tensor_with_tensor_and_number(self, device: str, dtype: torch.dtype) -> None:
        one = torch.ones(2, 3, dtype=dtype, device=device)
        others = [torch.ones(shape, dtype=other, device=device) for other in self.DTYPES for shape in ((3,), ())]
        for other in (*others, True, 2, 2.5, 1j):
            expected = torch.result_type(one, other)
            result = one + other
            self.assertEqual(result.dtype, expected)
            number = other.cpu() if isinstance(other, torch.Tensor) else other
            self.assertEqual(result.cpu(), one.cpu() + number)
            self.assertEqual(torch.eq(one, other).dtype, torch.bool)

    def test_in_place_result_must_fit(self, device: str) -> None:
        with self.assertRaisesRegex(RuntimeError, "can't be cast to the desired output type"):
            torch.ones(2, dtype=torch.int64, device=device).add_(0.5)

    def test_cpu_scalar_tensor_mixes_but_cpu_vector_does_not(self, device: str) -> None:
        one = torch.ones(3, device=device)
        self.assertEqual((one + torch.tensor(2.0)).tolist(), [3.0, 3.0, 3.0])
        with self.assertRaisesRegex(RuntimeError, "Expected all tensors to be on the same device"):
            one + torch.ones(3)

    @deviceCountAtLeast(2)
    def test_devices_do_not_mix_but_copy(self, devices: list[str]) -> None:
        one = torch.arange(3, device=devices[0])
        self.assertEqual(one.to(devices[1]).device, torch.device(devices[1]))
        self.assertEqual(one.to(devices[1]).tolist(), [0, 1, 2])
        with self.assertRaisesRegex(RuntimeError, "Expected all tensors to be on the same device"):
            one + one.to(devices[1])


GENERIC = [TestOperators, TestViews, TestIndexing, TestTypePromotion]
# Instantiation removes the templates from the generic classes.
TEMPLATES = {cls: [name for name in vars(cls) if name.startswith("test_")] for cls in GENERIC}
with mock.patch.dict(os.environ, PYTORCH_TESTING_DEVICE_ONLY_FOR="bp"):
    for _generic in GENERIC:
        instantiate_device_type_tests(_generic, globals())
del _generic


@pytest.mark.parametrize("generic", GENERIC, ids=lambda generic: generic.__name__)
def test_instantiated_for_bp_and_for_nothing_else(generic: type) -> None:
    (made,) = (cls for cls in globals().values() if isinstance(cls, type) and issubclass(cls, generic))
    assert issubclass(made, PrivateUse1TestBase)
    names = [name for name, member in vars(made).items() if name.startswith("test_") and callable(member)]
    assert TEMPLATES[generic]
    for template in TEMPLATES[generic]:
        assert any(name.startswith(f"{template}_") for name in names), template
    assert all("_bp" in name for name in names)


def test_device_module_gives_what_pytorchs_test_base_asks_for() -> None:
    PrivateUse1TestBase.setUpClass()
    assert PrivateUse1TestBase.device_type == "bp"
    assert PrivateUse1TestBase.get_primary_device() == f"bp:{torch.bp.current_device()}"
    assert len(PrivateUse1TestBase.get_all_devices()) == torch.bp.device_count()
