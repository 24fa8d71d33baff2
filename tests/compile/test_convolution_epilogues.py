"""Convolutions under max-autotune on GPUs: elementwise operations on results, in the same kernel or a separate one."""

from __future__ import annotations

import copy
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_opencl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_backplane import drivers
from torch_backplane.planning.launch import dialect_of

if not drivers.device(0).properties.dialect:
    pytest.skip("the devices have no dialect", allow_module_level=True)

import fused_templates
from fused_templates import CANDIDATES, kernels

from torch_backplane.compile import template_kernel
from torch_backplane.tuning.choosing import forcing

Case = tuple[Callable[..., Any], list[tuple[int, ...]]]

is_gpu = dialect_of(0).target.simt
needs_gpu = pytest.mark.skipif(not is_gpu, reason="on CPUs, no operators are fused into convolutions")


def normalized(x: Any, w: Any, mean: Any, variance: Any, scale: Any, shift: Any, r: Any) -> Any:
    """A batch norm as in inference, a residual and an activation."""
    h = F.conv2d(x, w, padding=1)
    return F.relu(F.batch_norm(h, mean, variance.abs() + 0.5, scale, shift) + r)


def several_results(x: Any, w: Any, r: Any) -> Any:
    h = F.conv2d(x, w)
    return h.sigmoid(), h > 0, (h * r).to(torch.float64)


def kept_itself(x: Any, w: Any, b: Any) -> Any:
    h = F.conv2d(x, w, b, stride=2)
    return h, h.relu()


def kept_for_another(x: Any, w: Any, v: Any) -> Any:
    """The second convolution reads the results of the first one, which are no results of the graph."""
    h = F.conv2d(x, w, padding=1)
    return F.conv2d(h, v), h.tanh()


def summed(x: Any, w: Any, v: Any) -> Any:
    return F.silu(F.conv2d(x, w, padding=1) + F.conv2d(x, v))


