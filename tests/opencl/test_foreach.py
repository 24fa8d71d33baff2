"""Every overload of torch._foreach_*, for lists of tensors that share memory, are refused, or are of many kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, had, need, plans_from_the_start, to_cpu
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter

import torch_backplane
from torch_backplane import plans

Lists = Sequence[list[torch.Tensor]]
Scene = Callable[[str], Lists]  # device → lists of a call; further lists are made like the first


# One of each group of operators that differ only in their formulas and share the code that processes lists.
ONE_OF_EACH = ("add", "mul", "maximum", "addcmul", "lerp", "neg", "zero", "norm")


def overloads(names: Sequence[str] = ()) -> Iterator[OpOverload]:
    """Yields all overloads without `out` of these torch._foreach_* operators, or of all that have a planner."""
    from torch_backplane.planning import declare

    torch.bp.init()
    bases = {name.partition(".")[0].rstrip("_") for name in declare.declared if name.startswith("aten::_foreach_")}
    assert bases >= {f"aten::_foreach_{name}" for name in names}
    bases = {f"aten::_foreach_{name}" for name in names} or bases
    for name in sorted(base + end for base in bases for end in ("", "_")):
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        for overload in packet.overloads() if packet is not None else ():
            if not overload.endswith("out"):
                yield getattr(packet, overload)


def values(shape: Sequence[int], device: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns random numbers from 0.5 to 3, or from 1.5 to 9 for other dtypes than floating-point ones."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.rand(tuple(shape), generator=generator) * 2.5 + 0.5
    return (made * 3 if not dtype.is_floating_point else made).to(dtype).to(device)


def arguments(overload: OpOverload, lists: Lists, number: Any = 0.5) -> tuple[list[Any], dict[str, Any]]:
    """Returns arguments by the schema: `lists`, further lists like the first one, and `number` for each number."""
    given, named = [], {}
    device = str(lists[0][0].device) if lists[0] else DEVICE
    left = list(lists)
    for seed, one in enumerate(overload._schema.arguments):
        kind = str(one.type)
        if kind == "List[Tensor]":
            like = enumerate(lists[0])
            made = [values(one.shape, device, seed=10 * seed + at, dtype=one.dtype) for at, one in like]
            made = left.pop(0) if left else made
        elif kind == "List[number]":
            made = [number] * len(lists[0])
        elif kind == "Tensor" and one.name == "scalars":
            made = torch.tensor([number] * len(lists[0]))
        elif kind == "Tensor":
            made = torch.tensor(number, device=device)
        elif "number" in kind:
            made = number
        else:
            continue
        if one.kwarg_only:
            named[one.name] = made
        else:
            given.append(made)
    return given, named


def outcome(overload: OpOverload, given: Any) -> tuple[list[Any], list[Any]]:
    """Returns (dtypes, shapes and strides of results, or the error; tensors of the results and of the arguments)."""
    try:
        found = overload(*given[0], **given[1]) or []
        facts = [(one.dtype, one.shape, one.stride()) for one in found]
    except NotImplementedError:
        raise
    except (RuntimeError, IndexError) as error:
        found, facts = [], f"{type(error).__name__}: {error}".partition("\n")[0]
    return facts, [one for one in tree_iter(to_cpu((found, given))) if isinstance(one, torch.Tensor)]


def compare(overload: OpOverload, scene: Scene, number: Any = 0.5) -> None:
    """Asserts that results, errors and changed arguments are the same as on the CPU, planned and replayed."""
    expected = outcome(overload, arguments(overload, scene("cpu"), number))
    for _ in range(2):
        torch_backplane._C.reset_fallback_counts()
        given = arguments(overload, scene(DEVICE), number)
        found = outcome(overload, given)
        assert found[0] == expected[0]
        for one, wanted in zip(found[1], expected[1], strict=True):
            torch.testing.assert_close(
                one, wanted, equal_nan=True, rtol=1e-3 if wanted.dtype == torch.float16 else 1e-5, atol=1e-6
            )
        if not isinstance(found[0], str) and all(one.dtype.is_floating_point for one in given[0][0]):
            assert not any(torch_backplane._C.fallback_counts().values())


def takes(overload: OpOverload, number: Any) -> bool:
    """Returns whether the schema has numbers. A norm does not take numbers that are no valid order."""
    if overload is torch.ops.aten._foreach_norm.Scalar and (number != number or abs(number) == 1e39):
        return False
    return any("number" in str(one.type) for one in overload._schema.arguments)


def wrong_ones(scene: Scene, numbers: Sequence[Any] = (), names: Sequence[str] = ()) -> str:
    """Returns the differences from the CPU in calls with these numbers; without numbers, in all overloads with 0.5."""
    wrong = []
    for overload in overloads(names):
        for number in [one for one in numbers if takes(overload, one)] if numbers else [0.5]:
            try:
                compare(overload, scene, number)
            except AssertionError as error:
                wrong.append(f"{overload} with {number}: {error}")
            except NotImplementedError:
                continue  # not implemented on the CPU
    return "\n".join(wrong)


# --- tensors that share memory, at different positions of the lists


def flattened(device: str) -> Lists:
    a, b, c = values((4, 3), device, seed=1).t(), values((2, 5), device, seed=2), values((3, 4), device, seed=3)
    return [a, b, c.flatten()], [c, b, c.flatten()], [c, values((2, 5), device), c.view(12)]


def read_later(device: str) -> Lists:
    x, y, z = (values((3, 4), device, seed=seed) for seed in range(3))
    return [x, y, x.detach()], [y, z, x], [x, x, y]


def written_twice(device: str) -> Lists:
    x, y = values((3, 4), device), values((3, 4), device, seed=1)
    return [x, y, x], [y, y, y]


def written_then_read(device: str) -> Lists:
    x, y, z = (values((3, 4), device, seed=seed) for seed in range(3))
    return [x, y, z], [y, z, x], [z, x, y]


def parts_of_one(device: str) -> Lists:
    whole = values((40,), device)
    return [whole[:10], whole[5:15], whole[15:25]], [whole[10:20], whole[20:30], whole[30:]]


def columns(device: str) -> Lists:
    whole = values((4, 6), device)
    return [whole[:, :3], whole[:, 3:]], [whole[:, 3:], whole[:, :3]]


def neighbours(device: str) -> Lists:
    whole = values((48,), device)
    return [whole[:12], whole[12:24]], [whole[24:36], whole[36:]]


def of_itself(device: str) -> Lists:
    x, y = values((3, 4), device), values((3, 4), device, seed=1)
    return [x, y], [x, y], [x, y]


# --- tensors that are refused


def shifted(device: str) -> Lists:
    x, y, whole = values((9,), device), values((9,), device, seed=2), values((10,), device, seed=1)
    return [x, whole[:-1], y], [y, whole[1:], x]


def transposed(device: str) -> Lists:
    x, y = values((3, 3), device), values((3, 3), device, seed=1)
    return [x, y, values((2,), device)], [values((3, 3), device, seed=3), y.t(), values((2,), device, seed=4)]


def expanded(device: str) -> Lists:
    x, y, z = values((3, 4), device), values((3, 1), device, seed=1).expand(3, 4), values((2,), device)
    return ([x, y, z],)


def expanded_first(device: str) -> Lists:
    x, y = values((1,), device).expand(5), values((3, 4), device, seed=1)
    return ([x, y],)


def read_expanded(device: str) -> Lists:
    x, y = values((3, 4), device), values((3, 1), device, seed=1).expand(3, 4)
    return [x, values((3, 4), device, seed=5)], [y, y], [y, y]


def read_expanded_and_transposed(device: str) -> Lists:
    x, y = values((3, 1), device).expand(3, 4), values((4, 3), device, seed=1).t()
    return [x, values((4,), device)], [y, values((4,), device, seed=4)], [y, values((4,), device, seed=5)]


def of_other_shapes(device: str) -> Lists:
    x, y = values((3, 4), device), values((3, 4), device, seed=1)
    return [x, y, values((2,), device)], [y, values((5, 4), device), values((2,), device)]


def broadcast(device: str) -> Lists:
    x, y = values((3, 4), device), values((3, 4), device, seed=1)
    return [x, y, x[0]], [y[0], y[:, :1].clone(), x]  # copied: writing y while its column is read is undefined


def shorter(device: str) -> Lists:
    x, y = values((3, 4), device), values((3, 4), device, seed=1)
    return [x, y], [y], [y, y]


def shorter_at_the_end(device: str) -> Lists:
    x, y = values((3, 4), device), values((3, 4), device, seed=1)
    return [x, y], [y, x.clone()], [y]


# --- tensors of many kinds


def no_tensors(device: str) -> Lists:
    return [], [], []


def none_for_some(device: str) -> Lists:
    x = values((3,), device)
    return [], [x], [x]


def without_elements(device: str) -> Lists:
    return ([values((0,), device), values((2, 0), device)],)


def some_without_elements(device: str) -> Lists:
    return ([values((0,), device), values((3, 4), device), values((2, 0), device), values((), device, seed=4)],)


def strided(device: str) -> Lists:
    x, y = values((4, 3), device).t(), values((3, 8), device, seed=1)[:, ::2]
    return [x, y, values((3, 4), device)], [values((3, 4), device, seed=2), x.clone(), y.clone()]


def of_dtype(*dtypes: torch.dtype) -> Scene:
    def scene(device: str) -> Lists:
        return ([values((2, 3), device, seed=at, dtype=dtype) for at, dtype in enumerate(dtypes)],)

    return scene


def of_two_dtypes(device: str) -> Lists:
    x, y = values((3,), device), values((3,), device, dtype=torch.float64)
    return [x, y], [y, x], [x, x]


SCENES: dict[str, Scene] = {
    scene.__name__: scene
    for scene in (
        flattened, read_later, written_twice, written_then_read, parts_of_one, columns, neighbours, of_itself, shifted,
        transposed, expanded, expanded_first, read_expanded, read_expanded_and_transposed, of_other_shapes, broadcast,
        shorter,
        shorter_at_the_end, no_tensors, none_for_some, without_elements, some_without_elements, strided, of_two_dtypes,
    )
} | {
    "int64": of_dtype(torch.int64, torch.int64), "bool": of_dtype(torch.bool, torch.bool),
    "float64": of_dtype(torch.float64), "float_and_int": of_dtype(torch.float32, torch.int32),
}  # fmt: skip


# Scenes that run with every operator. The others are about memory, shapes or errors, and run with ONE_OF_EACH.
OF_EVERY_FORMULA = ("neighbours", "of_itself", "some_without_elements", "int64", "bool", "float_and_int")


@pytest.mark.parametrize("scene", SCENES)
def test_lists_are_processed_in_order(scene: str) -> None:
    if scene in ("of_two_dtypes", "float64"):
        need(torch.float64)
    assert not wrong_ones(SCENES[scene], names=() if scene in OF_EVERY_FORMULA else ONE_OF_EACH)


# PyTorch refuses invalid numbers for empty tensors too. Numbers out of a dtype's range are not among these: the
# operators that lists are composed of accept any `alpha` for empty tensors.
@pytest.mark.parametrize("number", [True, 2, -3.5, 2 + 1j, float("inf"), float("nan")])
@pytest.mark.parametrize("scene", ["of_itself", "without_elements", "some_without_elements", "int64"])
def test_numbers_of_all_kinds(scene: str, number: Any) -> None:
    assert not wrong_ones(SCENES[scene], [number])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_numbers_out_of_the_dtypes_range(dtype: torch.dtype) -> None:
    assert not wrong_ones(of_dtype(dtype, dtype), [1e6, 1e39])


# --- operators that take the scalars in a CPU tensor


SCALARS: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.tensor([-1.25, 0.5]),
    "float64": lambda: torch.tensor([-1.25, 0.5], dtype=torch.float64),
    "float16": lambda: torch.tensor([-1.25, 0.5], dtype=torch.float16),
    "int64": lambda: torch.tensor([3, -2]),
    "bool": lambda: torch.tensor([True, False]),
    "complex64": lambda: torch.tensor([1 + 2j, 0.5]),
    "too_few": lambda: torch.tensor([1.0]),
    "too_many": lambda: torch.ones(3),
    "none": lambda: torch.ones(0),
    "without_dimensions": lambda: torch.tensor(2.0),
    "two_dimensions": lambda: torch.ones(2, 2),
    "not_contiguous": lambda: torch.ones(4)[::2],
}


@pytest.mark.parametrize("scalars", SCALARS)
def test_scalars_in_a_tensor(scalars: str) -> None:
    wrong = []
    for name in ("addcmul", "addcdiv", "addcmul_", "addcdiv_"):
        overload = getattr(torch.ops.aten, f"_foreach_{name}").Tensor
        for scene in (of_itself, neighbours, shorter, shorter_at_the_end, expanded, flattened):

            def given(device: str, scene: Scene = scene, overload: OpOverload = overload) -> Any:
                return [*arguments(overload, scene(device)[:1] + scene(device)[1:])[0][:3], SCALARS[scalars]()], {}

            expected, found = outcome(overload, given("cpu")), outcome(overload, given(DEVICE))
            if found[0] != expected[0] or not all(map(torch.allclose, found[1], expected[1])):
                wrong.append((name, scene.__name__, expected, found))
    assert not wrong


def test_scalars_on_the_device_are_refused() -> None:
    x = torch.ones(3, device=DEVICE)
    for name in ("addcmul", "addcdiv", "addcmul_", "addcdiv_"):
        with pytest.raises(RuntimeError, match="Expected scalars to be on CPU, got bp:0 instead"):
            getattr(torch, f"_foreach_{name}")([x], [x], [x], torch.ones(1, device=DEVICE))


# --- lerp

ENDS = [0.0, -0.0, 1.5, -2.0, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]
WEIGHTS = [0.0, 0.25, 0.5, 0.75, 1.0, 5.0, -5.0, -0.25, 1.25, float("inf"), float("-inf"), float("nan")]


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    start, end = torch.cartesian_prod(torch.tensor(ENDS), torch.tensor(ENDS)).unbind(1)
    return start.contiguous(), end.contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lerp_between_infinities(dtype: torch.dtype) -> None:
    start, end = (one.to(dtype) for one in pairs())
    many = [torch.full_like(start, weight) for weight in WEIGHTS]
    for weight in WEIGHTS:
        agrees(torch.lerp, start, end, weight)
        agrees(lambda a, b, w=weight: torch._foreach_lerp([a, b], [b, a], w), start, end)
        agrees(lambda a, b, w=weight: torch._foreach_lerp_([a], [b], w), start, end)
    agrees(lambda a, b: torch._foreach_lerp([a] * len(WEIGHTS), [b] * len(WEIGHTS), WEIGHTS), start, end)
    agrees(lambda a, b, *w: torch._foreach_lerp([a] * len(w), [b] * len(w), [*w]), start, end, *many)
    for weight in many:
        agrees(torch.lerp, start, end, weight)


@torch_backplane.elementwise
def between(a: Any, b: Any, weight: Any) -> Any:
    return torch.lerp(a, b, weight)


@torch_backplane.elementwise
def beyond(a: Any, b: Any) -> Any:
    return torch.lerp(a, b, 5.0) + torch.lerp(a, b, 0.25)


def test_lerp_in_formulas() -> None:
    start, end = pairs()
    for weight in WEIGHTS:
        agrees(between, start, end, torch.full_like(start, weight))
        torch.testing.assert_close(
            between(start.to(DEVICE), end.to(DEVICE), torch.full_like(start, weight).to(DEVICE)).cpu(),
            torch.lerp(start, end, weight), equal_nan=True,
        )  # fmt: skip
    found = beyond(start.to(DEVICE), end.to(DEVICE)).cpu()
    torch.testing.assert_close(found, torch.lerp(start, end, 5.0) + torch.lerp(start, end, 0.25), equal_nan=True)


# --- number of launches


def test_lists_without_shared_memory_take_few_launches() -> None:
    """Neither disjoint views of one buffer nor tensors that are read twice make tensors run one by one."""
    whole = torch.ones(16, 10, device=DEVICE)
    lists = [[*whole[at : at + 8]] for at in (0, 8)]
    with plans_from_the_start():
        for function in (
            lambda: torch._foreach_add_(lists[0], lists[1], alpha=2.0),
            lambda: torch._foreach_mul_(lists[0], lists[0]),
            lambda: torch._foreach_addcmul_(lists[0], lists[1], lists[1], 0.5),
            lambda: torch._foreach_addcdiv_(lists[0], [whole[8]] * 8, lists[1], [0.5] * 8),
            lambda: torch._foreach_lerp_(lists[0], lists[1], 0.5),
            lambda: torch._foreach_sqrt_(lists[0]),
            lambda: torch._foreach_zero_(lists[0]),
            lambda: torch._foreach_add([whole[0]] * 8, 1.0),
        ):
            function()
            assert plans.explain(function).count("launch") == 1
        torch._foreach_neg_([lists[0][0], lists[0][0]])
        assert "overlaps another tensor" in plans.explain(lambda: torch._foreach_neg_([lists[0][0], lists[0][0]]))


def large(device: str, more: int = 0) -> Lists:
    """Returns three lists of large tensors. `more`: additional rows of the first tensor of each list."""
    shapes = ((7_000 + more, 10), (30_001,))
    return [[values(shape, device, seed=seed + at) for at, shape in enumerate(shapes)] for seed in (0, 5, 9)]


CHANGES: dict[str, Callable[[Lists, float], None]] = {
    "lists": lambda lists, number: torch._foreach_mul_(lists[0], lists[1]),
    "alpha": lambda lists, number: torch._foreach_add_(lists[0], lists[1], alpha=number),
    "scalar": lambda lists, number: torch._foreach_lerp_(lists[0], lists[1], number),
    "scalars": lambda lists, number: torch._foreach_addcdiv_(*lists, [number, -number]),
    "whole numbers among them": lambda lists, number: torch._foreach_div_(lists[0], [number, 3]),
    "nothing else": lambda lists, number: torch._foreach_neg_(lists[0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_large_lists_replay_plans_for_other_numbers_and_sizes(change: str) -> None:
    torch_backplane._C.reset_fallback_counts()
    with plans_from_the_start():
        for more in (0, 20, 3, 41, 0):
            expected, found = large("cpu", more), large(DEVICE, more)
            for number in (0.5, 2.25, 0.125, 0.5):
                for lists in (expected, found):
                    CHANGES[change](lists, number)
                for ours, theirs in zip(found[0], expected[0], strict=True):
                    torch.testing.assert_close(ours.cpu(), theirs)
        plan_text = plans.explain(lambda: CHANGES[change](found, 0.75))
        counts = [one for name, one in torch_backplane._C.plan_counts().items() if "_foreach_" in name]
    assert sum(one["dynamic_shape_replays"] for one in counts) > 0
    assert "launch" in plan_text
    assert not any(torch_backplane._C.fallback_counts().values())


def test_numbers_that_overflow_are_refused() -> None:
    """The call raises and changes nothing. Its plan stays valid for other numbers."""
    there = large(DEVICE)
    before = [one.cpu() for one in there[0]]
    with plans_from_the_start():
        for _ in range(2):
            torch._foreach_add_(there[0], there[1], alpha=0.0)
            with pytest.raises(RuntimeError, match="without overflow"):
                torch._foreach_add_(there[0], there[1], alpha=1e39)
            with pytest.raises(RuntimeError, match="without overflow"):
                torch._foreach_addcmul_(*there, [0.5, 1e39])
    assert all(torch.equal(one.cpu(), other) for one, other in zip(there[0], before, strict=True))


def test_type_promotion_with_zero_dim_tensors() -> None:
    """If both tensors are zero-dim, the result has the wider dtype; otherwise it has that of the list's tensor."""
    lists = [torch.tensor(0.5).half(), torch.ones(3).half(), torch.ones(2)]
    for dtype in had((torch.float32, torch.float16, torch.float64)):
        other = torch.tensor(-1.5, dtype=dtype)
        expected = torch._foreach_add(lists, other)
        found = torch._foreach_add([one.to("bp") for one in lists], other.to("bp"))
        for one, wanted in zip(found, expected, strict=True):
            assert one.dtype == wanted.dtype
            torch.testing.assert_close(one.cpu(), wanted)
