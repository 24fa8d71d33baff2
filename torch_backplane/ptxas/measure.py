"""Compiles kernels for architectures, in parallel processes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from torch_backplane.kernels.dialects import CudaCpp
from torch_backplane.ptxas.collect import Kernel
from torch_backplane.ptxas.nvrtc import CompileError, compile_text, resources
from torch_backplane.ptxas.occupancy import ARCHITECTURES, occupancy
from torch_backplane.ptxas.sass import disassemble, lacking, machine_code, meant

_OPTIONS = (*CudaCpp().compile_options, "--ptxas-options=-v", "--diag-suppress=177")  # 177: unused functions
# Instructions that an architecture lacks. The target of the recorded kernels has them (device.TARGET).
_NEWER = {"sm_75": re.compile(r"\bmma\.sync[.\w]*\.bf16")}
_TOGETHER = 32  # kernels that are disassembled together


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What became of a kernel on an architecture.

    Args:
        error: the compiler's log, if it did not compile. The other figures are then 0.
        warning: what the compiler warned of.
        registers, stack, spilled, shared: as in nvrtc.Resources.
        occupancy: as in occupancy.occupancy.
        lacking: kinds of instructions (sass.meant) that the text means and the machine code lacks.
    """

    error: str = ""
    warning: str = ""
    registers: int = 0
    stack: int = 0
    spilled: int = 0
    shared: int = 0
    occupancy: float = 0.0
    lacking: tuple[str, ...] = ()


def measure(kernels: Sequence[Kernel], architectures: Sequence[str]) -> list[dict[str, Measured]]:
    """Compile kernels, and return the figures of each by architecture, without architectures that lack an instruction.

    Raises:
        Missing: NVRTC or nvdisasm is not installed.
    """
    by_architecture = [_measure(kernels, one) for one in architectures]
    return [
        {name: one for name, one in zip(architectures, row, strict=True) if one is not None}
        for row in zip(*by_architecture, strict=True)
    ]


def _measure(kernels: Sequence[Kernel], architecture: str) -> list[Measured | None]:
    found: list[Measured | None] = []
    code: dict[int, bytes] = {}
    for number, kernel in enumerate(kernels):
        if architecture in _NEWER and _NEWER[architecture].search(kernel.text):
            found.append(None)
            continue
        try:
            made = compile_text(kernel.text, _OPTIONS, architecture)
        except CompileError as error:
            found.append(Measured(error=str(error)))
            continue
        used = resources(made.log, kernel.entry)
        warning = "\n".join(line for line in made.log.splitlines() if "warning" in line)
        fill = occupancy(ARCHITECTURES[architecture], kernel.group, used.registers, used.shared)
        found.append(Measured(warning=warning, **vars(used), occupancy=fill))
        if meant(kernel.text):
            code[number] = machine_code(made.code, kernel.entry)
    for number, listing in zip(code, disassemble([*code.values()], architecture) if code else (), strict=True):
        one = found[number]
        assert one is not None
        found[number] = replace(one, lacking=lacking(meant(kernels[number].text), listing))
    return found


def measure_all(kernels: Sequence[Kernel], architectures: Sequence[str], jobs: int) -> Iterator[dict[str, Measured]]:
    """Measure kernels in `jobs` processes, and yield the figures of each, in order."""
    parts = [kernels[start : start + _TOGETHER] for start in range(0, len(kernels), _TOGETHER)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for part in pool.map(functools.partial(measure, architectures=architectures), parts):
            yield from part
