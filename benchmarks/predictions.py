"""Compares the audit's predictions with times on a GPU: bytes that operators move, and time.

    python benchmarks/predictions.py --driver cuda --json predictions.json
    python benchmarks/predictions.py --driver cuda --match softmax

The audit (`results/audit.json`) predicts the bytes that each operator moves. The time that they should take follows
from the bandwidth of a copy on the measured device, and from the audit's time of a launch. A ratio of measured time to
this time well above 1 means that the operator moves more bytes than predicted, or that something else limits it. The
predictions are for another GPU, whose kernels can differ. The JSON file is written after every case.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import gpu
import report
import torch
import typer
from interleaving import interleaved_times, seconds

from torch_backplane.audit.cases import cases
from torch_backplane.audit.model import LAUNCH_SECONDS

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("copies", "pointwise", "reductions", "rows", "scans")  # those that memory limits
COPY = "copy"


def predictions(file: Path, target: str) -> list[dict[str, Any]]:
    """The audit's rows for a target, alternating between the families; the copy first."""
    found = json.loads(file.read_text(encoding="utf-8"))["data"]["results"]
    rows = [one for one in found if target in one["target"] and one["family"] in FAMILIES and one["case"] in cases()]
    if not any(one["case"] == COPY for one in rows):
        raise typer.BadParameter(f"{file} has no prediction of {COPY!r} for {target!r}", param_hint="--target")
    families: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in sorted(rows, key=lambda one: one["case"] != COPY):
        families[one["family"]].append(one)
    columns = itertools.zip_longest(*sorted(families.values(), key=lambda rows: rows[0]["case"] != COPY))
    return [one for column in columns for one in column if one is not None]


def measured(case: str, elements: int, device: torch.device, rounds: int) -> float:
    """The median seconds of a case."""
    side = gpu.side_of(str(device))
    body = cases()[case].make(device, elements)
    seconds(body, device, 1, side.finish)
    once = seconds(body, device, 1, side.finish)
    (times,) = interleaved_times([body], [side], max(1, min(1000, int(gpu.SECONDS / once))), rounds)
    return statistics.median(times)


def compared(row: Mapping[str, Any], elements: int, taken: float, bandwidth: float) -> dict[str, Any]:
    """A row of the report.

    Args:
        row: the audit's.
        elements: of the operand, for which bytes are scaled.
        taken: measured seconds.
        bandwidth: bytes per second of a copy.
    """
    figures = row["figures"]
    moved = figures["bytes"] * elements / row["elements"]
    predicted = figures["launches"] * LAUNCH_SECONDS + moved / bandwidth
    return {
        "case": row["case"],
        "family": row["family"],
        "traffic": figures["traffic"],
        "predicted_bytes": moved,
        "predicted_ms": predicted * 1e3,
        "measured_ms": taken * 1e3,
        "ratio": taken / predicted,
    }


def results(rows: list[dict[str, Any]], elements: int, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Measures the rows. The first is the copy, whose bandwidth the predictions of all are based on."""
    bandwidth = 0.0
    for row in rows:
        size = elements or row["elements"]
        try:
            taken = measured(row["case"], size, device, rounds)
        except Exception as error:
            if not bandwidth:
                raise
            yield {"case": row["case"], "family": row["family"], "error": f"{type(error).__name__}: {error}"[:300]}
        else:
            bandwidth = bandwidth or row["figures"]["bytes"] * size / row["elements"] / taken
            yield compared(row, size, taken, bandwidth)
        gc.collect()
        torch.get_device_module("bp").empty_cache()


def main(
    driver: report.Driver = None,
    match: report.Match = "",
    target: Annotated[str, typer.Option(help="a part of the name of the audit's target")] = "RTX 4090",
    audit: Annotated[Path, typer.Option(help="the audit's results")] = ROOT / "results" / "audit.json",
    elements: Annotated[int, typer.Option(min=0, help="elements of operands; 0: as in the audit")] = 0,
    rounds: report.Rounds = 3,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="write JSON after every case")] = "",
) -> None:
    """Compares the audit's predictions with times on a GPU."""
    listed = predictions(audit, target)
    chosen = [listed[0], *report.chosen(listed[1:], match, lambda row: row["case"])]
    place, environment = report.begin(driver, 0)
    environment |= {"target": chosen[0]["target"], "rounds": rounds}
    found: list[dict[str, Any]] = []
    for one in results(chosen, elements, place, rounds):
        found.append(one)
        print(one["case"], one.get("error") or f"{one['measured_ms']:.3f} ms, predicted × {one['ratio']:.2f}", sep=": ")
        if json_file:
            gpu.write(json_file, environment | summary(found) | {"results": found})
    if any("error" in one for one in found):
        raise typer.Exit(1)


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The number of cases, and of those that take between half and twice the predicted time."""
    ratios = [one["ratio"] for one in found if "ratio" in one]
    return {
        "cases": len(found),
        "median_ratio": statistics.median(ratios),
        "within_factor_2": sum(0.5 <= one <= 2 for one in ratios),
    }


if __name__ == "__main__":
    typer.run(main)
