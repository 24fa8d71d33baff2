"""Custom operators on bp, written in Python (torch.library) and in C++ (TORCH_LIBRARY_IMPL with PrivateUse1)."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import paths
import pytest
import torch
from torch import Tensor
from torch.library import Library, custom_op, opcheck

from torch_backplane import _C

# --- in Python -------------------------------------------------------------------------------------------------------


@custom_op("backplane_test::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    """One implementation for all devices, composed of PyTorch operators."""
    return x * x * x


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)

ran: list[str] = []


@custom_op("backplane_test::where_am_i", mutates_args=(), device_types="cpu")
def where_am_i(x: Tensor) -> Tensor:
    ran.append("cpu")
    return x.clone()


@where_am_i.register_kernel("bp")
def _(x: Tensor) -> Tensor:
    ran.append("bp")
    return x.clone()


@where_am_i.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("backplane_test::cpu_only", mutates_args=(), device_types="cpu")
def cpu_only(x: Tensor) -> Tensor:
    assert x.device.type == "cpu"
    return torch.from_numpy(x.numpy() * 2)


@custom_op("backplane_test::add_one_", mutates_args={"x"})
def add_one_(x: Tensor, times: int = 1) -> None:
    x += times


def test_one_implementation_for_all_devices() -> None:
    x = torch.arange(3.0, device="bp", requires_grad=True)
    y = cube(x)
    assert y.device.type == "bp"
    assert y.tolist() == [0, 1, 8]
    y.sum().backward()
    assert x.grad.tolist() == [0, 3, 12]
    assert torch.ops.backplane_test.cube(torch.tensor(2.0, device="bp:1")).item() == 8


def test_opcheck() -> None:
    # PyTorch has no check of the autograd registration for devices other than its own («NYI»).
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(cube, (torch.randn(3, device="bp", requires_grad=True),), test_utils=checks)
    opcheck(where_am_i, (torch.randn(3, device="bp"),))
    opcheck(add_one_, (torch.randn(3, device="bp"), 2))


def test_a_kernel_for_bp() -> None:
    ran.clear()
    assert where_am_i(torch.ones(2, device="bp")).device.type == "bp"
    assert where_am_i(torch.ones(2)).device.type == "cpu"
    assert ran == ["bp", "cpu"]


def test_an_operator_with_a_cpu_kernel_only_falls_back() -> None:
    x = torch.arange(3.0, device="bp")
    _C.reset_fallback_counts()
    y = cpu_only(x)
    assert y.device.type == "bp"
    assert _C.fallback_counts() == {"backplane_test::cpu_only": 1}
    assert y.tolist() == [0, 2, 4]


# Operators with a CPU kernel only, for every kind of argument and result. Each entry is a schema and a kernel.
def scale_out(x: Tensor, *, out: Tensor) -> Tensor:
    return out.resize_(x.shape).copy_(x * 2)


def add_one_to_each_(xs: list[Tensor]) -> None:
    for x in xs:
        x += 1


def add_if_given_(x: Tensor, y: Tensor | None) -> None:
    if y is not None:
        y += x


def weighted(xs: list[Tensor], weights: list[Tensor | None], bias: Tensor | None = None) -> list[Tensor]:
    plain = [x if weight is None else x * weight for x, weight in zip(xs, weights, strict=True)]
    return plain if bias is None else [x + bias for x in plain]


ON_CPU_ONLY: dict[str, Callable[..., Any]] = {
    "scale.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)": scale_out,
    "triple_(Tensor(a!) x) -> Tensor(a!)": lambda x: x.mul_(3),
    "add_one_to_each_(Tensor(a!)[] xs) -> ()": add_one_to_each_,
    "add_if_given_(Tensor x, Tensor(a!)? y) -> ()": add_if_given_,
    "weighted(Tensor[] xs, Tensor?[] weights, Tensor? bias=None) -> Tensor[]": weighted,
    "total(Tensor[]? xs, Tensor x) -> Tensor": lambda xs, x: sum(xs or [], torch.zeros(())) + x,
    "tail(Tensor(a) x) -> Tensor(a)": lambda x: x[1:],
    "rows(Tensor(a) x) -> Tensor(a)[]": lambda x: list(x.unbind()),
    "several(Tensor x) -> (Tensor, int, Tensor?, float[])": lambda x: (x + 1, 7, None, [1.0, 2.0]),
    "count(Tensor x) -> int": lambda x: x.numel(),
    "named(Tensor x, Dict(str, Tensor) others) -> Dict(str, Tensor)": lambda x, others: {
        name: x + other for name, other in others.items()
    },
    "nested(Tensor x, Tensor[][] xs, (Tensor, int) pair) -> Tensor[][]": lambda x, xs, pair: [
        [x + one + pair[0] * pair[1] for one in row] for row in xs
    ],
}


@pytest.fixture(scope="module")
def on_cpu_only() -> Iterator[Any]:
    with torch.library._scoped_library("backplane_test_cpu", "DEF") as library:
        for schema, kernel in ON_CPU_ONLY.items():
            library.define(schema)
            library.impl(schema.partition("(")[0], kernel, "CPU")
        yield torch.ops.backplane_test_cpu


def test_written_arguments_of_cpu_kernels(on_cpu_only: Any) -> None:
    x = torch.arange(4.0, device="bp")
    out = torch.empty(0, device="bp")
    assert on_cpu_only.scale(x, out=out) is out
    assert out.tolist() == [0, 2, 4, 6]
    whole = torch.zeros(2, 4, device="bp")
    on_cpu_only.scale(x, out=whole[1])
    assert whole.tolist() == [[0, 0, 0, 0], [0, 2, 4, 6]]
    assert on_cpu_only.triple_(x[::2]).tolist() == [0, 6]
    assert x.tolist() == [0, 1, 6, 3]
    assert on_cpu_only.add_one_to_each_([x[:2], out]) is None
    assert (x.tolist(), out.tolist()) == ([1, 2, 6, 3], [1, 3, 5, 7])
    on_cpu_only.add_if_given_(x, out)
    on_cpu_only.add_if_given_(x, None)
    assert out.tolist() == [2, 5, 11, 10]


def test_lists_and_missing_arguments_of_cpu_kernels(on_cpu_only: Any) -> None:
    x = torch.arange(2.0, device="bp:1")
    assert [y.tolist() for y in on_cpu_only.weighted([x, x + 1], [None, x])] == [[0, 1], [0, 2]]
    assert [y.tolist() for y in on_cpu_only.weighted([x], [None], torch.tensor(3.0))] == [[3, 4]]
    assert all(y.device == x.device for y in on_cpu_only.weighted([x, x], [None, None]))
    assert on_cpu_only.total(None, x).tolist() == on_cpu_only.total([], x).tolist() == [0, 1]
    assert on_cpu_only.total([x, x], x).tolist() == [0, 3]
    for wrong in (torch.ones(2), torch.ones(2, device="bp:0")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            on_cpu_only.weighted([x, wrong], [None, None])
    assert on_cpu_only.total([x], x).tolist() == [0, 2]


def test_results_of_cpu_kernels(on_cpu_only: Any) -> None:
    x = torch.arange(4.0, device="bp").view(2, 2)
    rows = [on_cpu_only.tail(x)[0], *on_cpu_only.rows(x)]
    assert [row.tolist() for row in rows] == [[2, 3], [0, 1], [2, 3]]
    rows[0].fill_(9)  # views, as on the CPU
    assert x.tolist() == [[0, 1], [9, 9]]
    y, number, nothing, numbers = on_cpu_only.several(x)
    assert y.tolist() == [[1, 2], [10, 10]]
    assert (number, nothing, numbers) == (7, None, [1, 2])
    assert on_cpu_only.count(x) == 4
    with torch.inference_mode():
        assert on_cpu_only.several(x)[0].is_inference()


def test_tensors_in_containers_of_cpu_kernels(on_cpu_only: Any) -> None:
    x = torch.arange(2.0, device="bp")
    found = on_cpu_only.named(x, {"a": x, "b": torch.ones(2, device="bp")})
    assert {name: y.tolist() for name, y in found.items()} == {"a": [0, 2], "b": [1, 2]}
    nested = on_cpu_only.nested(x, [[x, x + 1], []], (x, 2))
    assert [[y.tolist() for y in row] for row in nested] == [[[0, 4], [1, 5]], []]
    assert {y.device for y in (*found.values(), *nested[0])} == {torch.device("bp:0")}
    with pytest.raises(RuntimeError, match="at least two devices, bp:0 and cpu"):
        on_cpu_only.named(x, {"a": torch.ones(2)})
    assert on_cpu_only.named(x, {}) == {}


def test_cpu_kernels_that_raise(on_cpu_only: Any) -> None:
    x = torch.arange(2.0, device="bp")
    with pytest.raises(ValueError, match="zip"):
        on_cpu_only.weighted([x, x], [None])
    assert [y.tolist() for y in on_cpu_only.weighted([x], [None])] == [[0, 1]]


def test_an_operator_that_mutates_its_argument() -> None:
    x = torch.zeros(2, 2, device="bp")
    add_one_(x[0], 3)
    assert x.tolist() == [[3, 3], [0, 0]]
    assert x._version > 0  # autograd detects the mutation


def test_custom_operators_under_torch_compile_and_vmap() -> None:
    compiled = torch.compile(lambda x: cube(x) + 1, backend="aot_eager", fullgraph=True)
    x = torch.arange(3.0, device="bp", requires_grad=True)
    y = compiled(x)
    assert y.tolist() == [1, 2, 9]
    y.sum().backward()
    assert x.grad.tolist() == [0, 3, 12]
    cube.register_vmap(lambda info, in_dims, x: (cube(x), in_dims[0]))
    assert torch.vmap(cube)(torch.arange(4.0, device="bp").view(2, 2)).tolist() == [[0, 1], [8, 27]]


def test_registration_with_library_impl() -> None:
    with torch.library._scoped_library("backplane_test_low", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "PrivateUse1")
        x = torch.ones(2, device="bp")
        assert torch.ops.backplane_test_low.twice(x).tolist() == [2, 2]
        with pytest.raises(NotImplementedError, match=r"Could not run 'backplane_test_low::twice'.*'CPU' backend"):
            torch.ops.backplane_test_low.twice(torch.ones(2))


def test_an_override_of_an_aten_operator_in_python() -> None:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("erfinv", lambda x: torch.full_like(x, 42.0), "PrivateUse1", allow_override=True)
        assert torch.zeros(2, device="bp").erfinv().tolist() == [42, 42]
    assert torch.zeros(2, device="bp").erfinv().tolist() == [0, 0]


def test_registration_by_device_name() -> None:
    library = Library("backplane_test_named", "DEF")
    library.define("thrice(Tensor x) -> Tensor")
    torch.library.impl("backplane_test_named::thrice", "bp", lambda x: 3 * x)
    assert torch.ops.backplane_test_named.thrice(torch.ones(1, device="bp")).item() == 3
    library._destroy()


def test_tensor_subclasses_and_modes_see_bp_operators() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log():
        torch.ones(2, device="bp").mul(2).relu_()
    assert seen == ["aten.ones.default", "aten.mul.Tensor", "aten.relu_.default"]


# --- in C++ ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The operators of custom_op/scale_shift.cpp; compiled once, and kept in pytest's cache directory, if any."""
    from torch.utils import cpp_extension

    # ninja is in the interpreter's folder, which may not be on PATH.
    name = f"custom-op-torch-{torch.__version__}"
    cache = getattr(request.config, "cache", None)  # there is none with `-p no:cacheprovider`
    build = tmp_path_factory.mktemp(name) if cache is None else cache.mkdir(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
        cpp_extension.load(
            "backplane_cpp_test",
            [str(paths.SUPPORT / "custom_op" / "scale_shift.cpp")],
            extra_cflags=["-O1"],
            build_directory=str(build),
            is_python_module=False,
        )
    return torch.ops.backplane_cpp_test


@pytest.mark.skipif(
    os.environ.get("TORCH_BACKPLANE_DISCRETE") == "1",
    reason="the operator reads and writes through data_ptr, which needs host-accessible memory",
)
def test_cpp_operator(cpp: SimpleNamespace) -> None:
    x = torch.arange(6.0, device="bp").view(2, 3)
    calls = cpp.bp_calls()
    before = torch.accelerator.memory_allocated()
    y = cpp.scale_shift(x.t(), 2.0, 1.0)
    assert cpp.bp_calls() == calls + 1
    assert y.device.type == "bp"
    assert torch.accelerator.memory_allocated() == before + 512
    assert y.tolist() == [[1, 7], [3, 9], [5, 11]]
    assert cpp.scale_shift(torch.ones(2), 2.0, 1.0).device.type == "cpu"
    assert cpp.bp_calls() == calls + 1
    with pytest.raises(RuntimeError, match="scale_shift: expected a float tensor, and got Long"):
        cpp.scale_shift(torch.arange(3, device="bp"), 2.0, 1.0)


def test_cpp_operator_with_a_cpu_kernel_only(cpp: SimpleNamespace) -> None:
    _C.reset_fallback_counts()
    y = cpp.cpu_only(torch.ones(2, device="bp:1"), 2.0, 1.0)
    assert y.device == torch.device("bp:1")
    assert y.tolist() == [3, 3]
    assert _C.fallback_counts()["backplane_cpp_test::cpu_only"] == 1


def test_cpp_operators_that_write(cpp: SimpleNamespace) -> None:
    x = torch.arange(6.0, device="bp").view(2, 3)
    out = torch.empty(0, device="bp")
    assert cpp.sum_into([x, x.t().contiguous().t(), None], out=out) is out
    assert out.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert cpp.halve_(x[:, 1:]) is None
    assert x.tolist() == [[0, 0.5, 1], [3, 2, 2.5]]
    assert cpp.first_row(x).tolist() == [0, 0.5, 1]
    cpp.first_row(x).zero_()
    assert x[0].tolist() == [0, 0, 0]
    with pytest.raises(RuntimeError, match="expected a tensor"):
        cpp.sum_into([None], out=out)
    assert cpp.sum_into([x], out=out).tolist() == x.tolist()


def test_cpp_operator_with_a_derivative_from_python(cpp: SimpleNamespace) -> None:
    def save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
        ctx.scale = inputs[1]

    torch.library.register_autograd(
        "backplane_cpp_test::scale_shift", lambda ctx, grad: (grad * ctx.scale, None, None), setup_context=save
    )
    x = torch.ones(2, device="bp", requires_grad=True)
    cpp.scale_shift(x, 3.0, 1.0).sum().backward()
    assert x.grad.tolist() == [3, 3]
    compiled = torch.compile(lambda x: cpp.scale_shift(x, 2.0, 0.0) + 1, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2, device="bp")).tolist() == [3, 3]