CASES: dict[str, Case] = {
    "bias and activation": (
        lambda x, w, b: F.relu(F.conv2d(x, w, b, padding=1)), [(2, 6, 9, 11), (18, 6, 3, 3), (18,)]
    ),
    "normalized": (
        normalized, [(2, 6, 9, 11), (18, 6, 3, 3), (18,), (18,), (18,), (18,), (2, 18, 9, 11)]
    ),
    "scales of channels": (
        lambda x, w, s, t: F.conv2d(x, w) * s + t, [(3, 4, 12, 8), (70, 4, 3, 2), (70, 1, 1), (3, 70, 1, 1)]
    ),
    "broadcast over places": (lambda x, w, r: F.conv2d(x, w) + r, [(3, 4, 8, 8), (9, 4, 3, 3), (6, 6)]),
    "one dimension": (
        lambda x, w, b, r: F.gelu(F.conv1d(x, w, b, 2, 3)) * r, [(2, 5, 40), (20, 5, 7), (20,), (2, 20, 20)]
    ),
    "three dimensions": (
        lambda x, w, b: F.conv3d(x, w, b, (1, 2, 1), (1, 0, 1), (2, 1, 1)).tanh(),
        [(1, 3, 6, 5, 7), (8, 3, 2, 3, 2), (8,)],
    ),
    "stride, padding, dilation": (
        lambda x, w: F.conv2d(x, w, None, (2, 3), (2, 0), (2, 3)).exp(), [(2, 4, 13, 17), (70, 4, 3, 2)]
    ),
    "groups": (
        lambda x, w, b: F.silu(F.conv2d(x, w, b, (1, 2), (0, 1), 1, 3)), [(3, 12, 8, 6), (15, 4, 2, 3), (15,)]
    ),
    "depthwise": (lambda x, w, b: F.relu6(F.conv2d(x, w, b, 1, 1, 1, 6)), [(2, 6, 10, 9), (12, 1, 3, 3), (12,)]),
    "window of one": (lambda x, w, b: F.conv2d(x, w, b).relu(), [(2, 24, 5, 7), (30, 24, 1, 1), (30,)]),
    "long sums of few results": (
        lambda x, w, b, r: F.conv2d(x, w, b, padding=1).relu() * r, [(1, 200, 3, 3), (9, 200, 3, 3), (9,), (9, 1, 1)]
    ),
    "several results": (several_results, [(2, 6, 9, 7), (10, 6, 2, 2), (2, 10, 8, 6)]),
    "kept itself": (kept_itself, [(2, 6, 9, 7), (10, 6, 3, 3), (10,)]),
    "kept for another": (kept_for_another, [(2, 6, 9, 7), (10, 6, 3, 3), (5, 10, 2, 2)]),
    "sum of two": (summed, [(2, 6, 9, 7), (10, 6, 3, 3), (10, 6, 1, 1)]),
    "one image": (lambda x, w: F.conv2d(x, w).abs() + 1, [(6, 9, 7), (10, 6, 3, 3)]),
    "flattened": (lambda x, w, r: F.conv2d(x, w).flatten(2) * r, [(2, 6, 9, 7), (10, 6, 3, 3), (35,)]),
    "no images": (lambda x, w: F.conv2d(x, w).relu() + 1, [(0, 6, 9, 7), (10, 6, 3, 3)]),
    "no channels": (lambda x, w: F.conv2d(x, w).relu() + 1, [(2, 0, 9, 7), (10, 0, 3, 3)]),
    "not a number": (lambda x, w: (F.conv2d(x, w) / 0).isnan(), [(2, 6, 9, 7), (10, 6, 3, 3)]),
}  # fmt: skip
TILED = "bp_convolution2_epilogue"
IN_PARTS = ["bp_convolution2_parts", "bp_convolution_sum"]
# The kernels of those that become a convolution's kernel.
FUSED_KERNELS = {
    "bias and activation": [TILED],
    "normalized": [TILED],
    "scales of channels": [TILED],
    "broadcast over places": [TILED],
    "one dimension": ["bp_convolution1_epilogue"],
    "three dimensions": ["bp_convolution3_epilogue"],
    "stride, padding, dilation": [TILED],
    "groups": [TILED],
    "depthwise": ["bp_convolution2_alone_epilogue"],
    "window of one": [TILED],
    "long sums of few results": IN_PARTS,
    "several results": [TILED],
    "kept itself": [TILED],
    "kept for another": [TILED, "bp_convolution2"],
    "not a number": [TILED],
}
# Those with two spatial dimensions whose results are channels-last if the images are.
CHANNELS_LAST = (
    "bias and activation", "normalized", "scales of channels", "stride, padding, dilation", "groups", "depthwise",
    "long sums of few results", "several results", "kept itself", "window of one",
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def operands(name: str, dtype: torch.dtype = torch.float32, is_last: bool = False) -> list[torch.Tensor]:
    """The operands of a case; those with four dimensions are channels-last if `is_last`."""
    torch.manual_seed(0)
    made = [torch.randn(shape).to(dtype) for shape in CASES[name][1]]
    return [one.to(memory_format=torch.channels_last) if is_last and one.dim() == 4 else one for one in made]


def check(name: str, candidate: str, dtype: torch.dtype = torch.float32, is_last: bool = False) -> list[str]:
    """Compares a case with the CPU, and returns its kernels."""
    return fused_templates.check(CASES[name][0], operands(name, dtype, is_last), candidate, dtype)


@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_fused(name: str) -> None:
    launched = check(name, template_kernel.FUSED)
    if name in FUSED_KERNELS:
        assert launched == FUSED_KERNELS[name]


@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_separate(name: str) -> None:
    assert not any("epilogue" in one for one in check(name, template_kernel.SEPARATE))


@needs_gpu
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("name", CHANNELS_LAST)
def test_channels_last(name: str, candidate: str) -> None:
    """The kernel reads contiguous copies of the operands, and stores results in channels-last order."""
    launched = [one for one in check(name, candidate, is_last=True) if one != "bp_copy"]
    if candidate == template_kernel.FUSED and name != "window of one":  # that is a product
        assert launched == FUSED_KERNELS[name]


@needs_gpu
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["normalized", "several results", "depthwise", "kept itself"])
def test_half_precision(name: str, dtype: torch.dtype, candidate: str) -> None:
    check(name, candidate, dtype)


