"""torch.backends.bp: every switch takes effect, also on calls that were planned before."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from agreement import DEVICE, had, peak_memory
from targets import host_first, launch, target
from test_host_work import needs_sight
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend

from torch_backplane import _C, drivers, plans, preferences
from torch_backplane.drivers.libraries import routines_of
from torch_backplane.operators import linear_algebra
from torch_backplane.planning import Candidate, Candidates, costs


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Restores the defaults. A decorator, because fixtures do not run in the worker process of the tests."""
    try:
        yield
    finally:
        for family in preferences.LIBRARIES:
            preferences.prefer(family, preferences.DEFAULT)
        preferences.set_workspace(preferences.NO_LIMIT)
        for dtype in (torch.float16, torch.bfloat16):
            preferences.divide(dtype, preferences.Divided())
        for family in ("products", "convolutions"):
            preferences.set_float32_precision(family, "none")
        preferences.allow_half_sums(False)


def runs_on_host(function: Callable[..., Any], *arguments: Any) -> bool:
    plan_text = plans.explain(function, *arguments)
    assert ("on the host" in plan_text) != ("launch bp_" in plan_text), plan_text
    return "on the host" in plan_text


@_as_it_was()
def test_module_has_the_functions_of_backend_modules() -> None:
    import torch.backends.bp as module

    assert module is torch.backends.bp  # type: ignore[attr-defined]
    assert module.is_built()
    assert module.is_available()
    assert module.version() == "0.1.0"
    assert all(hasattr(module, name) for name in module.__all__)


@_as_it_was()
@host_first()
def test_change_of_blas_library_applies_to_planned_products() -> None:
    needs_sight()
    blas = torch.backends.bp.preferred_blas_library  # type: ignore[attr-defined]
    a, b = torch.randn(70, 50), torch.randn(50, 90)
    given = [a.to(DEVICE), b.to(DEVICE)]
    assert blas() == "default"
    for library, on_host in (("default", True), ("generated", False), ("host", True), ("generated", False)):
        assert blas(library) == library
        for _ in range(3):
            torch.testing.assert_close(torch.mm(*given).cpu(), a @ b)
        assert runs_on_host(torch.mm, *given) == on_host
        with pytest.raises(ValueError, match="no library 'cublas': accepted are default, host, driver, generated"):
            blas("cublas")
        assert blas() == library


@_as_it_was()
def test_calls_unsupported_by_the_preferred_library_use_the_next() -> None:
    torch.backends.bp.preferred_blas_library("host")  # type: ignore[attr-defined]
    integers = [torch.randint(-9, 9, (4, 4)) for _ in range(2)]
    ours = torch.mm(*(one.to(DEVICE) for one in integers))
    assert torch.equal(ours.cpu(), torch.mm(*integers))
    assert linear_algebra.products.choose(ours) == "generated"
    with target("gpu"):
        a = torch.randn(5, 5, device=DEVICE)
        torch.testing.assert_close((a @ a).cpu(), a.cpu() @ a.cpu(), atol=1e-5, rtol=1e-5)


def _convolved() -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    return torch.nn.functional.conv2d, (torch.randn(1, 2, 6, 6), torch.randn(3, 2, 3, 3))


