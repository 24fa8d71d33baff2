"""Command line: `python tests/models --driver opencl --compile`, or `make models ARGS=--compile`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.expected import EXPECTED_FAILURES, Case
from models.model import MODULES
from models.worker import Worker

SECONDS = 600  # for a model, on a slow machine
UNEXPECTED = ("failed", "unexpectedly passed")


def selected(only: list[str], library: str, names: list[str]) -> list[str]:
    """The names that `--only` selects: a library, or library/name.

    Raises:
        SystemExit: the library has no model of a name.
    """
    if not only or library in only:
        return names
    wanted = [one.partition("/")[2] for one in only if one.startswith(f"{library}/")]
    if unknown := set(wanted) - set(names):
        sys.exit(f"{library} has no model {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return wanted


def rows_of(library: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tries the selected models of a library, and yields the rows of the report."""
    try:
        worker = Worker(library, options.compile)
    except RuntimeError as error:
        yield {"model": library, "version": "", "status": "failed", "error": f"its models cannot be loaded: {error}"}
        return
    try:
        for name in selected(options.only, library, worker.names):
            row = {"model": f"{library}/{name}", "version": worker.version}
            try:
                row |= worker.try_model(name, SECONDS)
            except RuntimeError as error:
                row |= {"status": "failed", "error": str(error)}
                worker.close()
                worker = Worker(library, options.compile)
            yield with_expectation(row, Case(row["model"], options.driver, options.compile))
    finally:
        worker.close()


def with_expectation(row: dict[str, Any], case: Case) -> dict[str, Any]:
    """The row, with another status if the model is in EXPECTED_FAILURES."""
    if case not in EXPECTED_FAILURES:
        return row
    status = "failed as expected" if row["status"] == "failed" else "unexpectedly passed"
    return {**row, "status": status, "reason": EXPECTED_FAILURES[case]}


def line_of(row: dict[str, Any]) -> str:
    counts = [f"{row.get('seconds', 0):.1f} s", f"difference {row.get('difference', 0):.1e}"]
    for name in ("graphs", "recompiles", "graph_breaks", "fallbacks"):
        count = row.get(name, 0)
        if number := sum(count.values()) if isinstance(count, dict) else count:
            counts.append(f"{number} {name.replace('_', ' ')}")
    why = " ".join(f"[{row[key]}]" for key in ("reason", "error") if key in row)
    return f"{row['status']:<8} {row['model']}: {', '.join(counts)} {why}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="models", description="Runs public models on bp, and compares with the CPU.")
    parser.add_argument("--driver", default="opencl", help="driver of the device (default: opencl)")
    parser.add_argument("--compile", action="store_true", help="compile the models with torch.compile")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help=f"a library ({', '.join(MODULES)}), or library/model"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON on stdout")
    options = parser.parse_args()
    if unknown := {one.partition("/")[0] for one in options.only} - set(MODULES):
        parser.error(f"no library {', '.join(sorted(unknown))}; there are {', '.join(MODULES)}")
    # Some libraries look for devices when they are imported. Fallbacks are counted, so they need no warning.
    # TF32, the default of convolutions, has three digits.
    os.environ |= {"TORCH_BACKPLANE_DRIVERS": options.driver, "TORCH_BACKPLANE_FALLBACK": "silent"}
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    rows = []
    for library in MODULES:
        if options.only and not any(one.partition("/")[0] == library for one in options.only):
            continue
        for row in rows_of(library, options):
            print(line_of(row), file=sys.stderr, flush=True)
            rows.append(row)
    passed = sum(row["status"] == "passed" for row in rows)
    fallbacks = sum(sum(row.get("fallbacks", {}).values()) for row in rows)
    recompiles = max((row.get("recompiles", 0) for row in rows), default=0)
    print(
        f"{passed} of {len(rows)} models pass; {fallbacks} fallbacks; at most {recompiles} recompiles of a model",
        file=sys.stderr,
    )
    if options.json:
        print(json.dumps({"compiled": options.compile, "results": rows}))
    return int(any(row["status"] in UNEXPECTED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
