"""PyTorch's own device-generic test machinery instantiates and runs for bp.

The way in for any test written as `class TestX(TestCase): def test_y(self, device, dtype)`, PyTorch's own included:
`PYTORCH_TESTING_DEVICE_ONLY_FOR=bp` and `instantiate_device_type_tests`. PyTorch's `test/` directory is not in its
wheel, but what it is made of is: operator, module and optimizer databases, and the classes that instantiate.
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
    onlyNativeDeviceTypes,
    ops,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db, modules
from torch.testing._internal.common_optimizers import optim_db, optims
from torch.testing._internal.common_utils import TestCase, parametrize
from torch.utils._pytree import tree_map_only

from torch_backplane.conformance.transfer import Transfer, tensors

# A few of each kind: pointwise, reduction, matrix product, view, indexing, sorting, random-free nn.
OPERATORS = {
    "add", "mul", "sub", "pow", "where", "clamp", "sigmoid", "sum", "mean", "amax", "argmax", "var", "cumsum", "matmul",
    "addmm", "bmm", "einsum", "transpose", "permute", "select", "narrow", "unfold", "gather", "scatter", "index_select",
    "index_put", "masked_fill", "sort", "topk", "unique", "cat", "stack", "softmax", "log_softmax", "linalg.solve",
    "linalg.qr", "fft.fft", "nn.functional.conv2d", "nn.functional.layer_norm", "nn.functional.embedding",
    "nn.functional.cross_entropy", "nn.functional.max_pool2d", "nn.functional.interpolate",
    "nn.functional.grid_sample", "nn.functional.gelu",
}  # fmt: skip
MODULES = {"Linear", "Conv2d", "BatchNorm2d", "LayerNorm", "Embedding", "MaxPool2d", "CrossEntropyLoss", "GELU"}
OPTIMIZERS = {"SGD", "AdamW", "RMSprop"}
SAMPLES = 6  # of each operator and dtype


def selected(database: list[Any], names: set[str], name_of: Any) -> list[Any]:
    found = [entry for entry in database if name_of(entry) in names]
    assert {name_of(entry) for entry in found} == names  # a renamed entry must not thin out the selection
    return found


def to_device(tree: Any, device: str) -> Any:
    return Transfer(torch.device(device))(tree)


def to_double(tree: Any) -> Any:
    """The tree on the CPU, its float tensors as leaves of float64."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, convert, to_device(tree, "cpu"))


def finite_maximum(tensor: torch.Tensor) -> float:
    """The largest magnitude; 0 where there is no finite one."""
    return max(tensor[tensor.isfinite()].abs().tolist(), default=0.0)


