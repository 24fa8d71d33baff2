"""Fourier transforms by the driver's library: VkFFT where pyvkfft is installed, and everywhere a toy.

The toy checks that planners keep the contract for libraries.
"""

from __future__ import annotations

import ctypes
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from agreement import DEVICE, agrees, had, plans_from_the_start
from test_graphs import captured, made
from test_spectral_ops import COMPLEX, NORMS, close_to_doubles
from test_tunable import Times, isolated, tunable

from torch_backplane import _C, drivers, plans, preferences
from torch_backplane.drivers import Library, Routine
from torch_backplane.drivers.opencl.libraries import vkfft
from torch_backplane.operators import library_transforms
from torch_backplane.planning import library_calls

cl = pytest.importorskip("pyopencl")
BROKEN = 7  # the toy's status for a call that violates the contract


class Argument(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("data", ctypes.POINTER(ctypes.c_int64)),
        ("bytes", ctypes.c_uint64),
    )


def _toy(dtype: torch.dtype) -> Any:
    """The routine. It copies to the host, computes with PyTorch on the CPU, and copies back."""

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Argument), ctypes.c_uint64)
    def toy(queue: int, arguments: Any, count: int) -> int:
        out, given = arguments[0], arguments[1]
        what, inverse, batch, *sizes = (arguments[index].data[0] for index in range(2, count))
        while len(sizes) > 1 and sizes[0] == 1:
            del sizes[0]
        half = [*sizes[:-1], sizes[-1] // 2 + 1]
        x_shape, out_shape = ((batch, *(half if what == kind else sizes)) for kind in (2, 1))
        x_dtype, out_dtype = (dtype if what == kind else dtype.to_complex() for kind in (1, 2))
        x, result = torch.empty(x_shape, dtype=x_dtype), torch.empty(out_shape, dtype=out_dtype)
        apart = out.memory != given.memory or not (
            out.offset < given.offset + x.nbytes and given.offset < out.offset + result.nbytes
        )
        if count != 8 or batch < 1 or min(sizes) < 2 or not apart or inverse not in ((0, 1), (0,), (1,))[what]:
            return BROKEN
        if what == 2 and len(sizes) > 1:
            return BROKEN
        commands = cl.CommandQueue.from_int_ptr(queue)
        there, here = (cl.Buffer.from_int_ptr(one.memory) for one in (out, given))
        cl.enqueue_copy(commands, _bytes(x), here, src_offset=given.offset)
        dims = list(range(1, len(sizes) + 1))
        if what == 2:
            ends = x[:, :: max(sizes[-1] // 2, 1)] if sizes[-1] % 2 == 0 else x[:, :1]
            if ends.imag.any():
                return BROKEN
            result.copy_(torch.fft.irfft(x, sizes[-1], norm="forward"))
            x.fill_(math.nan)
            cl.enqueue_copy(commands, here, _bytes(x), dst_offset=given.offset)
        elif what == 1:
            result.copy_(torch.fft.rfftn(x, dim=dims))
        else:
            result.copy_(torch.fft.ifftn(x, dim=dims, norm="forward") if inverse else torch.fft.fftn(x, dim=dims))
        cl.enqueue_copy(commands, there, _bytes(result), dst_offset=out.offset)
        return 0

    return toy


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


TOYS = {dtype: _toy(dtype) for dtype in COMPLEX}
ADDRESSES = {dtype: ctypes.cast(toy, ctypes.c_void_p).value or 0 for dtype, toy in TOYS.items()}


def holding(name: str, addresses: dict[torch.dtype, int], explanation: str = "?", **queries: Any) -> Library:
    routine = Routine(addresses=addresses, **queries)
    return Library(name=name, routines={"fft": routine}, explain=lambda status: explanation)


TOY = holding("Toy", ADDRESSES, "the contract was violated")


def narrow(most: int) -> Library:
    """A library for up to `most` elements. Its address is invalid, so calls would crash."""
    guard = lambda dtype, inner, **rest: None if inner <= most else "refuses"  # noqa: E731
    return holding("Narrow", {torch.float32: 1}, guard=guard)


def need_library() -> Library:
    library = vkfft.library(cl._cl.__file__, drivers.device(0).properties.kind == "cpu")
    if library is None:
        pytest.skip("pyvkfft is not installed, or its version is not supported")
    return library


@contextmanager
def having(library: Library | None, preferred: str = "driver") -> Iterator[None]:
    """The device has this library alone. A failure that disables it is an error."""
    with mock.patch.object(drivers.device(0), "libraries", [library] if library else []), warnings.catch_warnings():
        warnings.filterwarnings("error", "Fourier transforms no longer use")
        _C.advance_configuration_epoch()
        try:
            with preferences.preferring("transforms", preferred):
                yield
        finally:
            library_calls._failed.clear()
            _C.advance_configuration_epoch()


def computing(name: str) -> Any:
    return having(TOY if name == "Toy" else need_library())


def called(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether the library computes the call."""
    with plans_from_the_start():
        return " fft at" in plans.explain(function, *arguments)


def random(*shape: int, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


both = pytest.mark.parametrize("name", ["Toy", "VkFFT"])

# Radices, their products, primes with and without kernels of VkFFT, and more than its limit on CPU devices (128).
LENGTHS = [2, 3, 7, 8, 12, 59, 60, 97, 127, 128, 129]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@both
def test_every_length(name: str, dtype: torch.dtype) -> None:
    with computing(name):
        for n in LENGTHS if name == "VkFFT" else LENGTHS[:6]:
            x = random(3, n, dtype=COMPLEX[dtype])
            real = x.real.contiguous()
            close_to_doubles(torch.fft.fft, x)
            close_to_doubles(torch.fft.ifft, x)
            close_to_doubles(torch.fft.rfft, real)
            close_to_doubles(torch.fft.ihfft, real)
            close_to_doubles(torch.fft.fft, real)
            close_to_doubles(lambda x, n=n: torch.fft.irfft(x, n), x)
            close_to_doubles(lambda x, n=n: torch.fft.hfft(x, n), x)
        there = random(3, 12, dtype=COMPLEX[dtype]).to(DEVICE)
        for function in (torch.fft.fft, torch.fft.ifft, torch.fft.irfft):
            assert called(function, there)
        assert called(torch.fft.rfft, there.real)


@both
def test_several_dimensions_and_layouts(name: str) -> None:
    dims = [(0,), (1,), (0, 1), (1, 2), (0, 2), (2, 0), (0, 1, 2), (-2, 0, 2)]
    with computing(name):
        for number, dim in enumerate(dims):
            x = random(4, 6, 10)
            settings: dict[str, Any] = {"dim": dim, "norm": NORMS[number % 3]}
            close_to_doubles(partial(torch.fft.fftn, **settings), x)
            close_to_doubles(partial(torch.fft.ifftn, **settings), x.transpose(0, 2))
            close_to_doubles(partial(torch.fft.rfftn, **settings), x.real)
            close_to_doubles(partial(torch.fft.irfftn, **settings), x.conj()[::2].repeat(2, 1, 1))
            close_to_doubles(partial(torch.fft.fftn, **settings), x.imag.permute(1, 2, 0))
            assert called(partial(torch.fft.irfftn, **settings), x.to(DEVICE))


@both
def test_views_at_offsets_leave_neighbours_unchanged(name: str) -> None:
    given = random(4000)
    there = given.to(DEVICE)
    with computing(name):
        # Offsets in elements: aligned and unaligned starts of sub-buffers.
        for start in (0, 1, 3, 16, 64, 77, 128, 512, 1003):
            x, moved = given[start : start + 60].view(3, 20), there[start : start + 60].view(3, 20)
            kept = moved.clone()
            for function in (torch.fft.fft, torch.fft.irfft):
                torch.testing.assert_close(function(moved).cpu(), function(x))
            torch.testing.assert_close(torch.fft.rfft(torch.view_as_real(moved)[:, :, 1]).cpu(), torch.fft.rfft(x.imag))
            assert moved.equal(kept)
            memory = torch.zeros(2000, dtype=torch.complex64, device=DEVICE)
            torch.fft.ifft(moved, out=memory[start : start + 60].view(3, 20))
            expected = torch.zeros(2000, dtype=torch.complex64)
            expected[start : start + 60] = torch.fft.ifft(x).view(-1)
            torch.testing.assert_close(memory.cpu(), expected)


@both
def test_out_variants_and_in_place_results(name: str) -> None:
    def into(function: Callable[..., torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            out = make(x)
            function(x, out=out)
            return out

        return run

    with computing(name):
        x = random(6, 4)
        agrees(into(torch.fft.fft, lambda x: torch.full((4, 6), math.nan, dtype=x.dtype, device=x.device).t()), x)
        agrees(into(torch.fft.fft, lambda x: x.new_empty(0)), x)
        agrees(into(torch.fft.irfft, lambda x: torch.empty(6, 12, device=x.device)[:, ::2]), x)
        for function in (torch.fft.fft, partial(torch.fft.ifft, dim=0), torch.fft.fft2):
            mine, theirs = x.clone(), x.to(DEVICE)
            function(mine, out=mine)
            function(theirs, out=theirs)
            torch.testing.assert_close(theirs.cpu(), mine)


@both
def test_replays_with_other_values_memory_and_shapes(name: str) -> None:
    plans.set_mode("check")
    kept = []
    with computing(name):
        for rows in (2, 5, 3, 1, 4, 2):
            for n in (8, 12):
                x = random(rows, n)
                kept += [x.to(DEVICE), torch.empty(77, device=DEVICE)]
                torch.testing.assert_close(torch.fft.fft(kept[-2]).cpu(), torch.fft.fft(x))
                torch.testing.assert_close(torch.fft.rfft(kept[-2].real).cpu(), torch.fft.rfft(x.real))
                torch.testing.assert_close(torch.fft.irfft(kept[-2], n).cpu(), torch.fft.irfft(x, n))


@both
def test_unsupported_calls_use_other_candidates(name: str) -> None:
    with computing(name):
        for x, dim in ((random(3, 1), (1,)), (random(4, 1, 3), (1, 2)), (random(2, 3, 2, 4), (0, 1, 2, 3))):
            agrees(partial(torch.fft.fftn, dim=dim), x)
            agrees(partial(torch.fft.rfftn, dim=dim), x.real)
            assert not called(partial(torch.fft.fftn, dim=dim), x.to(DEVICE))
        agrees(lambda x: torch.fft.irfft(x, 1), random(3, 1))
        assert torch.fft.fft(random(0, 6).to(DEVICE)).shape == (0, 6)
    x = random(3, 4).to(DEVICE)
    with having(narrow(3)):
        close_to_doubles(torch.fft.fft, random(3, 4))
        assert not called(torch.fft.fft, x)
        assert library_transforms.why_not(x, x, [1], False) == "(Narrow) refuses"
    with having(narrow(4)):
        if torch.float64 in had((torch.float64,)):
            agrees(torch.fft.fft, random(3, 4, dtype=torch.complex128))
            wide = x.to(torch.complex128)
            assert "(Narrow) has no float64" in str(library_transforms.why_not(wide, wide, [1], False))


@both
def test_gradients(name: str) -> None:
    def gradients(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        result = torch.fft.irfft2(torch.fft.rfft2(x) * torch.fft.fft2(x)[..., : x.shape[-1] // 2 + 1], s=x.shape[-2:])
        return [result.detach(), *torch.autograd.grad(result.square().sum(), x)]

    with computing(name):
        agrees(gradients, torch.randn(6, 8), rtol=2e-4, atol=2e-3)


@both
def test_streams_and_threads(name: str) -> None:
    given = [random(16, 96) for _ in range(4)]
    failed: list[BaseException] = []

    def work(x: torch.Tensor, stream: torch.Stream) -> None:
        try:
            with stream:
                moved = x.to(DEVICE)
                for _ in range(20):
                    found = torch.fft.ifft(torch.fft.fft(moved))
                torch.testing.assert_close(found.cpu(), x)
        except BaseException as error:
            failed.append(error)

    with computing(name):
        shared = torch.bp.Stream()
        streams = [shared, shared, torch.bp.Stream(), torch.bp.Stream()]
        threads = [threading.Thread(target=work, args=one) for one in zip(given, streams, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed, failed


@both
def test_graphs(name: str) -> None:
    with computing(name):
        x = random(3, 20).to(DEVICE)
        torch.fft.irfft(torch.fft.fft(x))
        graph = made("torch.bp")
        with captured(graph):
            y = torch.fft.irfft(torch.fft.fft(x), 20)
        for _ in range(3):
            x.copy_(random(3, 20))
            graph.replay()
            torch.testing.assert_close(y.cpu(), torch.fft.irfft(torch.fft.fft(x.cpu()), 20))


def test_library_is_used_only_if_preferred() -> None:
    x = random(3, 20).to(DEVICE)
    with having(TOY, "default"):
        assert not called(torch.fft.fft, x)
        with preferences.preferring("transforms", "driver"):
            assert called(torch.fft.fft, x)
            with torch.backends.bp.fft.flags(enabled=True):  # type: ignore[attr-defined]
                assert called(torch.fft.fft, x)
            with torch.backends.bp.fft.flags(enabled=False):  # type: ignore[attr-defined]
                assert not called(torch.fft.fft, x)
        assert not called(torch.fft.fft, x)


def test_failing_library_is_disabled_with_one_warning() -> None:
    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
    def fails(*arguments: Any) -> int:
        return 4001

    address = ctypes.cast(fails, ctypes.c_void_p).value or 0
    library = holding("a toy", {torch.float32: address}, "no room")
    x = random(3, 20)
    with having(library):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                torch.testing.assert_close(torch.fft.fft(x.to(DEVICE)).cpu(), torch.fft.fft(x))
                torch.testing.assert_close(torch.fft.irfft(x.to(DEVICE)).cpu(), torch.fft.irfft(x))
        (one,) = (str(one.message) for one in caught)
        assert one.startswith("Fourier transforms no longer use a toy on bp:0, which failed: ")
        assert "no room" in one


@isolated
def test_tuning_includes_the_library() -> None:
    with having(TOY, "default"):
        Times("transforms", driver=1.0, host=2.0, generated=3.0)
        tunable.enable()
        x = random(5, 12)
        torch.testing.assert_close(torch.fft.fft(x.to(DEVICE)).cpu(), torch.fft.fft(x))
        assert [one[2] for one in tunable.get_results()] == ["driver"]
        assert called(torch.fft.fft, x.to(DEVICE))


@isolated
def test_tuning_excludes_a_library_that_rejects_the_call() -> None:
    """A trial under its name would time kernels."""
    with having(narrow(3), "default"):
        timed = Times("transforms", driver=1.0, host=2.0, generated=3.0)
        tunable.enable()
        torch.fft.fft(random(5, 12).to(DEVICE))
        assert "driver" not in timed.trials
        assert [one[2] for one in tunable.get_results()] in (["host"], [])  # a single candidate is not timed


def test_preference_without_library_warns() -> None:
    prefer = torch.backends.bp.preferred_fft_library  # type: ignore[attr-defined]
    devices = [drivers.device(index) for index in range(torch.accelerator.device_count())]
    assert prefer() == "default"
    try:
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(mock.patch.object(device, "libraries", (), create=True))
            with pytest.warns(UserWarning, match="no driver provides a library for Fourier transforms"):
                assert prefer("driver") == "driver"
        with mock.patch.object(devices[0], "libraries", [TOY]), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert prefer("driver") == "driver"
        with pytest.raises(ValueError, match="no library 'cufft': accepted are default, host, driver, generated"):
            prefer("cufft")
    finally:
        prefer("default")


def test_fft_plan_cache_is_bounded() -> None:
    cache = torch.backends.bp.fft_plan_cache  # type: ignore[attr-defined]
    with having(None):
        assert (cache.size, cache.max_size, cache[1].size) == (0, 0, 0)
        cache.clear()
        with pytest.raises(RuntimeError, match="no library of Fourier transforms"):
            cache.max_size = 3
    with having(need_library()):
        before = cache.max_size
        try:
            cache.clear()
            assert cache.size == 0
            cache.max_size = 2
            # The queue has pending work of evicted plans.
            given = [random(9, 10 + n % 4) for n in range(12)]
            found = [torch.fft.fft(one.to(DEVICE)) for one in given]
            for one, x in zip(found, given, strict=True):
                torch.testing.assert_close(one.cpu(), torch.fft.fft(x))
            assert cache[DEVICE].size == 2
            cache.max_size = 0
            torch.testing.assert_close(torch.fft.fft(given[0].to(DEVICE)).cpu(), torch.fft.fft(given[0]))
            assert (cache.size, cache.max_size) == (0, 0)
            with pytest.raises(ValueError, match="max_size must not be negative, but got -1"):
                cache.max_size = -1
            with pytest.raises(TypeError, match="max_size must be an int, but got 'two'"):
                cache.max_size = "two"
            assert cache.max_size == 0
        finally:
            cache.max_size = before


def test_vkfft_guard_explains_unsupported_sizes() -> None:
    sizes = {"inverse": 0, "batch": 2, "outer": 1, "middle": 1}
    guard = partial(vkfft._guard, 128, torch.float32, **sizes)
    assert guard(kind=0, inner=128) is None
    assert guard(kind=0, inner=129) == "transforms along up to 128 elements"
    for kind, most in ((0, 2**28 - 1), (1, 2**29 - 3), (2, 2**29 - 3)):
        unlimited = partial(vkfft._guard, 2**63 - 1, torch.float32, kind, **sizes)
        assert unlimited(inner=most) is None
        assert unlimited(inner=most + 2) == f"transforms up to {2**32 - 1} bytes"


def test_only_known_versions_are_loaded() -> None:
    need_library()
    assert vkfft._file() is not None
    for version in ("2024.1.4", "2026.1", "?"):
        with mock.patch.object(vkfft.importlib.metadata, "version", return_value=version):
            assert vkfft._file() is None
    with mock.patch.object(vkfft, "PACKAGE", "no_such_package"):
        assert vkfft._file() is None
