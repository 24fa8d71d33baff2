"""Invalid input and edge cases: errors say what is wrong, at the call or at the next synchronization, and no memory is
read or written out of bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, need_memory, on_device, refused_alike, to_cpu
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from torch_backplane import _C
from torch_backplane.kernels.reductions import Reduction
from torch_backplane.planning import reduce, template

F = torch.nn.functional


def bp(values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def synchronize() -> None:
    torch.accelerator.synchronize(torch.device(DEVICE))


def raises_at_synchronization(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    """Asserts that the call's error is raised at the next synchronization and that the device works afterwards. Calls
    twice: the first call plans, the second replays."""
    for _ in range(2):
        call()  # only submits
        with pytest.raises(error, match=message):
            synchronize()
        synchronize()
    assert (torch.ones(3, device=DEVICE) + 1).tolist() == [2.0] * 3


# Shapes

SHAPES = {
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a.add_(b),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "copy_": lambda a, b: a.copy_(b),
    "copy_ of another dtype": lambda a, b: a.to(torch.int32).copy_(b),
    "floor_divide": lambda a, b: a // b,
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "mm": lambda a, b: torch.mm(a, b),
    "matmul": lambda a, b: a @ b.flatten(),
    "addmm": lambda a, b: torch.addmm(b, a, a.t()),
    "cat": lambda a, b: torch.cat([a, b], dim=1),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 1.0),
    "index_add": lambda a, b: a.index_add(0, torch.tensor([0, 1], device=a.device), b),
    "layer_norm": lambda a, b: F.layer_norm(a, [7]),
    "out=": lambda a, b: torch.add(a, a, out=b.view(1, -1).expand(3, -1)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.filterwarnings("ignore:.*mse_loss|.*target size")
def test_mismatched_shapes_are_errors(name: str) -> None:
    a, b = torch.ones(3, 4), torch.ones(2, 5)
    with pytest.raises(RuntimeError):
        SHAPES[name](a, b)
    with pytest.raises(RuntimeError, match=r"size|shape|must match|expanded|memory location|reduction dim"):
        SHAPES[name](a.to(DEVICE), b.to(DEVICE))
    synchronize()


@pytest.mark.parametrize(("to", "source"), [((3,), (4,)), ((5, 5), (25,)), ((4,), (2, 2)), ((0,), (3,)), ((3,), (0,))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_mismatched_copy_raises_pytorchs_error(
    to: tuple[int, ...], source: tuple[int, ...], dtype: torch.dtype
) -> None:
    message = r"The size of tensor a \(\d+\) must match the size of tensor b \(\d+\) at non-singleton dimension"
    with pytest.raises(RuntimeError, match=message):
        torch.ones(to).copy_(torch.ones(source, dtype=dtype))
    with pytest.raises(RuntimeError, match=message):
        torch.ones(to, device=DEVICE).copy_(torch.ones(source, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("name", ["gcd", "lcm"])
def test_gcd_and_lcm_of_floats_raise_pytorchs_error(name: str) -> None:
    with pytest.raises(NotImplementedError, match="not implemented for 'Float'"):
        getattr(torch, name)(torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE))


def test_copy_of_too_many_dimensions_raises_pytorchs_error() -> None:
    with pytest.raises(RuntimeError, match=r"output with shape \[3, 4\] doesn't match the broadcast shape \[3, 3, 4\]"):
        torch.ones(3, 4, device=DEVICE).copy_(torch.ones(3, 1, 4, device=DEVICE))


# Shapes that do not broadcast, or whose broadcast is larger than the tensor that is changed.
LARGER = [((2,), (3,)), ((2,), (3, 2)), ((2, 1), (2, 3)), ((), (1,)), ((2, 3), (2, 1, 3)), ((0,), (2,))]
IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(b),
    "lt_": lambda a, b: a.lt_(b),
    "eq_": lambda a, b: a.eq_(b),
    "logical_and_": lambda a, b: a.logical_and_(b),
    "pow_": lambda a, b: a.pow_(b),
    "copy_": lambda a, b: a.copy_(b),
    "addcmul_": lambda a, b: a.addcmul_(b, b),
    "lerp_": lambda a, b: a.lerp_(b, 0.5),
}


@pytest.mark.parametrize(("shape", "other"), LARGER)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operators_keep_the_shape(name: str, shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    refused_alike(IN_PLACE[name], torch.full(shape, 2.0), torch.ones(other))


MASKED_FILLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a number": lambda a, mask: a.masked_fill(mask, 1),
    "a number, in place": lambda a, mask: a.masked_fill_(mask, 1),
    "a tensor": lambda a, mask: a.masked_fill(mask, torch.ones((), device=a.device)),
    "a tensor, in place": lambda a, mask: a.masked_fill_(mask, torch.ones((), device=a.device)),
    "a CPU tensor, in place": lambda a, mask: a.masked_fill_(mask, torch.ones(())),
    "out=": lambda a, mask: torch.ops.aten.masked_fill.Tensor_out(
        a, mask, torch.ones((), device=a.device), out=torch.empty(0, device=a.device)
    ),
}


@pytest.mark.parametrize(("shape", "other"), LARGER)
@pytest.mark.parametrize("name", MASKED_FILLS)
def test_masked_fill_with_a_mismatched_mask(name: str, shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    a, mask = torch.zeros(shape), torch.ones(other, dtype=torch.bool)
    fills = MASKED_FILLS[name]
    if "in place" in name or not broadcast(shape, other):
        refused_alike(fills, a, mask)
    else:
        agrees(fills, a, mask)


def broadcast(*shapes: tuple[int, ...]) -> bool:
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("other", [(2,), (3,), (3, 2)])
def test_masked_fill_with_a_wrong_mask_dtype_or_value_shape(other: tuple[int, ...]) -> None:
    a, mask = torch.zeros(2), torch.ones(other)
    refused_alike(lambda a, mask: a.masked_fill_(mask.byte(), 1), a, mask)
    refused_alike(lambda a, mask: a.masked_fill(mask.int(), 1), a, mask)
    refused_alike(lambda a, mask: a.masked_fill_(mask.bool(), torch.ones(1, device=a.device)), a, mask)
    refused_alike(lambda a, mask: a.masked_fill(mask.bool(), torch.ones(1, 1, device=a.device)), a, mask)


@pytest.mark.parametrize("shape", [(1,), (3,), (0,), (2, 3), (1, 1, 1)], ids=str)
def test_fill_with_a_value_that_has_dimensions(shape: tuple[int, ...]) -> None:
    for fill in (torch.ops.aten.fill.Tensor, lambda a, value: a.fill_(value)):
        for given in ((2, 3), (), (0, 3), (1,)):
            refused_alike(fill, torch.zeros(given), torch.ones(shape))


@pytest.mark.parametrize("name", ["logit_", "div_", "exp_"])
def test_in_place_result_of_a_wrong_dtype_raises_pytorchs_error(name: str) -> None:
    arguments = (2,) if name == "div_" else ()
    with pytest.raises(RuntimeError, match="result type Float can't be cast to the desired output type Int"):
        getattr(bp([1, 2], torch.int32), name)(*arguments)


@pytest.mark.parametrize("name", ["addr", "logaddexp", "hypot", "ldexp", "mm", "lerp", "logsumexp", "where"])
def test_out_of_a_wrong_dtype_raises_pytorchs_error(name: str) -> None:
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "addr": lambda a, out: torch.addr(a[0, 0], a[0], a[0], out=out),
        "lerp": lambda a, out: torch.lerp(a, a, 0.5, out=out),
        "logsumexp": lambda a, out: torch.logsumexp(a, 0, out=out),
        "where": lambda a, out: torch.where(a > 0, a, a, out=out),
    }
    call = calls.get(name, lambda a, out: getattr(torch, name)(a, a, out=out))
    good = call(torch.ones(3, 3), torch.empty(0))
    for _ in range(2):
        refused_alike(call, torch.ones(3, 3), torch.zeros(good.shape, dtype=torch.int32))
        torch.testing.assert_close(call(bp(torch.ones(3, 3)), bp(torch.empty(0))).cpu(), good)


@pytest.mark.parametrize("name", ["add", "ldexp", "logaddexp", "hypot", "atan2", "bitwise_and"])
def test_broadcasting_errors_have_pytorchs_messages(name: str) -> None:
    dtype = torch.int32 if name == "bitwise_and" else torch.float32
    for shape, other in (((7,), (8,)), ((2, 3, 4), (5, 1)), ((4, 1, 3), (2, 2))):
        refused_alike(getattr(torch, name), torch.ones(shape, dtype=dtype), torch.ones(other, dtype=dtype))


# Integer division by zero

DIVISIONS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "floor_divide": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "fmod": torch.fmod,
    "div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "in place": lambda a, b: a.clone().remainder_(b),
}


@pytest.mark.parametrize("divisor", ["tensor", "strided", "number", "itself"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("name", DIVISIONS)
def test_integer_division_by_zero_is_an_error(name: str, dtype: torch.dtype, divisor: str) -> None:
    a = bp([7, 8, 0], dtype)
    b = {
        "tensor": bp([1, 0, 2], dtype),
        "strided": bp([1, 5, 0, 5, 2, 5], dtype)[::2],
        "number": 0,
        "itself": a,
    }[divisor]
    raises_at_synchronization(RuntimeError, "ZeroDivisionError: .* was divided by zero", lambda: DIVISIONS[name](a, b))


def test_in_place_division_by_itself_checks_the_original_divisor() -> None:
    def divide() -> None:
        a = bp([3, 0])
        a.floor_divide_(a)

    raises_at_synchronization(RuntimeError, "floor_divide: an integer was divided by zero", divide)
    a = bp([3, 5])
    assert a.floor_divide_(a).tolist() == [1, 1]
    assert a.remainder_(a).tolist() == [0, 0]  # these zeros are results, not divisors
    synchronize()


def test_valid_divisions() -> None:
    agrees(lambda a, b: (a // b, a % b, torch.fmod(a, b)), torch.tensor([7.0, -7.0, 0.0]), torch.zeros(3))
    agrees(lambda a, b: a / b, torch.tensor([7, -7, 0]), torch.tensor([0, 0, 0]))
    agrees(lambda a: (a // 0, a % 0), torch.ones(0, dtype=torch.int64))
    agrees(lambda a, b: a // b, torch.tensor([7, -7, 3], dtype=torch.int32), torch.tensor([2, 2, -1]))


# Indices

INDEXED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "index_select": lambda x, i: x.index_select(0, i),
    "index": lambda x, i: x[i],
    "gather": lambda x, i: x.gather(0, i.view(-1, 1)),
    "take": lambda x, i: x.take(i * 4),
    "scatter": lambda x, i: x.scatter(0, i.view(-1, 1), 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i.view(-1, 1), x[: len(i)]),
    "index_add": lambda x, i: x.index_add(0, i, x[: len(i)]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[: len(i)]),
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
    "index_put": lambda x, i: x.index_put((i,), x[: len(i)]),
    "index_put accumulating": lambda x, i: x.index_put((i,), x[: len(i)], accumulate=True),
    "embedding": lambda x, i: F.embedding(i, x),
    "nll_loss": lambda x, i: F.nll_loss(x[: len(i)].log_softmax(1), i),
}


# For these an index out of bounds is a RuntimeError; for all others it is an IndexError, as on the CPU.
RUNTIME_ERRORS = {"gather", "scatter", "scatter_add"}


@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("index", [4, 1 << 40, -5])
def test_index_out_of_range_is_an_error_and_accesses_no_memory(name: str, index: int) -> None:
    x = torch.arange(16.0, device=DEVICE).view(4, 4)
    i = bp([0, index, 1])
    synchronize()
    error = RuntimeError if name in RUNTIME_ERRORS else IndexError
    raises_at_synchronization(error, "index -?[0-9]+ is out of bounds", lambda: INDEXED[name](x, i))
    assert x.flatten().tolist() == list(map(float, range(16)))


def test_reading_a_result_raises_its_error() -> None:
    x = torch.ones(4, device=DEVICE).index_select(0, bp([9]))
    with pytest.raises(IndexError, match="index_select: index 9 is out of bounds for dimension with size 4"):
        x.tolist()


def test_valid_indices() -> None:
    for name, call in INDEXED.items():
        if name not in ("nll_loss", "take"):
            agrees(call, torch.arange(16.0).view(4, 4), torch.tensor([0, 3, 1]))


# Overlaps

OVERLAPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "shifted in place": lambda x: x[1:].mul_(x[:-1]),
    "expanded in place": lambda x: x[:1].expand(4).add_(1),
    "shifted out=": lambda x: torch.add(x[:-1], 1, out=x[1:]),
    "cat": lambda x: torch.cat([x[:2], x[2:4]], out=x[1:5]),
    "cat to its input": lambda x: torch.cat([x[:2], x[2:4]], out=x[:4]),
    "index_select": lambda x: torch.index_select(x, 0, torch.tensor([0, 1], device=x.device), out=x[1:3]),
    "index_select to an expanded tensor": lambda x: torch.index_select(
        x, 0, torch.tensor([0, 1], device=x.device), out=x[:1].expand(2)
    ),
    "gather": lambda x: torch.gather(x, 0, torch.tensor([0, 1], device=x.device), out=x[:2]),
    "take": lambda x: torch.take(x, torch.tensor([0, 1], device=x.device), out=x[:1].expand(2)),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlapping_memory_raises_pytorchs_error(name: str) -> None:
    message = "refers? to a single memory location"
    for x in (torch.ones(8), torch.ones(8, device=DEVICE)):
        with pytest.raises(RuntimeError, match=message):
            OVERLAPS[name](x)


# Dtypes and kernel texts


def test_dtype_without_kernels_runs_on_the_cpu() -> None:
    agrees(lambda a, b: (a * b).to(torch.complex64), torch.randn(3).to(torch.complex32), torch.randn(3), fallbacks=None)


def test_kernel_with_an_unsupported_dtype_is_an_error_before_it_is_built() -> None:
    from torch_backplane.kernels import OpenCLC, Target, geometry, pointwise

    where = geometry((4,), [(1,), (1,)])
    with pytest.raises(TypeError, match="no float64"):
        pointwise(
            "double",
            lambda x: x + 1.0,
            inputs=[torch.float64],
            outputs=[torch.float64],
            layout=where.layout,
            dialect=OpenCLC(Target(float64=False)),
        )


def test_build_error_contains_the_operator_and_the_compilers_message() -> None:
    text = "kernel void broken(global float* a, const ulong offset) { this is not C }"
    x = torch.ones(4, device=DEVICE)
    kernel = _C.CompiledKernel(0, text, "broken", "my::operator", ["output"])

    def run() -> None:
        _C.launch(kernel, [x], [4], [4])  # kernels are built in the background: the error may come here or later
        synchronize()

    with pytest.raises(RuntimeError, match=r"kernel broken of my::operator could not be built") as raised:
        run()
    assert "error:" in str(raised.value)
    assert "this is not C" in str(raised.value)
    synchronize()
    assert (x + 1).tolist() == [2.0] * 4


# Empty and zero-dimensional tensors


# Messages of CPU operators that have no kernel for a dtype.
MISSING_DTYPE = ("not implemented for", "result type Float can't be cast to the desired output type Long")


# The CPU kernels of these operators crash for empty tensors, because they divide by the size. test_normalization.py
# tests them on the device.
CRASHING = ("aten::_masked_softmax", "aten::_weight_norm_interface", "aten::_weight_norm_interface_backward")


def sample_arguments(overload: OpOverload, tensors: Iterator[torch.Tensor]) -> list[Any] | None:
    """Returns arguments for an overload, with the tensors in order; None if the types do not tell valid arguments."""
    found: list[Any] = []
    for argument in overload._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value() and kind != "Tensor":
            if argument.kwarg_only:
                break
            found.append(argument.default_value)
        elif kind == "Tensor":
            tensor = next(tensors)
            found.append(tensor.bool() if argument.name == "mask" else tensor)
        elif kind in ("number", "float"):
            found.append(2)
        elif kind == "bool":
            found.append(False)
        elif kind in ("int", "Optional[int]") and argument.name in ("dim", "reduction"):
            found.append(0)
        elif kind in ("List[int]", "Optional[List[int]]") and argument.name == "dim":
            found.append([0])
        else:
            return None
    return found


def swept() -> list[tuple[str, OpOverload]]:
    """Returns the declared ATen operators that compute new results from tensors and numbers."""
    import torch_backplane.operators  # noqa: F401
    from torch_backplane.planning.declare import declared, find

    found = []
    for name in sorted(one for one in declared if one.startswith("aten::") and one not in CRASHING):
        overload = find(name)
        schema = overload._schema
        tensors = [one for one in schema.arguments if str(one.type) == "Tensor"]
        plain = not schema.is_mutable and tensors and torch.Tag.nondeterministic_seeded not in overload.tags
        if plain and sample_arguments(overload, iter([torch.ones(())] * 9)) is not None:
            found.append((name, overload))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()], ids=str)
def test_every_operator_accepts_empty_and_zero_dim_tensors(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    operators = swept()
    assert len(operators) > 150
    # With a zero-dim tensor each operator builds a kernel. For int64, a quarter of the operators is enough: kernels
    # convert integers when they load them, for all shapes alike.
    few = shape == () and dtype == torch.int64
    operators = operators[::4] if few else operators
    compared, wrong = 0, []
    for name, overload in operators:
        values = [torch.full(shape, 0.5 if dtype.is_floating_point else 1.0).to(dtype) for _ in range(5)]
        arguments = sample_arguments(overload, iter(values))
        assert arguments is not None
        lacking = False
        try:
            expected = overload(*arguments)
        except Exception as error:  # any error of the CPU
            expected, lacking = (
                None,
                any(text in str(error) for text in MISSING_DTYPE),
            )  # a missing dtype is no error on bp
        try:
            found = overload(*on_device(arguments))
            synchronize()
        except Exception as error:
            if expected is not None or "could not be built" in str(error):
                wrong.append(f"{name}: {error}")
            continue
        if expected is None:
            if not lacking:
                wrong.append(f"{name}: the CPU raised")
            continue
        compared += 1
        try:
            torch.testing.assert_close(to_cpu(found), expected, equal_nan=True)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert compared > (20 if few else 100)
    assert not wrong, "\n".join(wrong)


# More elements than 32 bits can index. Memory that no kernel touches is not committed: the buffer is mostly address
# space.


def test_strides_beyond_32_bits() -> None:
    need_memory(2**31 + 64)
    memory = torch.empty(2**31 + 64, dtype=torch.int8, device=DEVICE)
    view = memory.as_strided((3, 5), (2**30, 7))
    values = torch.arange(15, dtype=torch.int8).view(3, 5)
    view.copy_(values.to(DEVICE))
    view.add_(1)
    assert torch.equal((view * 2).cpu(), (values + 1) * 2)
    assert torch.equal(view.sum(1).cpu(), (values + 1).sum(1))
    index = torch.tensor([2, 0], device=DEVICE)
    assert torch.equal(view.index_select(0, index).cpu(), (values + 1)[[2, 0]])


@pytest.mark.fault("short loops")
def test_a_reduction_of_more_than_2_to_the_31_elements() -> None:
    one = torch.ones(1, dtype=torch.int8, device=DEVICE)
    assert one.expand(2**31 + 2).sum().item() == 2**31 + 2


# Numbers out of a dtype's range

NUMBERS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "fill": lambda x, v: x.fill_(v),
    "fill with a CPU tensor": lambda x, v: x.fill_(torch.tensor(v)),
    "full": lambda x, v: torch.full((2,), v, dtype=x.dtype, device=x.device),
    "masked_fill": lambda x, v: x.masked_fill(x > 0, v),
    "index_fill": lambda x, v: x.index_fill(0, torch.tensor([1], device=x.device), v),
    "scatter": lambda x, v: x.scatter(0, torch.tensor([1], device=x.device), v),
    "index_add": lambda x, v: x.index_add(0, torch.tensor([1], device=x.device), x[:1], alpha=v),
    "clamp": lambda x, v: x.clamp(max=v),
    "clamp_min": lambda x, v: x.clamp_min(v),
    "alpha of add": lambda x, v: torch.add(x, x, alpha=v),
    "addmm": lambda x, v: torch.addmm(x, x.expand(2, 2), x.expand(2, 2), alpha=v),
    "addcmul": lambda x, v: torch.addcmul(x, x, x, value=v),
    "threshold": lambda x, v: torch.nn.functional.threshold(x, 0, v),
    "pad": lambda x, v: torch.nn.functional.pad(x, (1, 1), value=v),
    # Where numbers take part in type promotion, they wrap or become infinite.
    "add": lambda x, v: x + v,
    "multiply": lambda x, v: v * x,
    "compare": lambda x, v: (x == v, x < v),
    "shift": lambda x, v: x << v if not x.is_floating_point() else x,
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    ("dtype", "number"),
    [(torch.int8, 300), (torch.int8, 100), (torch.uint8, 300), (torch.float16, -1e9), (torch.float16, math.inf)],
)
def test_numbers_out_of_a_dtypes_range(name: str, dtype: torch.dtype, number: float) -> None:
    """The check also runs on replay: the number is not known when the plan is made."""

    def outcome(x: torch.Tensor, number: float) -> Any:
        try:
            return tree_map_only(torch.Tensor, torch.Tensor.cpu, NUMBERS[name](x.clone(), number))
        except RuntimeError as error:
            return str(error).splitlines()[0]

    if name in ("threshold", "addmm") and (dtype, number) == (torch.float16, -1e9):
        pytest.skip("PyTorch's CPU checks this number in float32 or float16; our kernels check it in float32")
    x = torch.tensor([1, 3]).to(dtype)
    device = x.to(DEVICE)
    for value in (type(number)(2), number, number):
        expected, found = outcome(x, value), outcome(device, value)
        assert type(found) is type(expected), (found, expected)
        if isinstance(expected, str):
            assert found == expected
        else:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_subtraction_of_bools_raises_pytorchs_error() -> None:
    x = torch.tensor([True, False], device=DEVICE)
    for call in (lambda: x - 2, lambda: 2 - x, lambda: x - x):
        with pytest.raises(RuntimeError, match="Subtraction, the `-` operator, with"):
            call()


@pytest.mark.parametrize("count", [3, 300_000])  # 300,000 elements take two launches on a processor
def test_unsupported_reduction_falls_back_before_any_launch(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(total: Any, elements: Any) -> Any:
        raise TypeError("no such dtype")

    definition = Reduction([torch.float32], [0.0], lambda x, _: x, lambda a, b: a + b, refuses)
    out, x = bp(0.0), torch.ones(count, device=DEVICE)
    launched: list[Any] = []
    with monkeypatch.context() as patch:  # keep short: all planners are without launches meanwhile
        for module in (reduce, template):
            patch.setattr(module, "launch", lambda *given, **named: launched.append(given))
        with pytest.raises(_C.RunOnCPU, match="no such dtype"):
            reduce.run_reduction(definition, [out], [x], [0], key="refuses", name="sum")
    assert not launched


def test_errors_have_the_messages_of_pytorchs_kernels() -> None:
    """Not the messages of PyTorch's decompositions or of our planners."""
    x, classes = torch.randn(3, 4), torch.tensor([0, 1, 2])
    for weight in (torch.ones(3), torch.ones(4, 1)):
        refused_alike(lambda x, t, w: torch.nn.functional.nll_loss(x, t, weight=w), x, classes, weight)
    refused_alike(lambda a: torch.addcdiv(a, a, a), torch.ones(3, dtype=torch.int64))
    for dtype in (torch.bool, torch.int64):
        for spread in (torch.var, torch.std, torch.var_mean, torch.std_mean):
            refused_alike(spread, torch.ones(3, dtype=dtype))
    refused_alike(torch.rsub, torch.ones(5), torch.ones(7))
    losses = torch.nn.functional.huber_loss, torch.nn.functional.smooth_l1_loss, torch.nn.functional.soft_margin_loss
    for loss in losses:
        for reduction in ("none", "mean", "sum"):
            refused_alike(lambda a, b: loss(a, b, reduction=reduction), x > 0, torch.ones(3, 4, dtype=torch.int8))  # noqa: B023


