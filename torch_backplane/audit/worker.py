"""The process that runs cases and prints one line of JSON per result.

    python -m torch_backplane.audit.worker REQUEST

REQUEST is a JSON file with `targets`, `titles` and `bytes`. TORCH_BACKPLANE_DRIVERS selects the audit's driver, which
has one device per target, in the same order.
"""

from __future__ import annotations

import functools
import json
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torch_backplane import _C, drivers
from torch_backplane.audit.bounds import FAMILIES, RANDOM
from torch_backplane.audit.cases import cases
from torch_backplane.audit.compiled import CompiledBody
from torch_backplane.audit.driver import ALL, NONE, SAMPLES, AuditDevice, Launch
from torch_backplane.audit.fused import FusedKernel, fused_kernels, kernels_of
from torch_backplane.audit.model import figures, fill_of_planned
from torch_backplane.audit.operands import Operands
from torch_backplane.audit.workloads import Workload
from torch_backplane.compile_report import Report, recorder

CHECKED_BYTES = 512 << 10  # maximum size of an operand when results are compared with the CPU's


@dataclass(frozen=True)
class Measurement:
    """The launches of a case on a device, the minimum bytes to move, and the ATen operators that were called.

    Args:
        fused: the kernels of compiled graphs among the launches.
    """

    launches: list[Launch]
    min_bytes: int
    operators: list[str]
    fused: list[FusedKernel] = field(default_factory=list)


def measure(case: Workload, place: torch.device, device: AuditDevice, elements: int, computes: str) -> Measurement:
    """Measure the first call of a case, which also compiles its kernels.

    If `computes` is NONE, the launches are only planned, up to an operator that fails because it needs a value.
    """
    unknown = (Exception,) if computes == NONE else ()
    device.set(counts=False, computes=computes if FAMILIES[case.family].samples_inputs else ALL)
    report = compiled_graphs()
    report.compilations.clear()
    body = case.make(place, elements)
    torch.accelerator.synchronize(place)
    if isinstance(body, CompiledBody):  # PyTorch compiles no function in a dispatch mode such as Operands
        with device.watched(computes) as found:
            result = body()
            torch.accelerator.synchronize(place)
        fused = fused_kernels(found(), kernels_of(report), device.modelled)
        return Measurement(found(), body.min_bytes(result), ["backplane::compiled_graph"], fused)
    with suppress(*unknown), device.watched(computes) as found, Operands() as operands:
        body()
        torch.accelerator.synchronize(place)
    return Measurement(found(), operands.bytes, operands.names)


@functools.cache
def compiled_graphs() -> Report:
    """Return the record of the graphs that are compiled, which begins with the first call."""
    return recorder.start()


def compare(case: Workload, place: torch.device, expected: list[torch.Tensor], elements: int) -> str:
    """Compare the results loosely. Returns a description of the first difference, or ""."""
    torch.manual_seed(0)
    found = results(case, place, elements)
    if len(found) != len(expected):
        return f"{len(found)} results, expected {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return f"shape {tuple(one.shape)}, expected {tuple(other.shape)}"
        if FAMILIES[case.family].random or case.title in RANDOM:
            continue
        if one.dtype.is_floating_point or one.dtype.is_complex:
            if not torch.allclose(one, other, rtol=1e-2, atol=1e-2 * _scale(other), equal_nan=True):
                return f"results differ by {(one - other).abs().max().item():.3g}"
        elif len(expected) == 1 and (one != other).double().mean() > 1e-3:  # else indices among equal elements
            return "results differ"
    return ""


def _scale(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()].abs()
    return finite.double().mean().item() if finite.numel() else 0.0


def results(case: Workload, place: torch.device, elements: int) -> list[torch.Tensor]:
    given = case.make(place, elements)()
    return [one.detach().cpu() for one in tree_leaves(given) if isinstance(one, torch.Tensor)]


def run(case: Workload, places: list[torch.device], devices: list[AuditDevice], nbytes: int) -> list[dict[str, Any]]:
    """Run a case on all targets, and return one result per target."""
    family = FAMILIES[case.family]
    size = min(nbytes, family.max_bytes)
    elements, checked = size // 4, min(size, CHECKED_BYTES) // 4
    torch.manual_seed(0)
    expected = results(case, torch.device("cpu"), checked)
    found = []
    for place, device in zip(places, devices, strict=True):
        start = time.perf_counter()
        record: dict[str, Any] = {"case": case.title, "family": case.family, "elements": elements, "bytes": nbytes}
        record |= {"operators": [], "fallbacks": []}
        record |= {"target": device.properties.name, "figures": None, "launches": [], "fused": []}
        try:
            _C.reset_fallback_counts()
            device.set(counts=False)
            record["wrong"] = compare(case, place, expected, checked)
            measured = measure(case, place, device, elements, SAMPLES if family.only_samples else ALL)
            record["operators"] = measured.operators
            record["fallbacks"] = sorted(_C.fallback_counts())
            if record["fallbacks"] and not measured.launches:
                continue
            made = figures(measured.launches, device.modelled, measured.min_bytes)
            if made.fill < 1 and size < nbytes:
                planned = measure(case, place, device, nbytes // 4, NONE).launches
                made = replace(made, fill=fill_of_planned(measured.launches, planned, device.modelled))
            record["figures"] = asdict(made)
            record["launches"] = [asdict(one) for one in measured.launches]
            record["fused"] = [asdict(one) for one in measured.fused]
        except Exception as error:
            record["wrong"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:
            device.set(counts=False)
            torch.get_device_module("bp").empty_cache()
            record["took"] = time.perf_counter() - start
            found.append(record)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    count = len(request["targets"])
    places = [torch.device("bp", index) for index in range(count)]
    devices: list[Any] = [drivers.device(index) for index in range(count)]
    by_title = cases()
    for title in request["titles"]:
        print(json.dumps({"begins": title}), flush=True)
        for one in run(by_title[title], places, devices, request["bytes"]):
            print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
