"""Compares the audit's predictions with times on a GPU: bytes that operators move, and time.

    python benchmarks/predictions.py --driver cuda --json predictions.json
    python benchmarks/predictions.py --driver cuda --match softmax
    python benchmarks/predictions.py --driver cuda --match "sum of" --ncu --json traffic.json

The audit (`results/audit.json`) predicts the bytes that each operator moves. The time that they should take follows
from the bandwidth of a copy on the measured device, and from the audit's time of a launch. A ratio of measured time to
this time well above 1 means that the operator moves more bytes than predicted, or that something else limits it. The
predictions are for another GPU, whose kernels can differ. The JSON file is written after every case.

With --ncu, Nsight Compute counts the bytes that the kernels move between the GPU and its memory, and no times are
measured. It clears the caches before each kernel.
"""

from __future__ import annotations

import csv
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
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
            yield {"case": row["case"], "family": row["family"], "error": gpu.told(error)}
        else:
            bandwidth = bandwidth or row["figures"]["bytes"] * size / row["elements"] / taken
            yield compared(row, size, taken, bandwidth)
        gc.collect()
        torch.get_device_module("bp").empty_cache()


# --- bytes, with Nsight Compute ---------------------------------------------------------------------------------------

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
MARKER = "bp_bitwise_not"  # a kernel that no case launches


def call_once(rows: list[dict[str, Any]], elements: int, device: torch.device) -> None:
    """Calls each case once, for ncu. A kernel marks its begin and its end."""
    flag = torch.zeros(1, dtype=torch.int8).to(device)
    for row in rows:
        body = cases()[row["case"]].make(device, elements or row["elements"])
        body()
        torch.bitwise_not(flag)
        body()
        torch.bitwise_not(flag)
        torch.get_device_module("bp").synchronize()


def bytes_of_cases(log: str) -> list[float]:
    """The bytes of each case, from ncu's table of kernels.

    Raises:
        ValueError: there is no table.
    """
    lines = [line for line in log.splitlines() if line.startswith('"')]
    kernels = [row for row in csv.DictReader(lines) if row["ID"]]  # the row after the heading has units
    if not kernels:
        raise ValueError(f"ncu has profiled no kernel: {log[:500]}")
    sums, is_inside = [], False
    for row in kernels:
        if row["Kernel Name"].partition("(")[0] == MARKER:
            is_inside = not is_inside
            sums += [0.0] if is_inside else []
        elif is_inside:
            sums[-1] += sum(float(row[name].replace(",", "")) for name in METRICS)
    return sums


def traffic(rows: list[dict[str, Any]], elements: int, options: list[str]) -> list[dict[str, Any]]:
    """Runs this program with --once under ncu, and compares the bytes of each case with the prediction."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ncu.csv")
        command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS)]
        subprocess.run([*command, "--log-file", str(file), sys.executable, __file__, *options, "--once"], check=True)
        counted = bytes_of_cases(file.read_text(encoding="utf-8"))
    found = []
    for row, moved in zip(rows, counted, strict=True):
        predicted = row["figures"]["bytes"] * (elements or row["elements"]) / row["elements"]
        found.append(
            {"case": row["case"], "predicted_bytes": predicted, "measured_bytes": moved, "ratio": moved / predicted}
        )
    return found


def main(
    driver: report.Driver = None,
    match: report.Match = "",
    target: Annotated[str, typer.Option(help="a part of the name of the audit's target")] = "RTX 4090",
    audit: Annotated[Path, typer.Option(help="the audit's results")] = ROOT / "results" / "audit.json",
    elements: Annotated[int, typer.Option(min=0, help="elements of operands; 0: as in the audit")] = 0,
    rounds: report.Rounds = 3,
    ncu: Annotated[bool, typer.Option("--ncu", help="count bytes with Nsight Compute, instead of times")] = False,
    once: Annotated[bool, typer.Option("--once", help="only call each case once, for --ncu")] = False,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="write JSON after every case")] = "",
) -> None:
    """Compares the audit's predictions with times on a GPU."""
    listed = predictions(audit, target)
    chosen = [listed[0], *report.chosen(listed[1:], match, lambda row: row["case"])]
    if ncu:
        options = ["--match", match, "--target", target, "--audit", str(audit), "--elements", str(elements)]
        compared_bytes = traffic(chosen, elements, [*options, *(["--driver", driver] if driver else [])])
        for one in compared_bytes:
            print(f"{one['case']}: {one['measured_bytes']:,.0f} bytes, predicted × {one['ratio']:.2f}")
        if json_file:
            gpu.write(json_file, summary(compared_bytes) | {"results": compared_bytes})
        return
    place, environment = report.begin(driver, 0)
    if once:
        call_once(chosen, elements, place)
        return
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
    """The number of cases, and of those that are between half and twice the prediction."""
    ratios = [one["ratio"] for one in found if "ratio" in one]
    return {
        "cases": len(found),
        "median_ratio": statistics.median(ratios),
        "within_factor_2": sum(0.5 <= one <= 2 for one in ratios),
    }


if __name__ == "__main__":
    typer.run(main)
