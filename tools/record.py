"""Runs a command that prints JSON, and stores its output in results/ with commit, machine, date and command.

    python tools/record.py overhead-opencl -- python benchmarks/overhead.py --driver opencl --json

tools/pages.py makes the tables and plots of docs/ from these files.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


def machine() -> dict[str, Any]:
    """The processor, the number of cores, the memory in GiB, and versions."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.platform()),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def commit() -> str:
    """The abbreviated commit, with "-dirty" if tracked files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def compact(data: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what the pages do not show of the reports that have some megabytes: of conformance and the audit."""
    if "targets" in data:
        results = [{key: value for key, value in one.items() if key != "launches"} for one in data["results"]]
        return {**data, "results": results}
    if "entries" not in data:
        return data
    from torch_backplane.conformance.report import KINDS

    entries = []
    for one in data["entries"]:
        failures = sorted({each["message"].partition("\n")[0][:160] for each in one["findings"] if KINDS[each["kind"]]})
        shown = {
            key: one[key] for key in ("op", "dtype", "status", "samples", "compared", "fallbacks", "libraries")
        }
        entries.append(shown | {"failures": failures})
    return {"seconds": data["seconds"], "totals": data["totals"], "entries": entries}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the file in results/, without .json")
    parser.add_argument("command", nargs="+", help="prints one JSON object")
    given = parser.parse_args()
    ran = subprocess.run(given.command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    try:
        data = json.loads(ran.stdout)
    except json.JSONDecodeError as error:
        print(f"{given.name}: the command printed no JSON ({error}), exit code {ran.returncode}", file=sys.stderr)
        return ran.returncode or 1
    RESULTS.mkdir(exist_ok=True)
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": shlex.join(given.command),
        "exit_code": ran.returncode,
        "machine": machine(),
        "data": compact(data),
    }
    path = RESULTS / f"{given.name}.json"
    text = json.dumps(found, indent=1)
    if isinstance(found["data"], dict):  # one line for each row of a long list
        rows = {key: rows for key, rows in found["data"].items() if isinstance(rows, list) and len(rows) > 100}
        shown = {**found, "data": {**found["data"], **{key: f"<{key}>" for key in rows}}}
        text = json.dumps(shown, indent=1)
        for key, listed in rows.items():
            text = text.replace(f'"<{key}>"', "[\n" + ",\n".join(map(json.dumps, listed)) + "\n]")
    path.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
