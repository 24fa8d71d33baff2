"""torch.compile with Inductor: results equal those of eager PyTorch on the CPU, call after call.

On devices with a dialect, Inductor generates kernels. On host devices it compiles for the CPU.
"""

from __future__ import annotations

import copy
import subprocess
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import on_opencl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config

import torch_backplane
from torch_backplane import drivers

HAS_KERNELS = bool(drivers.device(0).properties.dialect)
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="the devices have no dialect")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def on_bp(values: Any, device: str = "bp") -> list[Any]:
    return [one.to(device) if isinstance(one, torch.Tensor) else one for one in values]


def check(function: Callable[..., Any], *calls: list[Any], tolerance: float = 1e-5, **options: Any) -> None:
    """Compares the compiled function on bp with the function on the CPU, for each call, twice."""
    compiled = torch.compile(function, **options)
    for arguments in [one for one in calls for _ in range(2)]:
        given = on_bp(arguments)
        found, expected = compiled(*given), function(*(copy.deepcopy(one) for one in arguments))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_device=False, equal_nan=True)


def counts() -> dict[str, Any]:
    return torch_backplane.plans.stats()["backplane::compiled_graph"]


ELEMENTWISE: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "chain": (lambda x, y: torch.tanh(torch.exp(x)) * 2 + y.relu(), [torch.randn(1000), torch.randn(1000)]),
    "broadcast": (lambda x, y: x * y + 1, [torch.randn(7, 1, 5), torch.randn(3, 1)]),
    "transposed": (lambda x, y: x.t() + y, [torch.randn(200, 300), torch.randn(300, 200)]),
    "three layouts": (
        lambda x, y, z: x + y.permute(2, 0, 1) + z.permute(1, 2, 0),
        [torch.randn(5, 16, 32), torch.randn(16, 32, 5), torch.randn(32, 5, 16)],
    ),
    "integers": (lambda x: (x // 3, x % 5, x << 1, -x, x.float() / 3), [torch.randint(-50, 50, (100,))]),
    "half": (lambda x: (x * x + x).exp().to(torch.float16), [torch.randn(20, 30).half() / 4]),
    "bool": (lambda x: (x > 0) & (x < 1) | torch.isnan(x), [torch.tensor([0.5, -1.0, float("nan"), 2.0])]),
    "special": (lambda x: (torch.lgamma(x), torch.erfinv(x / 9), torch.special.i0(x)), [torch.rand(50) * 8 + 0.1]),
    "float64": (lambda x: (x.exp() + 1).log(), [torch.randn(100, dtype=torch.float64)]),
    "bits": (lambda x: (x.view(torch.int16) + 1, (x * 2).view(torch.int16)), [torch.randn(100).half()]),
    "padding": (lambda x: F.pad(x, (1, 2), value=3) + 1, [torch.randn(10, 4)]),
    "concatenation": (lambda x, y: torch.cat([x, y * 2]), [torch.randn(10, 5), torch.randn(3, 5)]),
    "frexp": (lambda x: torch.frexp(x), [torch.tensor([0.0, 1.5, -8.0, 1e-40, float("inf"), 0.3])]),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    function, arguments = ELEMENTWISE[name]
    check(function, arguments, tolerance=1e-3 if name == "half" else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integers_that_scale_floats_with_dynamic_shapes(dtype: torch.dtype) -> None:
    given = [torch.randn(size).to(dtype).requires_grad_() for size in ((5,), (5, 10), (10,))]
    compiled = torch.compile(torch.addmv, dynamic=True)
    for beta, alpha in ((1, 1), (1, 3), (2, 1), (-4, 3)):
        found = compiled(*(one.detach().to("bp").requires_grad_() for one in given), beta=beta, alpha=alpha)
        expected = torch.addmv(*given, beta=beta, alpha=alpha)
        torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=5e-2)


# Numbers computed from sizes, which dynamic shapes make expressions.
REAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "inverse": lambda x: x * (1 / x.shape[0]),
    "quotient": lambda x: x + x.shape[0] / x.shape[1],
    "root": lambda x: x / x.shape[1] ** 0.5,
    "multiple": lambda x: x + 0.3 * x.shape[0],
    "rounded": lambda x: x + int(x.shape[0] * 0.3) + round(x.shape[1] * 0.7) - x.shape[0] // 3,
    "maximum": lambda x: x - max(x.shape[0], 6) / 4,
    "condition": lambda x: torch.where(x > 0, x, x.shape[0] / 4).masked_fill(x < -1, 1 / x.shape[1]),
    "limit": lambda x: x.clamp(max=1 / x.shape[0]),
    "filled": lambda x: torch.full_like(x, x.shape[0] / 7) + 1,
    "padding": lambda x: F.pad(x, (1, 1), value=x.shape[0] / 4),
    "scalar": lambda x: torch.addcmul(x, x, x, value=1 / x.shape[0]),
    "reduction": lambda x: (x * (1 / x.shape[0])).sum(0) / x.shape[1],
    "interpolation": lambda x: F.interpolate(x[None, None], size=(2 * x.shape[0] + 1, 9), mode="bilinear"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", REAL)
def test_real_numbers_of_dynamic_sizes(name: str, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    for dynamic in (False, True):
        given = [[torch.randn(m, n, dtype=dtype)] for m, n in ((5, 7), (10, 3), (41, 6))]
        check(REAL[name], *given, tolerance=tolerance, dynamic=dynamic)


REDUCTIONS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "softmax rows": (lambda x: torch.softmax(x, -1), [torch.randn(64, 1000)]),
    "softmax columns": (lambda x: torch.log_softmax(x * 2, 0), [torch.randn(300, 200)]),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (1000,), w, b) * 2,
        [torch.randn(64, 1000), torch.randn(1000), torch.randn(1000)],
    ),
    "whole": (lambda x: ((x * x).sum(), x.mean(), x.amax()), [torch.randn(1 << 20)]),
    "positions": (lambda x: (x.argmax(-1), x.argmin(0)), [torch.randint(-5, 5, (64, 1000)).float()]),
    "others": (lambda x: (x.amax(1), x.prod(1), (x > 2).any(1), (x > -9).all(0)), [torch.randn(33, 70)]),
    "variance": (lambda x: torch.var_mean(x, 1), [torch.randn(64, 1000) + 5]),
    "two reductions": (lambda x: (x - x.mean(-1, keepdim=True)).abs().sum(-1), [torch.randn(20, 500)]),
    "integers": (lambda x: (x.sum(-1), x.amax(0)), [torch.randint(-9, 9, (40, 300), dtype=torch.int32)]),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    function, arguments = REDUCTIONS[name]
    check(function, arguments, tolerance=1e-4)


def _scaled_columns(x: torch.Tensor, index: torch.Tensor, added: torch.Tensor) -> Any:
    """Two dependent reductions of columns, indexing and an in-place operation."""
    largest = x.amax(0)
    added.add_(x.mean(0) * 2)
    near = (x - largest + added[index]).exp()
    return near / near.sum(0), largest + 1, added * largest


COLUMNS: dict[str, tuple[Callable[..., Any], Callable[[int, int], list[Any]]]] = {
    "sums": (lambda x, y: ((x * 2).sum(0), (x + y).sum(0), y * 3), lambda m, n: [torch.randn(m, n), torch.randn(n)]),
    "softmax": (lambda x: torch.softmax(x * 2, 0), lambda m, n: [torch.randn(m, n)]),
    "variances": (lambda x: torch.var_mean(x, 0), lambda m, n: [torch.randn(m, n) + 5]),
    "positions": (lambda x: (x.argmax(0), x.argmin(0), x.any(0)), lambda m, n: [torch.randint(-5, 5, (m, n)).float()]),
    "integers": (lambda x: (x.sum(0), x.amax(0) * 2), lambda m, n: [torch.randint(-9, 9, (m, n), dtype=torch.int32)]),
    "rows too": (lambda x: (x.sum(0), x.sum(1), x.t().contiguous()), lambda m, n: [torch.randn(m, n)]),
    "dependent": (
        _scaled_columns,
        lambda m, n: [torch.randn(m, n), torch.randint(0, n, (n,)), torch.randn(n)],
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_reductions_of_columns(name: str) -> None:
    function, arguments = COLUMNS[name]
    sizes = ((70, 37), (17, 1), (40, 15), (3, 1030), (1, 200), (300, 64))
    check(function, arguments(300, 64), tolerance=1e-4)
    check(function, *(arguments(*one) for one in sizes), tolerance=1e-4, dynamic=True)


@pytest.mark.parametrize("size", [1 << 20, 999_983])
def test_reductions_to_few_results_are_split(size: int) -> None:
    check(lambda x: ((x * 2).sum(), x.amax(), x.argmax()), [torch.randn(size)], tolerance=1e-3)
    check(lambda x: ((x * 2).sum(1), x.std(1), x.sum(0)), [torch.randn(2, size)], tolerance=1e-3)


TEAMS = """
import torch
import torch.nn.functional as F

def check(function, *arguments):
    found = torch.compile(function)(*(one.to("bp") for one in arguments))
    torch.testing.assert_close(found, function(*arguments), rtol=1e-4, atol=1e-4, check_device=False)

torch.manual_seed(0)
check(lambda x: torch.softmax(x, -1), torch.randn(64, 1000))
check(lambda x: torch.var_mean(x, 1), torch.randn(7, 3000) + 5)
check(lambda x: (x.argmax(-1), x.argmin(0), x.amax(1), (x > 2).any(1)), torch.randint(-5, 5, (64, 100)).float())
check(lambda x, w: F.layer_norm(x, (777,), w).sum(0), torch.randn(33, 777), torch.randn(777))
check(lambda x: (x * x).sum(), torch.randn(1 << 18))
x, y, z = torch.randn(16, 16, 32), torch.randn(16, 32, 16), torch.randn(32, 16, 16)
check(lambda x, y, z: (x + y.permute(2, 0, 1) + z.permute(1, 2, 0)).sum(0), x, y, z)
check(lambda x, y: (x + y.permute(2, 0, 1)).amax(-1), x, y)
check(lambda x: (x.sum(0), x.amax(0), torch.softmax(x, 0)), torch.randn(500, 130))
check(lambda x: ((x * 2).sum(0), x.std(0)), torch.randn(3000, 1030))
compiled = torch.compile(lambda x: torch.softmax(x, -1).amax(0), dynamic=True)
for rows, columns in ((5, 70), (100, 1000), (3, 17)):
    x = torch.randn(rows, columns)
    torch.testing.assert_close(compiled(x.to("bp")).cpu(), torch.softmax(x, -1).amax(0), rtol=1e-4, atol=1e-5)
print("equal")
"""


def test_reductions_by_teams_of_work_items(run_forked: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """On the target of a GPU; the devices of other tests are CPUs, whose work items reduce alone."""
    on_opencl.require_platform()
    settings = {"TORCH_BACKPLANE_DRIVERS": "opencl", "TORCH_BACKPLANE_TARGET": "nvidia-ada"}
    assert run_forked(TEAMS, **settings).stdout.endswith("equal\n")


def test_reductions_of_nan_and_infinity() -> None:
    x = torch.randn(5, 300)
    x[1, 7], x[2, 3], x[3] = float("nan"), float("inf"), -float("inf")
    check(lambda x: (x.amax(-1), x.amin(-1), x.sum(-1), x.argmax(-1), x.argmin(-1)), [x])
    check(lambda x: (torch.softmax(x, -1), x.var(-1), torch.logsumexp(x, -1)), [x], tolerance=1e-4)


def test_atomic_additions() -> None:
    def add(x: torch.Tensor, index: torch.Tensor) -> Any:
        zeros = torch.zeros(20, device=x.device, dtype=x.dtype)
        return zeros.index_put((index,), x, accumulate=True), zeros.scatter_add(0, index, x)

    index = torch.randint(0, 20, (1000,))
    check(add, [torch.randn(1000), index], tolerance=1e-4)
    for dtype in (torch.int64, torch.int32, torch.float64, torch.float16, torch.bfloat16, torch.uint8):
        torch._dynamo.reset()
        check(add, [torch.randint(0, 2, (1000,)).to(dtype), index])


@needs_kernels
def test_calls_are_replayed_as_one_plan() -> None:
    compiled = torch.compile(lambda x, w: torch.softmax(x @ w + 1, -1).sum(0))
    x, w = torch.randn(8, 30, device="bp"), torch.randn(30, 40, device="bp")
    compiled(x, w)
    before = counts()
    for step in range(5):
        compiled(x + step, w)
    after = counts()
    assert after["replays"] - before["replays"] == 5
    assert after["planner_calls"] == before["planner_calls"]
    assert after["unplannable_calls"] == before["unplannable_calls"]


def test_dynamic_shapes_recompile_once() -> None:
    compiled = torch.compile(lambda x: F.layer_norm(x.relu() + 1, (x.shape[-1],)).mean(0) + x.shape[0], dynamic=True)
    torch._dynamo.utils.counters.clear()
    for rows, columns in ((5, 7), (100, 1000), (33, 64), (64, 33), (100, 1000), (5, 7)):
        x = torch.randn(rows, columns)
        expected = F.layer_norm(x.relu() + 1, (columns,)).mean(0) + rows
        torch.testing.assert_close(compiled(x.to("bp")).cpu(), expected, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_numbers_among_the_results_follow_the_shapes() -> None:
    def function(x: torch.Tensor) -> Any:
        return (x * 2).sin(), x.shape[0] * 3, x.shape[1] + 1

    compiled = torch.compile(function, dynamic=True)
    for shape in ((5, 7), (6, 8), (5, 7), (6, 8), (9, 3), (5, 7)):
        x = torch.randn(shape, device="bp", requires_grad=True)
        result, *numbers = compiled(x)
        assert numbers == [shape[0] * 3, shape[1] + 1]
        result.sum().backward()
        expected = 2 * torch.cos(2 * x.detach().cpu())
        torch.testing.assert_close(x.grad.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_data_dependent_shapes() -> None:
    check(lambda x: x[x > 0] * 2 + x[x > 0].shape[0], [torch.randn(20)], [torch.randn(30)], [-torch.ones(3)])
    check(lambda x: x * x.sum().item(), [torch.randn(5)])


def test_mutated_inputs_and_views() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.mul_(2)
        y[1:3].add_(1)
        return x.t(), x + 1, y

    compiled = torch.compile(function)
    for _ in range(3):
        ours, theirs = torch.randn(4, 5), torch.randn(6)
        x, y = ours.to("bp"), theirs.to("bp")
        transposed, _, same = compiled(x, y)
        function(ours, theirs)
        torch.testing.assert_close(x.cpu(), ours)
        torch.testing.assert_close(y.cpu(), theirs)
        assert transposed.data_ptr() == x.data_ptr()
        assert same.data_ptr() == y.data_ptr()


def _views(x: torch.Tensor, y: torch.Tensor) -> Any:
    doubled = x * 2
    first, second = doubled.split(2, 1)
    return x[:, 1:3], x.t(), x.view(torch.int32), first, y.add_(1), second, doubled.flatten()[3:], y[1:], 7


def test_results_that_share_memory() -> None:
    compiled = torch.compile(_views)
    for rows in (4, 6, 4, 6):
        x, y = torch.randn(rows, 4), torch.randn(rows + 1)
        given = on_bp([x, y])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*may not alias.*")
            found, expected = compiled(*given), _views(x, y)
        torch.testing.assert_close(found, expected, check_device=False)
        assert [one.untyped_storage().data_ptr() for one in found[:3]] == [given[0].untyped_storage().data_ptr()] * 3
        assert found[4].data_ptr() == given[1].data_ptr() == found[7].data_ptr() - 4
        assert found[5].data_ptr() - found[3].data_ptr() == 8
        assert found[5].untyped_storage().data_ptr() == found[6].untyped_storage().data_ptr()


def test_linear_layers_in_training_do_not_warn() -> None:
    layer, x = nn.Linear(3, 5).to("bp"), torch.randn(4, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*may not alias.*")
        for _ in range(3):
            torch.compile(layer)(x.to("bp")).sum().backward()
    torch.testing.assert_close(layer.weight.grad.cpu(), 3 * x.sum(0).expand(5, 3))


def test_tensors_on_the_cpu() -> None:
    x = torch.randn(5)
    compiled = torch.compile(lambda x, y, scale: (x.cpu() * y, x * scale + 1))
    for scale in (2.0, 3.0):
        y = torch.randn(5)
        found = compiled(x.to("bp"), y, torch.tensor(scale))
        torch.testing.assert_close(found[0], x * y)
        torch.testing.assert_close(found[1].cpu(), x * scale + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_scalars_on_the_cpu(dtype: torch.dtype) -> None:
    compiled = torch.compile(_combine_with_scalar)
    for number, dim in ((1.37, 0), (2.6, 1), (0.0, 0)):
        x, scale = torch.randn(40, 70), torch.tensor(number).to(dtype)
        found = compiled(x.to("bp"), scale, dim)
        for one, expected in zip(found, _combine_with_scalar(x, scale, dim), strict=True):
            assert one.dtype == expected.dtype
            torch.testing.assert_close(one.cpu(), expected, rtol=1e-4, atol=1e-4)


def _combine_with_scalar(x: torch.Tensor, scale: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """Elementwise, in a reduction along rows or columns, after it, and in a conditional."""
    return [x + scale, scale * x, (x * scale + 1).sum(dim), x.sum(dim) * scale, torch.cat([x * scale, x + 2]).sum(dim)]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_dtypes_without_kernels(dtype: torch.dtype) -> None:
    def convert(x: torch.Tensor) -> list[torch.Tensor]:
        return [(x * 2).to(dtype), x.to(dtype).float().sum(1) + 1, x.to(dtype).t()]

    compiled = torch.compile(convert)
    for shape in ((4, 5), (33, 70)):
        x = torch.randn(shape)
        for found, expected in zip(compiled(x.to("bp")), convert(x), strict=True):
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found.cpu().float(), expected.float())


def test_rounding_of_numbers() -> None:
    def add(x: torch.Tensor, number: float) -> list[torch.Tensor]:
        return [x + round(number, -1), x + round(number, 0), x * round(number, 2)]

    compiled = torch.compile(add, dynamic=True)
    for number in (123.456, -17.251, 0.005):
        x = torch.randn(5)
        for found, expected in zip(compiled(x.to("bp"), number), add(x, number), strict=True):
            torch.testing.assert_close(found.cpu(), expected)


def test_asserts_of_nan_and_infinity() -> None:
    x = torch.rand(6, 50)
    with inductor_config.patch({"nan_asserts": True}):
        compiled = torch.compile(lambda x: torch.log(x).sum(1))
        for k in range(4):
            compiled((x + 0.5 + k).to("bp"))
            with pytest.raises(AssertionError):
                compiled((x - 2).to("bp"))
            with pytest.raises(AssertionError):
                compiled((x * 0).to("bp"))


def test_settings_for_triton_do_not_matter() -> None:
    tiling = {"triton.tile_reductions": True, "triton.prefer_nd_tiling": True}
    for settings in (tiling, tiling | {"triton.max_tiles": 3}, {"triton.descriptive_names": False}):
        for shape in ((1, 2, 4, 8), (3, 5, 40, 30)):
            x = torch.randn(shape)
            torch._dynamo.reset()
            with inductor_config.patch(settings):
                found = torch.compile(lambda x: torch.var_mean(x * 2, [1, 3]))(x.to("bp"))
            for one, expected in zip(found, torch.var_mean(x * 2, [1, 3]), strict=True):
                torch.testing.assert_close(one.cpu(), expected)


@needs_kernels
def test_random_numbers_without_implicit_fallbacks() -> None:
    def draw(x: torch.Tensor) -> list[torch.Tensor]:
        return [F.dropout(x, 0.5), torch.rand_like(x), torch.randn(7, device="bp", dtype=torch.float64)]

    x = torch.ones(100, device="bp")
    with inductor_config.patch({"implicit_fallbacks": False}):
        compiled = torch.compile(draw)
        for seed in (1, 2):
            torch.manual_seed(seed)
            found = compiled(x)
            torch.manual_seed(seed)
            torch.testing.assert_close(found, draw(x))


CACHED = """
import torch
from torch._dynamo.utils import counters

x = torch.randn(50, 300)
found = torch.compile(lambda x: torch.softmax(x * 2, -1).sum(0))(x.to("bp"))
torch.testing.assert_close(found.cpu(), torch.softmax(x * 2, -1).sum(0), rtol=1e-4, atol=1e-5)
print(counters["inductor"]["fxgraph_cache_hit"] > 0)
"""


def test_graphs_are_kept_on_disk(
    tmp_path: Path, run_forked: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Found again by another process; compiled again for another target, and if a file is damaged."""
    on_opencl.require_platform()

    def is_found(**settings: str) -> bool:
        ran = run_forked(CACHED, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TORCH_BACKPLANE_DRIVERS="opencl", **settings)
        return ran.stdout == "True\n"

    assert not is_found()
    assert is_found()
    assert not is_found(TORCH_BACKPLANE_TARGET="nvidia-ada")
    for file in (tmp_path / "fxgraph").rglob("*"):
        if file.is_file():
            file.write_bytes(b"damaged")
    assert not is_found()


def test_two_devices() -> None:
    compiled = torch.compile(lambda x: x * 2 + 1)
    crossing = torch.compile(lambda x: (x * 2).to("bp:1") + 1)
    for index in (0, 1, 0, 1):
        x = torch.randn(5, device=f"bp:{index}")
        found = compiled(x)
        assert found.device == x.device
        torch.testing.assert_close(found.cpu(), x.cpu() * 2 + 1)
        assert crossing(x).device.index == 1
        torch.testing.assert_close(crossing(x).cpu(), x.cpu() * 2 + 1)


def test_more_buffers_than_a_kernel_takes() -> None:
    check(lambda *tensors: sum(tensors), [torch.randn(7) for _ in range(150)], tolerance=1e-4)


def test_an_index_out_of_range_is_an_error() -> None:
    compiled = torch.compile(lambda x, index: x[index] + 1)
    x = torch.randn(10)
    # Inductor's C++ kernels raise another type of error than PyTorch.
    kind, text = (IndexError, "for dimension with size 10") if HAS_KERNELS else (RuntimeError, "index out of bounds")
    for bad in (10, -11):
        good = compiled(x.to("bp"), torch.tensor([1, -1], device="bp"))
        torch.testing.assert_close(good.cpu(), x[[1, -1]] + 1)
        with pytest.raises(kind, match=text):
            compiled(x.to("bp"), torch.tensor([1, bad], device="bp")).cpu()


def test_dropout_follows_the_seed() -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.25))
    x = torch.ones(100_000, device="bp")
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    again = compiled(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert abs((first != 0).float().mean().item() - 0.75) < 0.01


def test_random_tensors() -> None:
    size = 100_000

    def draw() -> Any:
        shape = {"size": (size,), "device": "bp"}
        return torch.rand(**shape), torch.randn(**shape), torch.randint(3, 9, **shape)

    uniform, normal, integers = torch.compile(draw)()
    assert abs(uniform.mean().item() - 0.5) < 0.01
    assert uniform.min().item() >= 0
    assert uniform.max().item() < 1
    assert abs(normal.mean().item()) < 0.02
    assert abs(normal.std().item() - 1) < 0.02
    assert torch.bincount(integers.cpu(), minlength=9)[3:].min() > size / 6 * 0.95


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes(mode: str) -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    ours = copy.deepcopy(model).to("bp")
    compiled = torch.compile(ours, mode=mode)
    results = []
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(5, 1, 10)
        results.append((compiled(x.to("bp")), model(x)))
        for found, expected in results:  # no later call overwrites earlier results, as CUDA graphs would
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, check_device=False)
        results[-1][0].square().sum().backward()
        results[-1][1].square().sum().backward()
    for one, other in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4, check_device=False)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_gradients_in_place_of_saved_tensors(mode: str) -> None:
    """The backward graph reuses the memory of its arguments, also if it consists of parts."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT * 0.25, -1) @ v

    given = [torch.randn(2, 12, 8, requires_grad=True) for _ in range(3)]
    ours = [one.detach().to("bp").requires_grad_() for one in given]
    torch.compile(attend, mode=mode)(*ours).square().sum().backward()
    attend(*given).square().sum().backward()
    for one, other in zip(ours, given, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4, check_device=False)


def test_operators_that_cuda_graphs_exclude() -> None:
    """reduce-overhead divides a graph into parts at operators with data-dependent shapes, and at copies to the CPU."""

    def function(x: torch.Tensor) -> Any:
        y = (x * 2).sin()
        positive = y[y > 0]
        total = y.sum().cpu()
        return positive.cos() + 1, (y @ y + total.to(x.device)).relu(), total

    for device in ("bp:0", "bp:1"):
        x = torch.randn(32, 32)
        compiled = torch.compile(function, mode="reduce-overhead")
        for _ in range(2):
            found = compiled(x.to(device))
            assert [str(one.device) for one in found] == [device, device, "cpu"]
            torch.testing.assert_close(found, function(x), rtol=1e-3, atol=1e-3, check_device=False)


def test_results_may_share_memory_with_arguments() -> None:
    """Graphs keep their inputs for the backward pass. PyTorch refuses custom operators that do so undeclared, in CI."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(3, 4)
    with torch._functorch.config.patch(error_on_custom_op_aliasing=True):
        compiled = torch.compile(copy.deepcopy(model).to("bp"))
        for _ in range(2):
            found = compiled(x.to("bp"))
            found.sum().backward()
            torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5, check_device=False)


def test_autocast() -> None:
    layer = nn.Linear(10, 10).to("bp")
    compiled = torch.compile(lambda x: layer(x).relu())
    x = torch.randn(10, 10, device="bp")
    with torch.autocast("bp", dtype=torch.bfloat16):
        found, expected = compiled(x), layer(x).relu()
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@needs_kernels
def test_a_compiled_graph_in_a_captured_graph() -> None:
    compiled = torch.compile(lambda x: torch.softmax(x * 2, -1))
    x = torch.randn(10, 10, device="bp")
    compiled(x)
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        y = compiled(x)
    for _ in range(2):
        x.copy_(torch.randn(10, 10))
        graph.replay()
        torch.testing.assert_close(y.cpu(), torch.softmax(x.cpu() * 2, -1))


def test_custom_operators() -> None:
    @torch.library.custom_op("backplane_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    check(lambda x: twice(x + 1) * 3, [torch.randn(5)], [torch.randn(7)])


def test_threads() -> None:
    compiled = torch.compile(lambda x: torch.softmax(x * 2, -1) + x.sum())
    given = [torch.randn(10 + k % 3, 10) for k in range(60)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: compiled(x.to("bp")).cpu(), given))
    for one, x in zip(found, given, strict=True):
        torch.testing.assert_close(one, torch.softmax(x * 2, -1) + x.sum(), rtol=1e-4, atol=1e-4)


def test_graphs_that_host_devices_cannot_compile_run_with_a_warning() -> None:
    compiled = torch.compile(lambda x, y: (x.cpu() + y, x * 2))
    x, y = torch.randn(5, device="bp"), torch.randn(5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = compiled(x, y)
    torch.testing.assert_close(found[0], x.cpu() + y)
    texts = [str(one.message) for one in caught if "without compiling it" in str(one.message)]
    assert len(texts) == (0 if HAS_KERNELS else 1)


def test_attention() -> None:
    for is_causal in (False, True):
        query = torch.randn(2, 4, 16, 8, requires_grad=True)
        ours = query.detach().to("bp").requires_grad_()

        def attend(query: torch.Tensor, is_causal: bool = is_causal) -> torch.Tensor:
            return F.scaled_dot_product_attention(query, query * 2, query, is_causal=is_causal) * 2

        found, expected = torch.compile(attend)(ours), attend(query)
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.grad.cpu(), query.grad, rtol=1e-3, atol=1e-4)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        (4, 3, 16, 16),
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), (3, 9, 16)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 5)), (6, 12)),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_cpu(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    ours = copy.deepcopy(model).to("bp")
    compiled = torch.compile(ours)
    pairs = [(model, model), (ours, compiled)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one, _ in pairs]
    for step in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        for (one, forward), optimizer in zip(pairs, optimizers, strict=True):
            optimizer.zero_grad()
            forward(x.to(next(one.parameters()).device)).pow(2).mean().backward()
            optimizer.step()
    for expected, found in zip(model.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_optimizers_equal_eager_ones(name: str) -> None:
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).to("bp")
        optimizer = OPTIMIZERS[name](model.parameters())
        step = torch.compile(optimizer.step) if is_compiled else optimizer.step
        for k in range(4):
            optimizer.zero_grad()
            model(torch.randn(5, 8, generator=torch.Generator().manual_seed(k)).to("bp")).pow(2).sum().backward()
            step()
        found.append([one.detach().cpu() for one in model.parameters()])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