def test_first_of_several_errors_is_the_same_as_pytorchs() -> None:
    """PyTorch checks overlaps first, then shapes, then dtypes."""
    refused_alike(lambda a, out: torch.sign(a, out=out), torch.ones(3), torch.ones(3, dtype=torch.int32))
    refused_alike(lambda a: torch.exp(a[:-1], out=a[1:]), torch.ones(4, dtype=torch.bool))
    refused_alike(lambda a, b: torch.div(a, b, out=a[:1].expand(3)), torch.ones(3, dtype=torch.int32), torch.ones(2))
    refused_alike(lambda a, b: torch.atan2(a, b, out=a), torch.ones(3, dtype=torch.int32), torch.ones(2))


@pytest.mark.parametrize("shape", [(0,), (3,)])
def test_unsupported_dtypes_are_refused_for_empty_tensors(shape: tuple[int, ...]) -> None:
    bools, floats = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
    refused_alike(torch.relu, bools)
    for bitwise in (torch.bitwise_not, torch.bitwise_and, torch.bitwise_left_shift):
        refused_alike(lambda a: bitwise(*[a] * (1 + (bitwise is not torch.bitwise_not))), floats)  # noqa: B023
    refused_alike(lambda a: torch.bitwise_right_shift(a, a), bools)


def test_tril_and_triu_of_expanded_tensors_in_place() -> None:
    """PyTorch writes their shared elements in place, one after another."""
    for keep in (torch.Tensor.tril_, torch.Tensor.triu_):
        for x in (torch.arange(1.0, 4).expand(3, 3), torch.arange(1.0, 4).view(3, 1).expand(3, 3)):
            for diagonal in (-1, 0, 1):
                agrees(keep, x, diagonal, fallbacks=None)


