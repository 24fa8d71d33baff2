"""Tables and plots of docs/ from the files in results/, which tools/record.py writes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "results", ROOT / "docs" / "images"

# Title and explanation of each benchmark, by the start of its files' names.
BENCHMARKS = {
    "overhead": ("Overhead of one operator", "The ratio is the device's time divided by the CPU's: lower is better."),
    "dynamic": ("New shapes", "Calls with a size that is new, used again, known from before, and the first one."),
    "compile": (
        "torch.compile",
        "Milliseconds of compiled calls, and the times of eager PyTorch on the device and of eager and compiled "
        "PyTorch on the CPU, divided by them: higher is better.",
    ),
    "kernels": ("Kernels", "The ratio is the CPU's time divided by the device's: higher is better."),
    "training": ("Training steps", "The ratio is the CPU's time divided by the device's: higher is better."),
    "distributed": ("Collectives", "The ratio is the device's time divided by that of CPU tensors: lower is better."),
    "generate": ("Text generation", "Tokens per second. The ratio is new lengths divided by repeated ones."),
    "graphs": ("Graphs", "The columns named by … are the other way's time divided by the replay's: higher is better."),
}
WORST = 25  # kernels in a list of the worst
STATES = {"native": "●", "library": "◆", "fallback": "◐", "refused": "○", "failed": "✕", "empty": ""}


def load(name: str) -> dict[str, Any]:
    """The result file `name`."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def names(start: str) -> list[str]:
    """Names of result files that start with `start` and a hyphen."""
    return sorted(path.stem for path in RESULTS.glob(f"{start}-*.json"))


def source(name: str, found: Mapping[str, Any]) -> str:
    """Where the figures come from, in one line."""
    machine = found["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, torch {machine['torch']}"
    return f"`{found['command']}`, {found['date']}, commit {found['commit']}; {where}; `results/{name}.json`."


def cell(value: object) -> str:
    """A value for a table: floats with three significant digits."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without nested objects: their numbers get the names of both. Flags and empty texts are left out."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict) and key != "served":
            found |= {f"{key} {name}": one for name, one in value.items() if isinstance(one, (int, float))}
        elif isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != "":
            found[key] = value
    return found


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> Iterator[str]:
    """Rows of numbers and texts as a Markdown table."""
    columns = columns or [key for key, value in rows[0].items() if isinstance(value, (str, int, float))]
    yield "| " + " | ".join(one.replace("_", " ") for one in columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(cell(row.get(one, "")) for one in columns) + " |"


def plot(name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A bar for the ratio of each row, if rows have ratios."""
    ratios = [row["ratio"] for row in rows if isinstance(row.get("ratio"), float)]
    if len(ratios) != len(rows):
        return
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = name  # the same file for the same figures
    from matplotlib import pyplot

    titles = [str(next(iter(row.values()))) for row in rows]
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.28 * len(rows)), layout="constrained")
    axes.barh(titles, ratios, color="#4c72b0")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("ratio")
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)
    yield f"![ratios of {name}](images/{name}.svg)\n"


def benchmarks() -> Iterator[str]:
    """A section for each benchmark and driver."""
    for start, (title, explanation) in BENCHMARKS.items():
        for name in names(start):
            found = load(name)
            rows = [flat(row) for row in found["data"].get("results") or found["data"]["prompts"]]
            if "elements" in rows[0]:  # of several sizes, the largest
                rows = [row for row in rows if row["elements"] == max(one["elements"] for one in rows)]
            yield f"## {title}: {name.removeprefix(start + '-')}\n"
            yield f"{explanation} {source(name, found)}\n"
            yield from plot(name, rows)
            yield from table(rows)
            yield ""


