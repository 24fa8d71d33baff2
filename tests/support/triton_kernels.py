"""Triton kernels for tests, and what they compute, for the emulator of CUDA, which does not execute their binaries."""

from __future__ import annotations

import ctypes
import struct
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cuda_emulator"))
import emulator

launches: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = []  # kernel, sizes, parameters


def tensor(address: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the elements at an address of the emulator's device memory, as a CPU tensor."""
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count)


def defined(name: str, layout: str) -> Any:
    """Defines what the emulator computes for a kernel. `layout`: its parameters for `struct`, without Triton's two."""

    def define(function: Any) -> Any:
        def call(sizes: tuple[int, ...], parameters: bytes) -> None:
            assert len(parameters) == struct.calcsize(f"@{layout}QQ"), "the binary has other parameters"
            given = struct.unpack_from(f"@{layout}QQ", parameters)
            launches.append((name, sizes, given))
            function(sizes, *given[:-2])

        emulator.define_kernel(name, call)
        return function

    return define


@triton.jit
def add(x, y, out, n, scale, BLOCK: tl.constexpr):
    """out = x + scale * y"""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, tl.load(x + i, inside) + scale * tl.load(y + i, inside), inside)


@defined("add", "QQQif")
def _add(sizes, x, y, out, n, scale):
    assert sizes[3:6] == (128, 1, 1), sizes
    tensor(out, n).copy_(tensor(x, n) + scale * tensor(y, n))


@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    """x *= 2"""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, i < n) * 2, i < n)


@defined("double", "Qi")
def _double(sizes, x, n):
    tensor(x, n).mul_(2)


CONFIGS = [triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 256}, num_warps=4)]


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def tuned(x, out, n, BLOCK: tl.constexpr):
    """out = x + 1"""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) + 1, i < n)


@defined("tuned", "QQi")
def _tuned(sizes, x, out, n):
    block = {64: 64, 128: 256}[sizes[3]]
    assert sizes[:3] == (-(-n // block), 1, 1), sizes
    tensor(out, n).copy_(tensor(x, n) + 1)


@triton.heuristics({"BLOCK": lambda given: 32 if given["n"] < 100 else 128, "MINUS": lambda given: given["n"] > 50})
@triton.jit
def negated(x, out, n, BLOCK: tl.constexpr, MINUS: tl.constexpr):
    """out = -x if n > 50, else x"""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, i < n)
    tl.store(out + i, -value if MINUS else value, i < n)


@defined("negated", "QQi")
def _negated(sizes, x, out, n):
    tensor(out, n).copy_(-tensor(x, n) if n > 50 else tensor(x, n))


@triton.jit
def numbers(out, flag, small, large, huge, half: tl.float16, wide: tl.float64, nothing, pair):
    """Writes its arguments."""
    tl.store(out, flag.to(tl.float64) + small + large + huge + half + wide + pair[0] + tl.load(pair[1]))


@defined("numbers", "Q?iqQHdfQ")
def _numbers(sizes, out, *given):
    tensor(out, 1, torch.float64).fill_(len(given))


@triton.jit
def product(a, b, c, K, M: tl.constexpr, N: tl.constexpr, KB: tl.constexpr):
    """c = a @ b of float16, with tiles in shared memory."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, KB)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, K, KB):
        left = tl.load(a + m[:, None] * K + (start + k)[None, :])
        total += tl.dot(left, tl.load(b + (start + k)[:, None] * N + n[None, :]))
    tl.store(c + m[:, None] * N + n[None, :], total)


@defined("product", "QQQi")
def _product(sizes, a, b, c, k):
    left, right = tensor(a, 128 * k, torch.float16), tensor(b, 128 * k, torch.float16)
    tensor(c, 128 * 128).copy_((left.reshape(128, k).float() @ right.reshape(k, 128).float()).reshape(-1))


@triton.jit
def workspace(x, n, BLOCK: tl.constexpr):
    """Doubles x through a tensor descriptor, for which Triton allocates memory."""
    described = tl.make_tensor_descriptor(x, shape=[n], strides=[1], block_shape=[BLOCK])
    described.store([tl.program_id(0) * BLOCK], described.load([tl.program_id(0) * BLOCK]) * 2)


@triton.jit
def described(source, BLOCK: tl.constexpr):
    """Takes a tensor descriptor."""
    source.store([0], source.load([0]) * 2)


def grid(n: int) -> Any:
    """Returns the grid of kernels with a work item for each of n elements."""
    return lambda given: (triton.cdiv(n, given["BLOCK"]),)