UNKNOWN_WORDS = {
    "gelu": lambda x, i: torch.nn.functional.gelu(x, approximate="erf"),
    "gelu_backward": lambda x, i: torch.ops.aten.gelu_backward(x, x, approximate=""),
    "div": lambda x, i: torch.div(x, x, rounding_mode="round"),
    "scatter_ of add": lambda x, i: x.scatter_(0, i, x.clone(), reduce="sum"),
    "scatter_ of a number": lambda x, i: x.scatter_(0, i, 2.0, reduce="subtract"),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i, x, "add"),
    "scatter_reduce without self": lambda x, i: x.scatter_reduce(0, i, x, "median", include_self=False),
    "index_reduce": lambda x, i: x.index_reduce(0, i[:, 0], x, "sum"),
    "searchsorted": lambda x, i: torch.searchsorted(x, x, side="middle"),
}


@pytest.mark.parametrize("name", UNKNOWN_WORDS)
def test_unknown_option_values_are_refused(name: str) -> None:
    refused_alike(UNKNOWN_WORDS[name], torch.rand(3, 4), torch.tensor([[0, 1, 2, 0], [1, 2, 0, 1], [2, 0, 1, 2]]))


RESIZED_AND_EXPANDED = {
    "index_select": lambda x, i, out: torch.index_select(x, 0, i, out=out),
    "take": lambda x, i, out: torch.take(x, i, out=out),
    "gather": lambda x, i, out: torch.gather(x[0], 0, i, out=out),
    "where": lambda x, i, out: torch.where(x > 0.5, x, -x, out=out),
    "nan_to_num": lambda x, i, out: torch.nan_to_num(x, out=out),
    "conj_physical": lambda x, i, out: torch.conj_physical(x, out=out),
    "exp": lambda x, i, out: torch.exp(x, out=out),
    "masked_select": lambda x, i, out: torch.masked_select(x, x > 0.5, out=out),
    "sum": lambda x, i, out: torch.sum(x, 0, out=out),
    "mm": lambda x, i, out: torch.mm(x, x.t(), out=out),
    "tril": lambda x, i, out: torch.tril(x, out=out),
}


@pytest.mark.parametrize("name", RESIZED_AND_EXPANDED)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_expanded_out_that_needs_resizing_is_refused_like_pytorch(name: str) -> None:
    function, x, i = RESIZED_AND_EXPANDED[name], torch.rand(3, 4), torch.tensor([2, 0])

    def refused(device: str) -> str | None:
        out = torch.zeros(1, 1, device=device).expand(2, 6)
        try:
            function(x.to(device), i.to(device), out)
        except RuntimeError as error:
            return str(error)
        return None

    expected = refused("cpu")
    assert [refused(DEVICE) for _ in range(2)] == [expected] * 2
