"""What the scripts of this folder share: running programs on a device and on the CPU, and comparing their results.

Each script tries one library. It lists programs: functions that get a device, run something with the library, check
what they can by themselves, and return numbers and tensors. `main` runs each program on the device and on the CPU,
compares the results, and prints one line of JSON. The fastest of three runs counts: the first one builds kernels.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

Results = Mapping[str, "torch.Tensor | float | Sequence[float]"]


@dataclass(frozen=True)
class Program:
    """A program that is tried.

    Attributes:
        title: What runs, for the table.
        run: Gets a device. Returns named results, which must agree with those of the CPU.
        tolerance: Of the results, relative to the largest magnitude of each.
        runs: How often it runs on each device.
    """

    title: str
    run: Callable[[torch.device], Results]
    tolerance: float = 1e-4
    runs: int = 3


def falls(losses: Sequence[float], factor: float = 0.9) -> list[float]:
    """Returns the losses. Raises an AssertionError unless the last is less than `factor` times the first one."""
    found = [float(one) for one in losses]
    assert found[-1] < factor * found[0], f"the loss does not fall: {found[0]:.4g} … {found[-1]:.4g}"
    return found


def on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the tensor. Raises an AssertionError if it is on a device of another type."""
    assert tensor.device.type == device.type, f"a result is on {tensor.device}, not on {device}"
    return tensor


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _timed(program: Program, device: torch.device) -> tuple[Results, float]:
    times = []
    for _ in range(program.runs):
        torch.manual_seed(0)
        numpy.random.seed(0)
        start = time.perf_counter()
        results = program.run(device)
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return results, min(times)


def _difference(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest magnitude of the expected values, if that is above 1."""
    found, expected = (torch.as_tensor(one).detach().cpu().to(torch.float64) for one in (found, expected))
    assert found.shape == expected.shape, f"shape {tuple(found.shape)}, on the CPU {tuple(expected.shape)}"
    if expected.numel() == 0:
        return 0.0
    assert found.isfinite().all(), "a result is not finite"
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1.0))


def _tried(program: Program, device: torch.device) -> dict[str, Any]:
    from torch_backplane import _C

    _C.reset_fallback_counts()
    results, seconds = _timed(program, device)
    fallbacks = _C.fallback_counts()
    expected, cpu_seconds = _timed(program, torch.device("cpu"))
    differences = {name: _difference(one, expected[name]) for name, one in results.items()}
    worst = max(differences, key=lambda name: differences[name])
    assert differences[worst] <= program.tolerance, (
        f"{worst} differs from the CPU's by {differences[worst]:.2g}, above {program.tolerance:.2g}"
    )
    return {
        "status": "passed",
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "difference": differences[worst],
        "fallbacks": fallbacks,
    }


def main(library: str, programs: Sequence[Program], distribution: str | None = None) -> None:
    """Runs the programs on `--device` and on the CPU, and prints one line of JSON. Exits with 1 if one fails.

    Args:
        library: The library's name in the table.
        programs: What to run.
        distribution: The library's name as a package, if it is another one.
    """
    parser = argparse.ArgumentParser(description=f"Runs programs of {library} on a device and compares with the CPU.")
    parser.add_argument("--device", default="bp", help="a bp device (default bp); see TORCH_BACKPLANE_DRIVERS, too")
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.accelerator.set_device_index(device.index or 0)
    rows = []
    for program in programs:
        try:
            row = _tried(program, device)
        except Exception as error:
            traceback.print_exc()
            row = {"status": "failed", "error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        rows.append({"program": program.title, "tolerance": program.tolerance, **row})
    version = importlib.metadata.version(distribution or library)
    print(json.dumps({"library": library, "version": version, "programs": rows}))
    raise SystemExit(any(row["status"] != "passed" for row in rows))
