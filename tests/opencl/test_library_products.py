"""Matrix products by the driver's library, where it is installed: CLBlast, or cuBLAS with `--on cuda`."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from agreement import DEVICE, agrees, plans_from_the_start, refused_alike
from test_tunable import Times, isolated, tunable

from torch_backplane import _C, drivers, plans, preferences
from torch_backplane.drivers import Library, Routine
from torch_backplane.drivers.libraries import routines_of
from torch_backplane.operators import library_products
from torch_backplane.planning import library_calls

LOOSE = {"atol": 1e-4, "rtol": 1e-5}


def need_library() -> None:
    if not any(routines_of(drivers.device(0), "matmul")):
        pytest.skip("no library is installed: CLBlast (Debian: libclblast1), or cuBLAS for CUDA")


def need_clblast() -> None:
    if not any(library.name == "CLBlast" for library, _ in routines_of(drivers.device(0), "matmul")):
        pytest.skip("CLBlast is not the library")


@contextmanager
def _preferred() -> Iterator[None]:
    """Prefers the library in the worker process that runs the tests; fixtures do not run there."""
    need_library()
    with preferences.preferring("products", "driver"):
        yield


preferred = _preferred()


def called(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether the library computes the call."""
    with plans_from_the_start():
        return " matmul at " in plans.explain(function, *arguments)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@preferred
def test_values(dtype: torch.dtype) -> None:
    sizes = ((3, 4, 5), (1, 7, 1), (1, 3, 6), (6, 3, 1), (33, 65, 17), (9, 1, 8))
    for rows, depth, columns in sizes if dtype == torch.float32 else sizes[-2:]:
        a, b, c = (random(*one, dtype=dtype) for one in ((rows, depth), (depth, columns), (rows, columns)))
        agrees(torch.mm, a, b, **LOOSE)
        agrees(torch.mm, a.t().contiguous().t(), b, **LOOSE)
        agrees(torch.mm, a, b.t().contiguous().t(), **LOOSE)
        agrees(lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2), c, a, b, **LOOSE)
        agrees(torch.addmm, c[0], a, b, **LOOSE)  # broadcast bias
        agrees(torch.mv, a, b[:, 0], **LOOSE)
        for batch in (1, 3):
            x, y = random(batch, rows, depth, dtype=dtype), random(batch, depth, columns, dtype=dtype)
            agrees(torch.bmm, x, y, **LOOSE)
            agrees(torch.bmm, x.mT.contiguous().mT, y, **LOOSE)
            agrees(torch.bmm, a.expand(batch, -1, -1), y, **LOOSE)
            agrees(lambda c, x, y: torch.baddbmm(c, x, y, beta=3, alpha=0.25), c, x, y, **LOOSE)
    assert called(torch.mm, a.to(DEVICE), b.to(DEVICE))
    assert called(torch.baddbmm, c.to(DEVICE), x.to(DEVICE), y.to(DEVICE))