@needs_gpu
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("name", ["residual", "smaller results"])
def test_dynamic_shapes(name: str, candidate: str) -> None:
    """A compiled function with other numbers of images, also none, and other sizes of images."""

    def with_residual(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> Any:
        return F.silu(F.conv2d(x, w, b, padding=1)) + r * x.shape[0]

    def smaller(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> Any:
        return F.silu(F.conv2d(x, w, b) * s) + x.shape[0]

    function = with_residual if name == "residual" else smaller
    compiled = torch.compile(function, mode="max-autotune", dynamic=True)
    w, b, s = torch.randn(20, 6, 3, 3), torch.randn(20), torch.randn(20, 1, 1)
    with forcing(template_kernel.FAMILY, candidate):
        for batch, height, width in ((2, 9, 11), (5, 9, 11), (3, 20, 6), (0, 9, 11), (2, 9, 11)):
            last = torch.randn(batch, 20, height, width) if name == "residual" else s
            given = [torch.randn(batch, 6, height, width), w, b, last]
            on_bp = [one.to("bp") for one in given]
            torch.testing.assert_close(compiled(*on_bp).cpu(), function(*given), rtol=1e-4, atol=1e-4)
            is_fused = kernels(compiled, *on_bp) == [TILED]
            assert is_fused == (candidate == template_kernel.FUSED and batch > 0)


@needs_gpu
def test_the_first_call_measures(caplog: pytest.LogCaptureFixture) -> None:
    """Both candidates; the log names the one that is used from then on, also for other sizes."""
    compiled = torch.compile(lambda x, w, s: F.conv2d(x, w).relu() * s, mode="max-autotune", dynamic=True)
    w, scale = torch.randn(20, 6, 3, 3, device="bp"), torch.tensor(2.0, device="bp")
    with caplog.at_level(logging.INFO, "torch._inductor.bp.__autotuning"):
        for batch in (4, 2, 4):
            x = torch.randn(batch, 6, 9, 11, device="bp")
            torch.testing.assert_close(compiled(x, w, scale), F.conv2d(x, w).relu() * 2, rtol=1e-4, atol=1e-4)
    (text,) = (one.getMessage() for one in caplog.records if "bp_fused_" in one.getMessage())
    is_fused = kernels(compiled, torch.randn(4, 6, 9, 11, device="bp"), w, scale) == [TILED]
    assert text.endswith("one kernel" if is_fused else "the convolution as in eager PyTorch, then a kernel")


@needs_gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["bias and activation", "kept itself", "window of one", "long sums of few results"])
def test_trials(name: str, recwarn: pytest.WarningsRecorder) -> None:
    """Trials run both candidates, and leave neither out."""
    compiled = torch.compile(CASES[name][0], mode="max-autotune")
    given = operands(name)
    found, expected = compiled(*(one.to("bp") for one in given)), CASES[name][0](*given)
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    for one, other in pairs:
        torch.testing.assert_close(one.cpu(), other, rtol=1e-3, atol=1e-3)
    assert not [str(one.message) for one in recwarn if "left out" in str(one.message)]


def test_default_mode_fuses_nothing() -> None:
    given = [one.to("bp") for one in operands("bias and activation")]
    compiled = torch.compile(CASES["bias and activation"][0])
    _, (code,) = torch._inductor.utils.run_and_get_code(compiled, *given)
    assert "extern_kernels.convolution(" in code
    assert "TemplateKernel" not in code


@pytest.mark.skipif(is_gpu, reason="on GPUs, operators are fused into convolutions")
def test_cpus_fuse_nothing() -> None:
    given = [one.to("bp") for one in operands("bias and activation")]
    compiled = torch.compile(CASES["bias and activation"][0], mode="max-autotune")
    found, (code,) = torch._inductor.utils.run_and_get_code(compiled, *given)
    assert "TemplateKernel" not in code
    expected = CASES["bias and activation"][0](*operands("bias and activation"))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_transposed_convolutions_stay_outside() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, w, stride=2).relu()

    x, w = torch.randn(2, 6, 5, 7), torch.randn(6, 8, 3, 3)
    compiled = torch.compile(function, mode="max-autotune")
    found, (code,) = torch._inductor.utils.run_and_get_code(compiled, x.to("bp"), w.to("bp"))
    assert "TemplateKernel" not in code
    torch.testing.assert_close(found.cpu(), function(x, w), rtol=1e-4, atol=1e-4)