class TestOperators(TestCase):
    """PyTorch's operator database: the device agrees with the CPU, forward and backward."""

    @onlyNativeDeviceTypes
    @ops(selected(op_db, OPERATORS, lambda op: op.name), allowed_dtypes=(torch.float32, torch.int64))
    def test_agrees_with_cpu(self, device: str, dtype: torch.dtype, op: Any) -> None:
        differentiable = op.supports_autograd and dtype.is_floating_point
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=differentiable))
        self.assertTrue(samples)
        for sample in samples[:: max(1, len(samples) // SAMPLES)]:
            call = (sample.input, sample.args, sample.kwargs)
            exact_args, expected_args, args = to_double(call), to_device(call, "cpu"), to_device(call, device)
            exact, expected, result = (op(a[0], *a[1], **a[2]) for a in (exact_args, expected_args, args))
            self.assertEqual({str(output.device) for output in tensors(result)}, {device})
            if op.name == "topk":  # which of several equal elements it takes is not defined
                dim = sample.args[1] if len(sample.args) > 1 else -1
                self.assertEqual(args[0].gather(dim, result.indices), result.values)
                exact, expected, result = (exact.values,), (expected.values,), (result.values,)
            self.assert_agree(result, expected, exact)
            if differentiable:
                calls = ((args, result), (expected_args, expected), (exact_args, exact))
                self.assert_agree(*(self.gradients(*one) for one in calls))

    def assert_agree(self, result: Any, expected: Any, exact: Any) -> None:
        """Floats are as near to what comes of float64 as those of the CPU are, twice over, or within PyTorch's
        tolerances of a tensor's largest number: what is added up in another order has the rounding of its parts."""
        found, wanted, right = (list(tensors(tree)) for tree in (result, expected, exact))
        self.assertEqual(len(found), len(wanted))
        for one, other, reference in zip(found, wanted, right, strict=True):
            self.assertEqual(one.dtype, other.dtype)
            if not other.dtype.is_floating_point:
                self.assertEqual(one, other, exact_device=False)
                continue
            one, other, reference = (tensor.detach().cpu().double() for tensor in (one, other, reference))
            error, largest = (finite_maximum(tensor) for tensor in (other - reference, reference))
            self.assertEqual(one, reference, atol=1e-5 + 1.3e-6 * largest + 2 * error, rtol=0)

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

    def gradients(self, arguments: Any, result: Any) -> list[torch.Tensor]:
        """Gradients for fixed, well-behaved ones of the results, on the CPU."""
        inputs = [tensor for tensor in tensors(arguments) if tensor.requires_grad]
        outputs = [tensor for tensor in tensors(result) if tensor.requires_grad]
        if not inputs or not outputs:
            return []
        given = [torch.linspace(-1, 1, o.numel()).view(o.shape).to(o.device, o.dtype) for o in outputs]
        return [
            torch.zeros(0) if gradient is None else gradient.cpu()
            for gradient in torch.autograd.grad(outputs, inputs, given, allow_unused=True)
        ]


class TestModules(TestCase):
    """PyTorch's module database: a module moved to the device computes what it computed on the CPU."""

    @modules(selected(module_db, MODULES, lambda info: info.module_cls.__name__), allowed_dtypes=(torch.float32,))
    def test_agrees_with_cpu(self, device: str, dtype: torch.dtype, module_info: Any, training: bool) -> None:
        inputs = module_info.module_inputs_func(
            module_info, device="cpu", dtype=dtype, requires_grad=False, training=training
        )
        for case in inputs:
            made, called = case.constructor_input, case.forward_input
            if called is None:
                continue
            torch.manual_seed(0)
            module = module_info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
            expected = module(*to_device(called.args, "cpu"), **to_device(called.kwargs, "cpu"))
            torch.manual_seed(0)
            moved = module_info.module_cls(*made.args, **made.kwargs).to(dtype).train(training).to(device)
            result = moved(*to_device(called.args, device), **to_device(called.kwargs, device))
            self.assertEqual(result, expected, exact_device=False)
            for tensor in tensors(result):
                self.assertEqual(tensor.device, torch.device(device))


class TestOptimizers(TestCase):
    """PyTorch's optimizer database: a few steps on the device leave the parameters that they leave on the CPU."""

    @optims(selected(optim_db, OPTIMIZERS, lambda info: info.optim_cls.__name__), dtypes=[torch.float32])
    def test_steps_agree_with_cpu(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for case in optim_info.optim_inputs_func(device=device):
            options = {key: value for key, value in case.kwargs.items() if not isinstance(value, torch.Tensor)}
            self.assertEqual(self.train(optim_info.optim_cls, options, device, dtype),
                             self.train(optim_info.optim_cls, options, "cpu", dtype))  # fmt: skip

    def train(self, cls: Any, options: dict[str, Any], device: str, dtype: torch.dtype) -> torch.Tensor:
        start = torch.linspace(-1, 1, 12, dtype=dtype).reshape(3, 4)
        weight = start.to(device).requires_grad_()
        optimizer = cls([weight], **options)
        for step in range(4):
            optimizer.zero_grad()
            (weight * (step + 1)).tanh().square().sum().backward()
            optimizer.step()
        return weight.detach().cpu()


class TestViews(TestCase):
    """Views alias their base, with the strides and offsets that views have everywhere."""

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
    """Reading and writing through every kind of index."""

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
    """Binary operators give the dtype that PyTorch's promotion rules give, with tensors, 0-d tensors and numbers."""

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


GENERIC = [TestOperators, TestModules, TestOptimizers, TestViews, TestIndexing, TestTypePromotion]
# Instantiating takes the templates out of the generic classes.
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