def conformance() -> Iterator[str]:
    """Totals of each conformance run, and the findings that fail."""
    rows, failed = [], []
    for name in names("conformance"):
        found = load(name)
        entries = found["data"]["entries"]
        counts = Counter(one["status"] for one in entries)
        with_fallbacks = sum(bool(one["fallbacks"]) for one in entries)
        rows.append(
            {
                "run": f"`{found['command'].partition('torch_backplane ')[2]}`",
                "date": found["date"],
                "entries": len(entries),
                **{state: counts[state] for state in ("passed", "failed", "refused")},
                "with fallbacks": with_fallbacks,
            }
        )
        failed += [(name, one["op"], one["dtype"], one["failures"]) for one in entries if one["status"] == "failed"]
    if not rows:
        return
    yield from table(rows)
    yield ""
    if failed:
        yield "| run | operator | dtype | failure |"
        yield "|---|---|---|---|"
    for name, op, dtype, failures in failed:
        yield f"| {name} | `{op}` | {dtype} | {cell('; '.join(failures))} |"


def state_of(entry: Mapping[str, Any]) -> str:
    """The key of STATES of an entry of a conformance run."""
    if entry["status"] != "passed":
        return str(entry["status"])
    return "fallback" if entry["fallbacks"] else "library" if entry["libraries"] else "native"


def operators() -> Iterator[str]:
    """Operators and dtypes: what an OpenCL device does in each."""
    states: dict[str, dict[str, str]] = {}
    dtypes: dict[str, None] = {}
    for name in (one for one in names("conformance") if one.startswith("conformance-opencl")):
        for entry in load(name)["data"]["entries"]:
            dtypes[entry["dtype"]] = None
            states.setdefault(entry["op"], {})[entry["dtype"]] = STATES[state_of(entry)]
    if not states:
        return
    for name in names("ops"):
        required = load(name)["data"]["counts"]["required"]
        yield (
            f"Of the {required['total']} ATen operators that PyTorch implements for the CPU and does not compose of "
            f"others, {required['native']} are native and {required['fallback']} fall back (`results/{name}.json`).\n"
        )
    counts = Counter(mark for marks in states.values() for mark in marks.values())
    yield ", ".join(f"{mark} {state}: {counts[mark]:,}" for state, mark in STATES.items() if mark) + "\n"
    yield "| operator | " + " | ".join(dtypes) + " |"
    yield "|---|" + ":-:|" * len(dtypes)
    for op, marks in sorted(states.items()):
        yield f"| `{op}` | " + " | ".join(marks.get(dtype, "") for dtype in dtypes) + " |"


def overview() -> Iterator[str]:
    """The main figures of the results, for the README."""

    def row(name: str, text: str) -> dict[str, Any]:
        """The first row of a benchmark whose title contains a text."""
        rows = load(name)["data"]["results"]
        found: dict[str, Any] = next(one for one in rows if text in one.get("title", one.get("workload", "")))
        return found

    states = Counter(state_of(one) for one in load("conformance-opencl")["data"]["entries"])
    agree = states["native"] + states["library"] + states["fallback"]
    required = load("ops-opencl")["data"]["counts"]["required"]
    call, on_host = row("overhead-opencl", "a * b"), row("overhead-host", "a * b")
    step, graph = row("training-opencl", "GPT"), row("graphs-opencl", "GPT")
    ratios = [one["ratio"] for one in load("training-opencl")["data"]["results"]]
    machine = load("training-opencl")["machine"]
    yield f"| | OpenCL (PoCL) and `cpu` on the same {machine['cpu']} processor, {machine['cores']} cores |"
    yield "|---|---|"
    yield (
        f"| [Correctness](docs/conformance.md) | {states.total():,} pairs of operator and dtype of PyTorch's operator "
        f"database: {agree:,} agree with `cpu`, {states['failed']} differ, {states['refused']} are refused, "
        f"{states['empty']} have nothing to compare |"
    )
    yield (
        f"| [Operators](docs/operators.md) | of {required['total']} ATen operators that a backend must provide, "
        f"{required['native']} are native, {required['fallback']} fall back to `cpu` |"
    )
    yield (
        f"| [Overhead](docs/benchmarks.md) | one small `a * b`: {call['device_us']:.1f} µs; "
        f"{on_host['device_us']:.1f} µs on a host device; {call['cpu_us']:.1f} µs on `cpu` |"
    )
    yield (
        f"| [Training](docs/benchmarks.md) | a step of a small GPT: {step['device_ms']:.1f} ms; {step['other_ms']:.1f} "
        f"ms on `cpu`; five models: {min(ratios):.2g} to {max(ratios):.2g} times the speed of `cpu` |"
    )
    yield (
        f"| [Graphs](docs/benchmarks.md#graphs-opencl) | a replayed step of a GPT: {graph['replay_us'] / 1000:.1f} ms; "
        f"eagerly {graph['eager_us'] / 1000:.1f} ms |"
    )