def _recurrent() -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    x, h = torch.randn(3, 2, 5), torch.randn(1, 2, 4)
    weights = [torch.randn(12, 5), torch.randn(12, 4)]

    def run(x: torch.Tensor, h: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.gru(x, h, weights, False, 1, 0.0, False, False, False)[0]

    return run, (x, h, *weights)


@_as_it_was()
@host_first()
def test_is_acceptable() -> None:
    acceptable = torch.backends.bp.is_acceptable  # type: ignore[attr-defined]
    x = torch.randn(2, 3, 4, 4, device=DEVICE)
    switches = torch.backends.bp.conv  # type: ignore[attr-defined]
    plan_text = plans.explain(torch.nn.functional.conv2d, x, torch.randn(3, 3, 1, 1, device=DEVICE))
    assert acceptable(x) == ("launch bp_" not in plan_text)  # a library computes it
    assert not acceptable(x.long())
    assert not acceptable(x.cpu())
    with switches.flags(enabled=False):
        assert not acceptable(x)


@_as_it_was()
@pytest.mark.fault("short loops")
def test_workspace_size_bounds_partial_sums() -> None:
    size = torch.backends.bp.blas_workspace_size  # type: ignore[attr-defined]
    a, b = torch.randn(40, 8000), torch.randn(8000, 30)
    grad, x, w = torch.randn(8, 4, 38, 38), torch.randn(8, 3, 40, 40), torch.randn(4, 3, 3, 3)

    def taken(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> int:
        """Returns the bytes allocated in addition to operands and result."""
        on_device = [one.to(DEVICE) for one in given]
        torch.testing.assert_close(function(*on_device).cpu(), function(*given), atol=1e-3, rtol=1e-4)
        return peak_memory(function, *on_device) - function(*on_device).nbytes

    def weight_gradient(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        settings = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
        return torch.ops.aten.convolution_backward(grad, x, w, *settings)[1]

    generated = [preferences.preferring(family, "generated") for family in ("products", "convolutions")]
    with target("gpu", compute_units=40), generated[0], generated[1]:
        for function, given in ((torch.mm, (a, b)), (weight_gradient, (grad, x, w))):
            free = taken(function, *given)
            assert free > 40_000
            for limit in (free // 3, 0, free // 2, 2 * free):
                assert size(limit) == size() == limit
                rounded = 512 * 4  # the allocator rounds up the size of each block
                found = taken(function, *given)
                assert found <= min(limit, free) + rounded, (found, limit, free)
                assert (found > rounded) == (limit > 0), (found, limit, free)
            size(sys.maxsize)
            assert taken(function, *given) == free
    for bad, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError), ("8MiB", TypeError)):
        with pytest.raises(error, match="the workspace size must"):
            size(bad)
    assert size() == sys.maxsize


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@_as_it_was()
@preferences.preferring("products", "generated")
def test_reduced_precision_reduction_of_partial_sums(dtype: torch.dtype) -> None:
    switches, name = torch.backends.bp.matmul, f"allow_{'fp16' if dtype == torch.float16 else 'bf16'}"  # type: ignore[attr-defined]
    name += "_reduced_precision_reduction"
    a, b, c = torch.randn(40, 9000), torch.randn(9000, 30), torch.randn(40, 30)
    exact = torch.addmm(c.to(dtype).double(), a.to(dtype).double(), b.to(dtype).double())

    def multiply(transposed: bool) -> tuple[int, float]:
        """Returns the bytes allocated besides operands and result, and the error relative to the largest result."""
        one, other, added = (tensor.to(dtype).to(DEVICE) for tensor in (a, b, c))
        given = (added.mT, other.mT, one.mT) if transposed else (added, one, other)
        found = torch.addmm(*given)
        taken = peak_memory(torch.addmm, *given) - found.nbytes
        found = found.mT if transposed else found
        return taken, float((found.cpu() - exact).abs().max() / exact.abs().max())

    epsilon = torch.finfo(dtype).eps
    for units in (40, 4000):  # with 4,000, chunks of partial sums are added first
        with target("gpu", compute_units=units):
            for transposed in (False, True):
                setattr(switches, name, False)
                assert not getattr(switches, name)
                taken, error = multiply(transposed)
                assert taken > 100_000
                assert error <= epsilon
                for given in (True, (True, True), [True]):
                    setattr(switches, name, given)
                    assert getattr(switches, name)
                    assert getattr(switches, f"{name}_split_k")
                    rounded, error = multiply(transposed)
                    assert rounded <= taken // 4 + 4096
                    assert error <= 8 * epsilon
                setattr(switches, name, (False, False))
                assert not getattr(switches, f"{name}_split_k")
                whole, error = multiply(transposed)
                assert whole <= 1024
                assert error <= epsilon
    for bad in (1, "True", (), (True, True, True), (True, 0), None):
        with pytest.raises(TypeError, match=f"{name} must be a bool, or"):
            setattr(switches, name, bad)
    with pytest.raises(AttributeError):
        switches.allow_fp64 = True


@_as_it_was()
def test_switches_for_precision_below_float32() -> None:
    bp, of_pytorch = torch.backends.bp, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    for switches, by_default in ((bp.matmul, "ieee"), (bp.conv, "tf32")):
        assert switches.fp32_precision == by_default
        for value, allowed in (("tf32", True), ("ieee", False), ("none", by_default == "tf32")):
            switches.fp32_precision = value
            assert switches.allow_tf32 == allowed
            assert switches.fp32_precision == ("tf32" if allowed else "ieee")
        for allowed in (True, False, True):
            switches.allow_tf32 = allowed
            assert switches.fp32_precision == ("tf32" if allowed else "ieee")
        switches.fp32_precision = "none"
    with bp.conv.flags(allow_tf32=False):
        assert not bp.conv.allow_tf32
        with bp.conv.flags():
            assert not bp.conv.allow_tf32
    of_pytorch.fp32_precision = "ieee"
    try:
        assert not bp.conv.allow_tf32
        assert not bp.matmul.allow_fp16_accumulation
    finally:
        of_pytorch.fp32_precision = "tf32"
    assert bp.conv.allow_tf32
    bp.matmul.allow_fp16_accumulation = True
    assert bp.matmul.allow_fp16_accumulation
    bp.matmul.allow_fp16_accumulation = False
    for switches, name, value, error in (
        (bp.matmul, "fp32_precision", "bf16", ValueError),
        (bp.conv, "fp32_precision", 1, ValueError),
        (bp.matmul, "allow_tf32", 1, TypeError),
        (bp.conv, "allow_tf32", None, TypeError),
        (bp.matmul, "allow_fp16_accumulation", None, TypeError),
    ):
        with pytest.raises(error, match=f"{name} must be"):
            setattr(switches, name, value)


@_as_it_was()
def test_preferred_linalg_library() -> None:
    preferred = torch.backends.bp.preferred_linalg_library  # type: ignore[attr-defined]
    assert preferred() == "default"
    assert preferred("host") == "host"
    for bad in ("magma", "cusolver", "generated", ""):
        with pytest.raises(ValueError, match="accepted are default, driver, host"):
            preferred(bad)
    assert preferred() == "host"
    missing = pytest.warns(UserWarning, match="no driver provides a library for LU decompositions, so other libraries")
    with nullcontext() if routines_of(drivers.device(0), "lu") else missing:
        assert preferred("driver") == "driver"
    a = torch.randn(3, 3)
    torch.testing.assert_close(torch.linalg.inv(a.to(DEVICE)).cpu(), torch.linalg.inv(a))
    assert preferred("default") == "default"


@_as_it_was()
def test_preferred_attention_library() -> None:
    needs_sight()
    preferred = torch.backends.bp.preferred_attention_library  # type: ignore[attr-defined]
    given = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    expected = attend(*given)
    assert preferred() == "default"
    for name in ("host", "generated", "host"):
        assert preferred(name) == name
        on_device = [one.to(DEVICE) for one in given]
        torch.testing.assert_close(attend(*on_device).cpu(), expected, atol=1e-5, rtol=1e-4)
        plan_text = plans.explain(attend, *on_device)
        assert ("launch bp_attention" in plan_text) == (name == "generated"), plan_text
        assert ("host_attention" in plan_text) == (name == "host"), plan_text
    with pytest.raises(ValueError, match="accepted are default, host, driver, generated"):
        preferred("flash")
    assert preferred() == "host"


def _transformed() -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    return torch.fft.fft, (torch.randn(3, 20, dtype=torch.complex64),)


@pytest.mark.parametrize("name", ["conv", "rnn", "fft"])
@_as_it_was()
@host_first()
def test_switches_of_libraries(name: str) -> None:
    needs_sight()
    torch.backends.bp.preferred_blas_library("generated")  # type: ignore[attr-defined]
    switches = getattr(torch.backends.bp, name)
    function, given = {"conv": _convolved, "rnn": _recurrent, "fft": _transformed}[name]()
    on_device = [one.to(DEVICE) for one in given]

    def whole_on_host() -> bool:
        torch.testing.assert_close(function(*on_device).cpu(), function(*given), atol=1e-5, rtol=1e-5)
        return runs_on_host(function, *on_device)

    assert switches.enabled
    assert whole_on_host()
    switches.enabled = False
    assert not whole_on_host()
    switches.enabled = True
    assert whole_on_host()
    with switches.flags(enabled=False):
        assert not switches.enabled
        assert not whole_on_host()
    assert whole_on_host()
    for bad in (1, None, "no"):
        with pytest.raises(TypeError, match="enabled must be a bool"):
            switches.enabled = bad
    with pytest.raises(AttributeError):
        switches.enable = False
    assert whole_on_host()


@_as_it_was()
def test_families_need_a_candidate_for_each_library() -> None:
    with pytest.raises(ValueError, match="products must have the libraries"):
        Candidates("products", Candidate("generated", lambda out: None))


def _attended(queries: int = 8, **named: Any) -> tuple[int, str]:
    """Returns the backend that PyTorch chose, and an explanation of what ran."""
    given = [torch.randn(1, 2, queries, 16, device=DEVICE) for _ in range(3)]
    plan_text = plans.explain(lambda: attend(*given, **named))
    return int(torch.ops.aten._fused_sdp_choice(*given, **named)), plan_text


@pytest.mark.parametrize("way", ["own target", "gpu target"])
@_as_it_was()
def test_sdpa_kernel_chooses_the_kernel(way: str) -> None:
    def check(names: list[SDPBackend], *, fused: bool) -> None:
        with sdpa_kernel(names):
            choice, plan_text = _attended()
        assert choice == (SDPBackend.OVERRIDEABLE if fused else SDPBackend.MATH).value
        assert ("backplane::attention" in plan_text) == fused

    def run() -> None:
        for _ in range(2):
            check([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], fused=True)
            check([SDPBackend.MATH], fused=False)
            check([SDPBackend.FLASH_ATTENTION], fused=True)
            check([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], fused=True)
            for name in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "OVERRIDEABLE"):
                check([getattr(SDPBackend, name)], fused=True)

    if way == "own target":
        needs_sight()
        run()
        return
    with target("gpu"):
        run()


@_as_it_was()
def test_attention_switches_are_those_of_pytorch() -> None:
    panel: Any = torch.backends.bp  # type: ignore[attr-defined]
    for name in ("flash", "math", "overrideable", "cudnn"):
        asked, change = getattr(panel, f"{name}_sdp_enabled"), getattr(panel, f"enable_{name}_sdp")
        assert asked()
        change(False)
        try:
            assert not asked()
        finally:
            change(True)
        assert asked()
    before = panel.fp16_bf16_reduction_math_sdp_allowed()
    panel.allow_fp16_bf16_reduction_math_sdp(not before)
    assert panel.fp16_bf16_reduction_math_sdp_allowed() is not before
    panel.allow_fp16_bf16_reduction_math_sdp(before)


@_as_it_was()
def test_can_use_flash_attention_warns_why_not() -> None:
    panel: Any = torch.backends.bp  # type: ignore[attr-defined]
    query = torch.randn(1, 2, 8, 16, device=DEVICE)

    def params(*, of: torch.Tensor = query, mask: torch.Tensor | None = None) -> Any:
        return panel.SDPAParams(of, of, of, mask, 0.0, False, False)

    with target("gpu"):
        assert panel.can_use_flash_attention(params(), debug=True)
        with pytest.warns(UserWarning, match="not fused: query, key and value need four dimensions"):
            assert not panel.can_use_flash_attention(params(of=query[0]), debug=True)
        assert not panel.can_use_flash_attention(params(of=query[0]))
        with sdpa_kernel(SDPBackend.MATH), pytest.warns(UserWarning, match="FLASH_ATTENTION, .* OVERRIDEABLE"):
            assert not panel.can_use_flash_attention(params(), debug=True)
    with pytest.raises(ValueError, match="query must be a bp tensor, but is on cpu"):
        panel.can_use_flash_attention(params(of=query.cpu()))
    if not launch.target_of(0).simt and panel.can_use_flash_attention(params()):
        mask = torch.zeros(8, 8, device=DEVICE, requires_grad=True)
        with pytest.warns(UserWarning, match="gradient (for|of) the mask"):
            assert not panel.can_use_flash_attention(params(mask=mask), debug=True)


@_as_it_was()
def test_host_computes_only_large_products_and_those_of_few_rows() -> None:
    needs_sight()
    sizes = [(8, 8, 8), (64, 64, 64), (8, 8, 8), (1, 64, 64), (300, 30, 300), (4, 300, 300), (16, 64, 16)]
    kernels = [True, True, True, False, True, False, True]
    for dtype in had([torch.float32, torch.float64, torch.bfloat16]):
        for (rows, depth, columns), by_kernel in zip(sizes, kernels, strict=True):
            a, b = torch.randn(rows, depth, dtype=dtype), torch.randn(depth, columns, dtype=dtype)
            given = [a.to(DEVICE), b.to(DEVICE)]
            for _ in range(2):
                close = {"atol": 1e-1, "rtol": 1e-1} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
                torch.testing.assert_close(torch.mm(*given).cpu(), a @ b, **close)
            on_host = not by_kernel and not costs.host_is_slow(dtype)
            assert runs_on_host(torch.mm, *given) == on_host, (dtype, rows, depth, columns)
    x, w = torch.randn(64, 64, device=DEVICE), torch.randn(64, 64, device=DEVICE)
    for given in ((x, w.t()), (x[:16], w.t()), (x.t(), w)):
        assert not runs_on_host(torch.mm, *given)
    assert not runs_on_host(torch.bmm, x.expand(4, 64, 64), w.expand(4, 64, 64))
    assert runs_on_host(torch.mm, torch.zeros(1200, 1100, device=DEVICE), torch.zeros(1100, 1100, device=DEVICE))
    torch.backends.bp.preferred_blas_library("host")  # type: ignore[attr-defined]
    assert runs_on_host(torch.mm, x, w)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@_as_it_was()
@host_first()
def test_host_computes_half_precision_only_with_hardware_support(dtype: torch.dtype) -> None:
    needs_sight()
    asked = {torch.float16: "_is_mkldnn_fp16_supported", torch.bfloat16: "_is_mkldnn_bf16_supported"}[dtype]
    product = torch.mm, *(torch.randn(80, 80).to(dtype).to(DEVICE) for _ in range(2))
    convolution = (
        torch.nn.functional.conv2d,
        *(torch.randn(one).to(dtype).to(DEVICE) for one in ((1, 4, 9, 9), (8, 4, 3, 3))),
    )
    layer, steps = torch.nn.GRU(5, 7).to(DEVICE, dtype), torch.randn(3, 2, 5).to(dtype).to(DEVICE)

    def recurrent(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return layer(x)[0]

    ours: list[tuple[Any, ...]] = [product, (recurrent, steps)]
    if dtype == torch.bfloat16:  # float16 convolutions always run as generated kernels
        ours.append(convolution)
    has = getattr(torch.ops.mkldnn, asked)()
    assert ["on the host" in plans.explain(*one) for one in ours] == [has] * len(ours)
    for has in (True, False, True):
        with mock.patch.object(torch.ops.mkldnn, asked, return_value=has):
            _C.advance_configuration_epoch()
            assert ["on the host" in plans.explain(*one) for one in ours] == [has] * len(ours)
            torch.backends.bp.preferred_blas_library("host")  # type: ignore[attr-defined]
            assert runs_on_host(*product)  # an explicit preference applies
            torch.backends.bp.preferred_blas_library("default")  # type: ignore[attr-defined]
    _C.advance_configuration_epoch()


def test_verbose_prints_library_calls() -> None:
    """Runs in a subprocess to capture its output: C++ code prints the lines, in the thread that does the work."""
    needs_sight()
    program = """
import torch
from torch_backplane import preferences
panel = torch.backends.bp
for family in ("products", "convolutions"):
    preferences.prefer(family, "host")
a, w = torch.randn(80, 90, device="bp"), torch.randn(90, 70, device="bp")
image, weight = torch.randn(1, 4, 9, 9, device="bp"), torch.randn(8, 4, 3, 3, device="bp")
def work():
    print("--", flush=True)
    for _ in range(2):
        a @ w
    torch.nn.functional.conv2d(image, weight)
    torch.bp.synchronize()
work()
with panel.verbose(panel.VERBOSE_ON):
    work()
    with panel.verbose(panel.VERBOSE_OFF):
        work()
    work()
work()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    silent, first, off, second, end = ran.stdout.split("--\n")[1:]
    assert not (silent + off + end)
    for plan_text in (first, second):
        lines = plan_text.splitlines()
        names = ["aten::mm.out", "aten::mm.out", "aten::convolution.out"]
        assert [re.sub(r"\(.*", "", line) for line in lines] == [f"backplane: bp:0 host {name}" for name in names]
        assert "Float [80, 90] strides [90, 1], Float [90, 70] strides [70, 1]" in lines[0]
        assert all(re.search(r": \d+\.\d{3} ms$", line) for line in lines)
    with pytest.raises(ValueError, match=r"level must be VERBOSE_OFF \(0\) or VERBOSE_ON \(1\), but got 2"):
        torch.backends.bp.verbose(2)  # type: ignore[attr-defined]
