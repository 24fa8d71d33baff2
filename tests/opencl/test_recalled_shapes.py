"""Shape rules give the shapes of results after PyTorch's Python meta kernel has run once per kind of call."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from agreement import plans_from_the_start
from torch.nn import functional

from torch_backplane import plans
from torch_backplane.planning.call import Call, Form
from torch_backplane.planning.registry import planned

shape_rules = importlib.import_module("torch_backplane.planning.shape_rules")

Shapes = Sequence[tuple[int, ...]]

# (name, function, shapes of the tensors in each call). PyTorch's meta kernel runs for the first call.
CASES: list[tuple[str, Callable[..., Any], Sequence[Shapes]]] = [
    ("relu", torch.relu, [[(3, 4)], [(4, 5)], [(1, 7)], [(0, 2)]]),
    ("abs", torch.abs, [[(3, 4)], [(5, 1)]]),
    ("isnan", torch.isnan, [[(3,)], [(9,)]]),
    ("hardswish", functional.hardswish, [[(3, 4)], [(5, 6)]]),
    ("zero_", lambda x: x.zero_(), [[(3, 4)], [(5, 6)]]),
    ("fill_", lambda x: x.fill_(2.5), [[(3, 4)], [(5, 6)], [(0,)]]),
    ("prelu", functional.prelu, [[(2, 3, 4), (3,)], [(5, 2, 2), (2,)], [(5, 2, 2), (3,)]]),
    ("complex", torch.complex, [[(3, 4), (3, 4)], [(2, 1), (1, 5)], [(2, 3), (2, 4)]]),
    ("where", lambda c, a, b: torch.where(c > 0, a, b),
     [[(3, 4), (3, 4), (3, 4)], [(2, 1), (1, 5), (2, 5)], [(2, 3), (1, 3), (2, 1)], [(2, 3), (2, 4), (2, 4)]]),
    ("where with out", lambda c, a, b, out: torch.where(c > 0, a, b, out=out),
     [[(3, 4)] * 4, [(2, 1), (1, 5), (2, 5), (2, 5)], [(2, 1), (1, 5), (2, 5), (1, 1)], [(2, 3), *[(2, 4)] * 3]]),
    ("logical_and", torch.logical_and, [[(3, 4), (4,)], [(2, 6), (6,)], [(2, 6), (5,)]]),
    ("logical_and_", lambda a, b: a.logical_and_(b), [[(3, 4), (3, 4)], [(3, 4), (1, 4)], [(1, 4), (3, 4)]]),
    ("roll", lambda x: x.roll((1, 2), (0, 1)), [[(3, 4)], [(5, 6)], [(2, 0)]]),
    ("flip", lambda x: x.flip(1), [[(3, 4)], [(5, 6)], [(2, 0)]]),
    ("var", lambda x: x.var(1), [[(3, 4)], [(5, 6)]]),
    ("std, keepdim", lambda x: x.std(0, keepdim=True), [[(3, 4)], [(5, 6)]]),
    ("count_nonzero", lambda x: x.count_nonzero(1), [[(3, 4)], [(5, 6)]]),
    ("logsumexp", lambda x: x.logsumexp(1), [[(3, 4)], [(5, 6)]]),
    ("max", torch.max, [[(3, 4)], [(5, 6)], [(0, 3)]]),
    ("max of a dimension", lambda x: tuple(x.max(1)), [[(3, 4)], [(5, 6)]]),
    ("index_select", lambda x, i: x.index_select(1, i.long() * 0), [[(3, 4), (2,)], [(5, 6), (9,)], [(5, 6), (0,)]]),
    ("take", lambda x, i: x.take(i.long() * 0), [[(3, 4), (2, 2)], [(5, 6), (9, 1)]]),
    ("embedding", lambda w, i: functional.embedding(i.long() * 0, w), [[(3, 4), (2, 2)], [(5, 6), (9, 1)]]),
    ("mv", torch.mv, [[(3, 4), (4,)], [(5, 6), (6,)], [(5, 6), (5,)]]),
    ("dot", torch.dot, [[(4,), (4,)], [(6,), (6,)], [(6,), (5,)]]),
    ("channel_shuffle", lambda x: functional.channel_shuffle(x, 2),
     [[(2, 4, 3, 3)], [(1, 6, 2, 5)], [(1, 5, 2, 5)], [(2, 4, 0, 3)]]),
    ("pixel_shuffle", lambda x: functional.pixel_shuffle(x, 2), [[(2, 4, 3, 3)], [(1, 8, 2, 5)], [(1, 6, 2, 5)]]),
    ("binary_cross_entropy", lambda a, b: functional.binary_cross_entropy(a.sigmoid(), b.sigmoid()),
     [[(3, 4), (3, 4)], [(5,), (5,)], [(5, 6), (5, 6)], [(5, 6), (5, 1)]]),
    ("binary_cross_entropy_with_logits, each",
     lambda a, b, w: functional.binary_cross_entropy_with_logits(a, b, w, reduction="none"),
     [[(3, 4), (3, 4), (4,)], [(5, 6), (5, 6), (6,)], [(5, 6), (5, 6), (5,)], [(2, 6), (5, 6), (6,)]]),
]  # fmt: skip


def tensors(shapes: Shapes, layout: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in shapes:
        tensor = torch.randn(shape, generator=generator)
        if layout == "transposed":
            tensor = tensor.permute(*range(tensor.dim())[::-1]).contiguous().permute(*range(tensor.dim())[::-1])
        elif layout == "channels last" and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        found.append(tensor)
    return found


def outcome(function: Callable[..., Any], given: Sequence[torch.Tensor], device: str) -> Any:
    """(shape, strides, dtype) of each result and the results, or the type and message of the error."""
    try:
        results = function(*(tensor.to(device) for tensor in given))
    except Exception as error:
        return type(error), str(error)
    results = results if isinstance(results, tuple) else (results,)
    return [(one.shape, one.stride(), one.dtype) for one in results], [one.cpu() for one in results]


@contextmanager
def asked() -> Iterator[list[str]]:
    """Records the overloads whose meta kernels are called."""
    names: list[str] = []
    original = Call._meta_of

    def meta_of(self: Call, overload: Any, values: Any) -> Any:
        names.append(str(overload))
        return original(self, overload, values)

    Call._meta_of = meta_of  # type: ignore[method-assign]
    try:
        yield names
    finally:
        Call._meta_of = original  # type: ignore[method-assign]


# The CPU's kernels for channels last return other strides than PyTorch's meta kernels.
OF_ITS_OWN = ("channel_shuffle", "pixel_shuffle")
LAYOUTS = [
    (case, layout)
    for case, (name, *_) in enumerate(CASES)
    for layout in ("contiguous", "transposed", "channels last")
    if layout != "channels last" or name not in OF_ITS_OWN
]


@pytest.mark.parametrize(("case", "layout"), LAYOUTS, ids=[f"{CASES[case][0]}, {layout}" for case, layout in LAYOUTS])
def test_results_and_errors_are_the_cpus(case: int, layout: str) -> None:
    _, function, calls = CASES[case]
    with plans_from_the_start():
        plans.set_mode("0")
        shape_rules._dtypes.clear()
        for seed, shapes in enumerate([*calls, *calls]):
            given = tensors(shapes, layout, seed)
            expected, found = (outcome(function, [one.clone() for one in given], device) for device in ("cpu", "bp:0"))
            assert found[0] == expected[0], f"of {shapes}: {found} and {expected}"
            if isinstance(found[0], type):
                continue
            for mine, theirs in zip(found[1], expected[1], strict=True):
                torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_meta_kernels_run_once_per_kind_of_call() -> None:
    with plans_from_the_start(), asked() as names:
        plans.set_mode("0")
        shape_rules._dtypes.clear()
        for size in (3, 4, 5):
            torch.relu(torch.ones(size).to("bp:0"))
        assert names == ["aten.relu.default"]
        torch.relu(torch.ones(3, 3).to("bp:0"))  # another rank
        torch.relu(torch.ones(3, dtype=torch.float16).to("bp:0"))
        assert names == ["aten.relu.default"] * 3
        for size in (3, 4):
            torch.ones(size).to("bp:0").relu_()
        assert names[3:] == ["aten.relu.default", "aten.relu_.default"]


def test_incorrect_rules_are_not_used() -> None:
    rule = shape_rules.RULES["take"]
    x, index = torch.arange(5.0, device="bp:0"), torch.tensor([1, 2], device="bp:0")
    (form,) = (cell.cell_contents for cell in planned["aten::take"].__closure__ if isinstance(cell.cell_contents, Form))
    with plans_from_the_start(), asked() as names:
        plans.set_mode("0")
        shape_rules._dtypes.clear()
        form.rule = form.functional_rule = rule._replace(sizes=lambda tensors, inputs: [7])
        try:
            for count in (1, 2):
                assert x.take(index[:count]).cpu().tolist() == [1.0, 2.0][:count]
        finally:
            form.rule = form.functional_rule = rule
            shape_rules._dtypes.clear()
        assert names.count("aten.take.default") == 2


def test_first_backward_pass_does_not_import_sympy() -> None:
    """PyTorch's meta functions would import SymPy, which takes as long as `import torch`."""
    program = (
        "import sys, torch; x = torch.randn(5, 6, device='bp', requires_grad=True); (x * 2).sum().backward(); "
        "x.grad.zero_(); torch.bp.synchronize(); sys.exit('sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=240, check=False).returncode == 0