def ecosystem() -> Iterator[str]:
    """A table for each driver: the programs of other libraries, whether they passed, and their times."""
    for name in names("ecosystem"):
        found = load(name)
        results = found["data"]["results"]
        passed = sum(row["status"] == "passed" for row in results)
        yield f"## {name.removeprefix('ecosystem-')}\n"
        yield f"{passed} of {len(results)} programs pass. {source(name, found)}\n"
        rows = []
        for row in results:
            done = row["status"] == "passed"
            fallbacks = sorted(row.get("fallbacks", {}).items(), key=lambda one: (-one[1], one[0]))
            rows.append(
                {
                    "library": f"{row['library']} {row['version']}".rstrip(),
                    "what ran": row["program"],
                    "result": "passed" if done else f"failed: {row['error']}",
                    "fallbacks": ", ".join(f"`{op}` {count}" for op, count in fallbacks),
                    "s": row.get("seconds", ""),
                    "s on cpu": row.get("cpu_seconds", ""),
                    "speed": row["cpu_seconds"] / row["seconds"] if done else "",
                }
            )
        # On host devices, all operators are PyTorch's CPU kernels.
        yield from table(rows, [one for one in rows[0] if one != "fallbacks" or not name.endswith("-host")])
        yield ""


def models() -> Iterator[str]:
    """A sentence for each run of tests/models, and a table of the models that did not pass."""
    for name in names("models"):
        found = load(name)
        results = found["data"]["results"]
        passed = sum(row["status"] == "passed" for row in results)
        driver, how = name.rpartition("-")[2], "compiled" if found["data"]["compiled"] else "without `torch.compile`"
        yield f"On {driver}, {how}, {passed} of {len(results)} models pass. {source(name, found)}\n"
        if broken := [f"`{row['model']}`" for row in results if row.get("graph_breaks")]:
            yield f"Dynamo breaks the graphs of {', '.join(broken)}.\n"
        others = [row for row in results if row["status"] != "passed"]
        if others:
            reasons = [row.get("reason") or row.get("error", row["status"]) for row in others]
            rows = [{"model": row["model"], "reason": why} for row, why in zip(others, reasons, strict=True)]
            yield from table(rows)
            yield ""