@preferred
def test_out_variants_in_any_layout_and_in_place() -> None:
    a, b, c = random(5, 4), random(4, 6), random(5, 6)

    def into(make: Callable[[torch.device], torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            memory = make(a.device)
            torch.mm(a, b, out=memory)
            return memory

        return run

    nan = float("nan")  # the products must not read the initial values of results
    agrees(into(lambda device: torch.full((5, 6), nan, device=device)), a, b, **LOOSE)
    agrees(into(lambda device: torch.full((6, 5), nan, device=device).t()), a, b, **LOOSE)
    agrees(into(lambda device: torch.full((5, 12), nan, device=device)[:, ::2]), a, b, **LOOSE)
    agrees(into(lambda device: torch.full((9, 9), nan, device=device)[2:7, 3:]), a, b, **LOOSE)
    agrees(lambda c, a, b: c.clone().addmm_(a, b, beta=2), c, a, b, **LOOSE)
    agrees(lambda c, a, b: c.t().contiguous().t().addmm_(a, b), c, a, b, **LOOSE)
    agrees(lambda c, a, b: torch.full_like(c, nan).addmm_(a, b, beta=0), c, a, b, **LOOSE)


@preferred
def test_views_at_offsets_leave_neighbours_unchanged() -> None:
    given, memory = random(40, 40), torch.zeros(40, 40)
    there, result = given.to(DEVICE), memory.to(DEVICE)
    for i in range(0, 20, 3):
        memory[i : i + 5, i + 1 : i + 7] = given[i : i + 5, 2:9] @ given[3:10, i : i + 6]
        torch.mm(there[i : i + 5, 2:9], there[3:10, i : i + 6], out=result[i : i + 5, i + 1 : i + 7])
    torch.testing.assert_close(result.cpu(), memory, **LOOSE)


@preferred
def test_dynamic_shape_plans_and_empty_sums() -> None:
    plans.set_mode("check")
    for n in (4, 7, 0, 12, 31, 5, 64, 0, 3):
        for a, b in ((random(n, 3), random(3, n)), (random(3, n), random(n, 2)), (random(2, n, 5), random(2, 5, 4))):
            torch.testing.assert_close((a.to(DEVICE) @ b.to(DEVICE)).cpu(), a @ b, **LOOSE)
    refused_alike(torch.mm, random(3, 4), random(3, 4))


@preferred
def test_unsupported_dtypes_use_other_candidates() -> None:
    need_clblast()
    for a in (torch.randint(-9, 9, (4, 4)), random(4, 4).half(), random(4, 4).to(torch.complex64)):
        agrees(torch.mm, a, a, atol=1e-2, rtol=1e-2)
        assert not called(torch.mm, a.to(DEVICE), a.to(DEVICE))
    assert "has no float16" in str(library_products.why_not(torch.empty(2, 2, dtype=torch.float16, device=DEVICE)))


def test_verbose_output_shows_arguments() -> None:
    need_clblast()
    program = """
import torch
torch.backends.bp.preferred_blas_library("driver")
a, w = torch.randn(8, 9, device="bp"), torch.randn(9, 7, device="bp")
with torch.backends.bp.verbose(1):
    a @ w
    torch.bp.synchronize()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    call = re.escape("driver CLBlast matmul(1, 0, 1, 8, 7, 9, 7, 9, 7, 0, 0, 0, 0, 0, 8, 16, 0), given to the queue")
    assert re.fullmatch(rf"backplane: bp:0 {call}: \d+\.\d+ ms\n", ran.stdout), ran.stdout


def test_library_is_used_only_if_preferred() -> None:
    need_clblast()
    a = random(96, 96).to(DEVICE)
    assert not called(torch.mm, a, a)
    with preferences.preferring("products", "driver"):
        assert called(torch.mm, a, a)
    assert not called(torch.mm, a, a)


def test_failing_library_is_disabled_with_one_warning() -> None:

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
    def fails(*arguments: Any) -> int:
        return -1011

    address = ctypes.cast(fails, ctypes.c_void_p).value or 0
    routine = Routine(addresses={torch.float32: address})
    library = Library(name="a toy", routines={"matmul": routine}, explain=lambda status: "no room")
    a, b = random(5, 4), random(4, 6)
    try:
        with mock.patch.object(drivers.device(0), "libraries", [library]), preferences.preferring("products", "driver"):
            with pytest.warns(UserWarning, match=r"matrix products no longer use a toy on .*no room"):
                found = a.to(DEVICE) @ b.to(DEVICE)
            torch.testing.assert_close(found.cpu(), a @ b, **LOOSE)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for _ in range(3):
                    torch.testing.assert_close((a.to(DEVICE) @ b.to(DEVICE)).cpu(), a @ b, **LOOSE)
                torch.testing.assert_close((b.to(DEVICE).t() @ b.to(DEVICE)).cpu(), b.t() @ b, **LOOSE)
    finally:
        library_calls._failed.clear()
        _C.advance_configuration_epoch()


def test_tuning_includes_the_library() -> None:
    need_library()
    libraries = drivers.device(0).libraries

    @isolated  # without libraries
    def tunes() -> None:
        with mock.patch.object(drivers.device(0), "libraries", libraries):
            Times("products", driver=1.0, host=2.0, generated=3.0)
            tunable.enable()
            a, b = random(5, 4).to(DEVICE), random(4, 6).to(DEVICE)
            torch.testing.assert_close((a @ b).cpu(), a.cpu() @ b.cpu(), **LOOSE)
            assert [one[2] for one in tunable.get_results()] == ["driver"]
            assert called(torch.mm, a, b)

    tunes()


def test_preference_without_library_warns() -> None:
    blas = torch.backends.bp.preferred_blas_library  # type: ignore[attr-defined]
    devices = [drivers.device(index) for index in range(torch.accelerator.device_count())]
    try:
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(mock.patch.object(device, "libraries", (), create=True))
            with pytest.warns(UserWarning, match="no driver provides a library for matrix products"):
                assert blas("driver") == "driver"
        if any(routines_of(devices[0], "matmul")):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                blas("driver")
    finally:
        blas("default")