@needs_gpu
def test_layouts_are_kept() -> None:
    """Inductor would compute these convolutions in channels-last order, between copies."""
    model = nn.Sequential(nn.Conv2d(3, 72, 3, padding=1), nn.ReLU(), nn.Conv2d(72, 80, 3)).to("bp")
    with torch.no_grad():
        launched = kernels(torch.compile(model), torch.randn(2, 3, 16, 16, device="bp"))
    assert not [one for one in launched if "copy" in one]
    assert len([one for one in launched if one.startswith("bp_fused_")]) == 2


def block() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.GELU(), nn.Conv2d(12, 12, 3, groups=4), nn.Tanh(), nn.Conv2d(12, 5, 2, 2)
    )


@needs_gpu
@pytest.mark.parametrize("candidate", CANDIDATES)
def test_training(candidate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = template_kernel.FAMILY
    monkeypatch.setattr(template_kernel.tuning, "forced", lambda one: candidate if one == family else None)
    model, x = block(), torch.randn(2, 3, 9, 8)
    ours = copy.deepcopy(model).to("bp")
    torch.compile(ours, mode="max-autotune")(x.to("bp")).square().sum().backward()
    model(x).square().sum().backward()
    for one, other in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3, check_device=False)


@needs_gpu
def test_in_a_graph() -> None:
    """The first call can be captured: nothing is measured then."""
    compiled = torch.compile(lambda x, w: F.conv2d(x, w).relu() + 1, mode="max-autotune")
    x, w = torch.randn(2, 6, 9, 7, device="bp"), torch.randn(10, 6, 3, 3, device="bp")
    compiled(x, w)
    torch._dynamo.reset()
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        result = compiled(x, w)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(result, F.conv2d(x, w).relu() + 1, rtol=1e-4, atol=1e-4)


GPU = """
import sys
sys.path[:0] = PATHS
import torch
import test_convolution_epilogues as tests
for arguments in CALLS:
    torch._dynamo.reset()
    print(*tests.check(arguments[0], "fused", *arguments[1:]))
"""


def on_modelled_gpu(run_forked: Callable[..., subprocess.CompletedProcess[str]], calls: str) -> list[str]:
    """Runs `check` on the target of a GPU in OpenCL C, for each of the calls. Returns their kernels."""
    on_opencl.require_platform()
    folder = Path(__file__).parent
    program = GPU.replace("PATHS", repr([str(folder), str(folder.parent), str(folder.parent / "support")]))
    ran = run_forked(
        program.replace("CALLS", calls), TORCH_BACKPLANE_DRIVERS="opencl", TORCH_BACKPLANE_TARGET="nvidia-ada"
    )
    return ran.stdout.splitlines()


def test_on_the_target_of_a_gpu(run_forked: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    names = ("normalized", "one dimension", "groups", "depthwise", "long sums of few results", "kept itself")
    launched = on_modelled_gpu(run_forked, str([(name,) for name in names]))
    assert launched == [" ".join(FUSED_KERNELS[name]) for name in names]


def test_layouts_and_dtypes_on_the_target_of_a_gpu(
    run_forked: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    calls = [
        ("normalized", torch.float32, True),
        ("depthwise", torch.float32, True),
        ("long sums of few results", torch.float32, True),
        ("normalized", torch.float16),
        ("several results", torch.bfloat16, True),
    ]
    copies = "bp_copy bp_copy"  # of the image and of the weight
    assert on_modelled_gpu(run_forked, str(calls)) == [
        f"{copies} {TILED}",
        "bp_copy bp_convolution2_alone_epilogue",
        f"{copies} bp_convolution2_parts bp_convolution_sum",
        TILED,
        f"{copies} {TILED}",
    ]