def ptxas() -> Iterator[str]:
    """What NVRTC and ptxas made of kernels: a row for each architecture, findings, and the worst kernels."""
    found = load("ptxas")
    data = found["data"]
    kernels, place = data["kernels"], data["figures"].index
    architectures = [one for one in kernels[0] if one.startswith("sm_")]
    yield f"{data['programs']:,} programs have {len(kernels):,} different kernels. NVRTC {data['nvrtc']}."
    yield f"{source('ptxas', found)}\n"
    rows = []

    def count(what: str, architecture: str) -> int:
        return sum(one["what"] == what and one["architecture"] == architecture for one in data["findings"])

    for name in architectures:
        columns = zip(*(one[name] for one in kernels if name in one), strict=True)
        figures = dict(zip(data["figures"], columns, strict=True))
        ordered = sorted(figures["registers"])
        rows.append(
            {
                "architecture": name,
                "compiled": len(ordered),
                "not for it": len(kernels) - len(ordered) - count("error", name),
                "errors": count("error", name),
                "spill": sum(map(bool, figures["spilled"])),
                "private memory": sum(map(bool, figures["stack"])),
                "lack instructions": count("lacks", name),
                "registers: median": ordered[len(ordered) // 2],
                "95 %": ordered[len(ordered) * 95 // 100],
                "most": ordered[-1],
                "occupancy: mean": sum(figures["occupancy"]) / len(ordered),
                "below 0.5": sum(one < 0.5 for one in figures["occupancy"]),
                "least": min(figures["occupancy"]),
            }
        )
    yield from table(rows)
    yield "\n### Findings\n"
    if data["findings"]:
        yield from table(data["findings"], ["what", "kernel", "case", "architecture", "detail", "reason"])
    else:
        yield "None."

    def listing(figure: str, worst_first: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        shown: dict[str, Mapping[str, Any]] = {}
        for one in worst_first:
            shown.setdefault(one["kernel"], one)
        for one in list(shown.values())[:WORST]:
            values = {name: one[name][place(figure)] if name in one else "" for name in architectures}
            yield f"| `{one['kernel']}` | {cell(one['case'])} | {' | '.join(map(cell, values.values()))} |"

    def worst(one: Mapping[str, Any], figure: str) -> list[float]:
        return [one[name][place(figure)] for name in architectures if name in one]

    heading = f"| kernel | program | {' | '.join(architectures)} |\n|---|---|{'---|' * len(architectures)}"
    yield "\nOf kernels with the same name, the next lists have the worst."
    yield f"\n### Registers per work item, the {WORST} kernels with the most\n"
    yield heading
    yield from listing("registers", sorted(kernels, key=lambda one: -max(worst(one, "registers"))))
    yield f"\n### Occupancy, the {WORST} kernels with the least\n"
    yield heading
    yield from listing("occupancy", sorted(kernels, key=lambda one: min(worst(one, "occupancy"))))
    yield "\n### Bytes of private memory per work item\n"
    in_memory = sorted(
        (one for one in kernels if any(worst(one, "stack"))), key=lambda one: -max(worst(one, "stack"))
    )
    if in_memory:
        yield heading
        yield from listing("stack", in_memory)
    else:
        yield "None."
    yield "\n### Programs that end early\n"
    by_error: dict[str, list[str]] = {}
    for title, error in data["early"].items():
        by_error.setdefault(error[:100], []).append(title.removeprefix("op: "))
    yield "| error | programs |"
    yield "|---|---|"
    for error, titles in sorted(by_error.items()):
        yield f"| {cell(error)} | {', '.join(f'`{one}`' for one in titles)} |"


def gpu() -> Iterator[str]:
    """What `make gpu` found: its steps, and the measured figures."""
    if not (RESULTS / "gpu.json").exists():
        yield "Not run on a GPU."
        return
    found = load("gpu")
    machine = found["machine"]
    yield f"{'; '.join(machine['gpus'])}; {machine['cpu']}, {machine['cores']} cores, {machine['system']}, "
    yield f"torch {machine['torch']}. `make gpu`, {found['date']}, commit {found['commit']}; `results/gpu.json`.\n"
    rows = []
    for one in found["steps"]:
        counts = one["tests"] or (one["data"] or {}).get("totals", {})
        words = ("passed", "failed", "error", "skipped", "refused", "left_out")
        told = ", ".join(f"{counts[word]:,} {word.replace('_', ' ')}" for word in words if counts.get(word))
        state = f"{one['status']}: {one['reason']}" if one["reason"] else one["status"]
        rows.append({"step": one["what"], "result": state, "of it": told, "seconds": one["seconds"]})
    yield from table(rows)
    for one in found["steps"]:
        data = one["data"] or {}
        if "benchmarks" in one["name"] and data:
            other = f"torch.{data['other']}" if data["other"] else "torch.cuda (not available)"
            yield f"\n### {one['what']}\n"
            yield f"The ratio is the time of {other} divided by that of bp ({data['driver']}): higher is better.\n"
            yield from table(
                [{key: "" if value is None else value for key, value in row.items()} for row in data["results"]],
                ["title", "unit", "bp", "other", "ratio", "error"],
            )
        if one["name"] == "predictions" and data:
            yield f"\n### {one['what']}\n"
            yield f"Of {data['cases']} cases, {data['within_factor_2']} take between half and twice the time that the "
            yield f"audit's traffic and the bandwidth of a copy predict. The median is {data['median_ratio']:.2f}.\n"
            worst = sorted(data["results"], key=lambda row: -row.get("ratio", math.inf))[:WORST]
            yield from table(worst, ["case", "traffic", "predicted_ms", "measured_ms", "ratio", "error"])
        if one["name"] == "traffic" and data:
            yield f"\n### {one['what']}\n"
            yield "Nsight Compute has counted the bytes, with empty caches.\n"
            yield from table(data["results"], ["case", "predicted_bytes", "measured_bytes", "ratio"])
