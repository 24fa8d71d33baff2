"""Fourier transforms of many lengths and dimensions: on the host, in passes, in local memory, and by convolution."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, had, plans_from_the_start
from targets import target

from torch_backplane import preferences
from torch_backplane.kernels.templates.fft import radices

aten = torch.ops.aten
COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
NORMS = ("backward", "ortho", "forward")


@contextmanager
def computed_by(way: str) -> Iterator[None]:
    if way == "local memory":
        with target("gpu"):
            yield
    else:
        with preferences.preferring("transforms", way), plans_from_the_start():
            yield


def close_to_doubles(function: Callable[..., torch.Tensor], x: torch.Tensor) -> None:
    """Checks that the error against float64 is the CPU's within a few roundings, and that the strides are equal."""
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    expected, cpu, found = function(wide), function(x), function(x.to(DEVICE))
    assert (found.dtype, found.shape, found.stride()) == (cpu.dtype, cpu.shape, cpu.stride())
    scale = max(expected.abs().max().item(), 1e-30)
    error, usual = ((one.cpu() - expected).abs().max().item() / scale for one in (found, cpu))
    # For float64, the CPU's error is not known.
    assert error <= 8 * max(usual, 2 * torch.finfo(x.dtype).eps), (tuple(x.shape), error, usual)


# Single radices, products, lengths that fit local memory or exceed it, and other primes and their squares.
LENGTHS = [*range(1, 18), 19, 32, 37, 60, 97, 100, 169, 243, 289, 1000, 1009, 2048, 2310, 4096, 30030]
# For float64, where constants and the limit of local memory differ: one radix of each kind, a prime, and passes.
OF_DOUBLES = [1, 5, 8, 15, 16, 37, 243, 1009, 2048, 30030]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("way", ["default", "generated", "local memory"])
def test_every_length(way: str, dtype: torch.dtype) -> None:
    if dtype not in had((dtype,)):
        pytest.skip("the device has no float64")
    torch.manual_seed(0)
    lengths = OF_DOUBLES if dtype == torch.float64 else LENGTHS
    with computed_by(way):
        for n in lengths if way != "default" else lengths[::4]:
            x = torch.randn(3, n, dtype=COMPLEX[dtype])
            close_to_doubles(torch.fft.fft, x)
            close_to_doubles(torch.fft.ifft, x)
            close_to_doubles(torch.fft.rfft, x.real.contiguous())
            close_to_doubles(torch.fft.ihfft, x.real.contiguous())
            close_to_doubles(torch.fft.fft, x.real.contiguous())
            close_to_doubles(lambda x, n=n: torch.fft.irfft(x, n), x)
            close_to_doubles(lambda x, n=n: torch.fft.hfft(x, n), x)


@pytest.mark.parametrize("way", ["default", "generated", "local memory"])
def test_several_dimensions_and_layouts(way: str) -> None:
    torch.manual_seed(0)
    dims = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2), (2, 0), (-2, 0, 2)]
    with computed_by(way):
        for number, (dim, shape) in enumerate(itertools.product(dims, [(4, 6, 10), (3, 17, 8), (16, 2, 16)])):
            x = torch.randn(shape, dtype=torch.complex64)
            settings: dict[str, Any] = {"dim": dim, "norm": NORMS[number % 3]}
            close_to_doubles(partial(torch.fft.fftn, **settings), x)
            close_to_doubles(partial(torch.fft.ifftn, **settings), x.transpose(0, 2))
            close_to_doubles(partial(torch.fft.rfftn, **settings), x.real)
            close_to_doubles(partial(torch.fft.irfftn, **settings), x.conj()[::2].repeat(2, 1, 1))
            close_to_doubles(partial(torch.fft.fftn, **settings), x.imag.permute(1, 2, 0))


@pytest.mark.parametrize("way", ["default", "generated", "local memory"])
def test_gradients_and_out_variants(way: str) -> None:
    torch.manual_seed(0)

    def gradients(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        result = torch.fft.irfft2(torch.fft.rfft2(x) * torch.fft.fft2(x)[..., : x.shape[-1] // 2 + 1], s=x.shape[-2:])
        return [result.detach(), *torch.autograd.grad(result.square().sum(), x)]

    def given(x: torch.Tensor) -> list[torch.Tensor]:
        out, empty = torch.empty(4, 6, dtype=x.dtype, device=x.device).t(), x.new_empty(0)
        wide = torch.empty(6, 4, dtype=torch.complex128, device=x.device)
        torch.fft.fft(x, out=out)
        torch.fft.ifft(x, dim=0, out=empty)
        torch.fft.fft(x, out=wide)
        torch.fft.fft(x, dim=0, out=x)
        return [out, empty, wide, x]

    with computed_by(way):
        for shape in ((6, 8), (2, 5, 12), (3, 22)):
            agrees(gradients, torch.randn(shape), rtol=2e-4, atol=2e-3)
        x = torch.randn(6, 4, dtype=torch.complex64)
        if torch.float64 in had((torch.float64,)):
            found, expected = given(x.to(DEVICE)), given(x.clone())
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.cpu(), other)
                assert one.stride() == other.stride()


def test_alternating_valid_and_invalid_calls() -> None:
    x = torch.randn(4, 6, dtype=torch.complex64)
    bad: list[tuple[Callable[[torch.Tensor], Any], type[Exception]]] = [
        (lambda x: torch.fft.fft(x, n=0), RuntimeError),
        (lambda x: torch.fft.fft(x, dim=2), IndexError),
        (lambda x: torch.fft.fftn(x, dim=(0, 0)), RuntimeError),
        (lambda x: torch.fft.rfft(x), RuntimeError if torch.__version__ < "2.14" else TypeError),
        (lambda x: torch.fft.fft(x, norm="none"), RuntimeError),
        (lambda x: torch.fft.fft(x, out=torch.empty(4, 6, device=x.device)), RuntimeError),
        (lambda x: torch.fft.fft(x[:, :0]), RuntimeError),
    ]
    for way in ("default", "generated"):
        with computed_by(way):
            for call, error in bad:
                torch.testing.assert_close(torch.fft.fft(x.to(DEVICE)).cpu(), torch.fft.fft(x))
                with pytest.raises(error):
                    call(x)
                with pytest.raises(error):
                    call(x.to(DEVICE))
            assert torch.fft.fft(x[:0].to(DEVICE)).shape == (0, 6)
            assert aten._fft_c2c(x.to(DEVICE), [], 0, True).equal(x.to(DEVICE))


def test_radices() -> None:
    for size in range(1, 3000):
        found = radices(size)
        if found is None:
            assert any(size % prime == 0 and all(prime % d for d in range(2, prime)) for prime in range(17, size + 1))
        else:
            product = 1
            for one in found:
                assert 1 <= one <= 16
                product *= one
            assert product == size
