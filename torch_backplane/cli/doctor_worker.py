"""The part of `doctor` that uses drivers and devices: a separate process, because both can crash it.

    python -m torch_backplane.cli.doctor_worker FILE FIRST

Writes a line of JSON to FILE for everything that it finds, and tries the devices from bp:FIRST on.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from torch_backplane import _C, drivers

ROWS, INPUTS, HIDDEN = 256, 512, 1024  # of the program: some milliseconds on a CPU
LONGEST = 1.0  # seconds of repetitions
MOST_DIFFERENCE = 1e-3  # relative to the largest element; the rounding errors of float32 are about 1e-6


def main(path: str, first: int) -> None:
    """Report the drivers' findings, then run the program on each device from `first` on."""
    with open(path, "a", encoding="utf-8") as file:

        def tell(kind: str, **facts: Any) -> None:
            print(json.dumps({"kind": kind, **facts}), file=file, flush=True)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                findings = drivers.findings()
            except ValueError as error:  # a variable is malformed
                tell("setting", text=str(error))
                return
        tell("drivers", findings={name: [asdict(one) for one in found] for name, found in findings.items()})
        tell("warnings", texts=[str(one.message).removeprefix("torch_backplane: ") for one in caught])
        step = program(torch.device("cpu"))
        expected, cpu_seconds = step(), fastest(step)
        tell("cpu", seconds=cpu_seconds)
        for index in range(first, _C.device_count()):
            properties = _C.device_properties(index)
            facts = {
                "index": index, "driver": properties.driver, "name": properties.name,
                "hardware": drivers.device(index).properties.kind,
            }  # fmt: skip
            tell("begin", **facts)
            try:
                tell("device", **facts, **trial(torch.device("bp", index), expected))
            except Exception as error:
                tell("device", **facts, error=f"{type(error).__name__}: {error}")
        # Again, as other programs and the threads of OpenCL implementations for CPUs can slow down one measurement.
        tell("cpu", seconds=min(cpu_seconds, fastest(step)))


def trial(device: torch.device, expected: list[torch.Tensor]) -> dict[str, Any]:
    """Run the program on a device.

    Args:
        device: the device.
        expected: the results of the program on the CPU.

    Returns:
        The seconds of the first run, and of the fastest later run; the largest difference of the results from the
        CPU's, relative to the largest element; the number of operators that fell back to the CPU with copies.
    """
    before = fallbacks()
    start = time.perf_counter()
    step = program(device)
    results = step()
    first = time.perf_counter() - start
    after = fallbacks()
    difference = max(
        ((result - one).abs().max() / one.abs().max()).nan_to_num(torch.inf).item()
        for result, one in zip(results, expected, strict=True)
    )
    return {
        "first": first,
        "seconds": fastest(step),
        "difference": difference,
        "works": difference < MOST_DIFFERENCE,
        "fallbacks": 0 if _C.device_properties(device.index).host_accessible else after - before,
    }


def program(device: torch.device) -> Callable[[], list[torch.Tensor]]:
    """Return a training step of two layers on a device: it returns the loss and the gradients, on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device)

    x, y = numbers(ROWS, INPUTS), numbers(ROWS, INPUTS)
    weights = [numbers(HIDDEN, INPUTS).requires_grad_(), numbers(INPUTS, HIDDEN).requires_grad_()]

    def step() -> list[torch.Tensor]:
        hidden = torch.nn.functional.gelu(torch.nn.functional.linear(x, weights[0]) / INPUTS**0.5)
        out = torch.nn.functional.linear(hidden, weights[1]) / HIDDEN**0.5
        loss = torch.nn.functional.mse_loss(out, y)
        return [one.detach().cpu() for one in (loss, *torch.autograd.grad(loss, weights))]

    return step


def fastest(step: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several runs."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < LONGEST:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times)


def fallbacks() -> int:
    """Return how many operators have fallen back to the CPU in this process."""
    return sum(_C.fallback_counts().values())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
