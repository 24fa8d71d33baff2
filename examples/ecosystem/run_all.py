"""Runs every script of this folder on one driver, and prints their results as one JSON object.

    python examples/ecosystem/run_all.py --driver opencl
    python examples/ecosystem/run_all.py --driver host timm peft
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LIMIT = 900  # seconds for a script, on a slow machine


def row_of_crash(name: str, reason: str) -> dict[str, Any]:
    """The row of a script that printed no results."""
    return {"library": name, "version": "", "program": "", "status": "failed", "error": reason}


def rows_of(name: str, driver: str) -> list[dict[str, Any]]:
    """Runs `try_<name>.py`. Returns a row for each of its programs."""
    command = [sys.executable, "-W", "ignore", str(FOLDER / f"try_{name}.py")]
    # Some libraries look for devices when they are imported. Fallbacks are counted, so they need no warning.
    environment = {**os.environ, "TORCH_BACKPLANE_DRIVERS": driver, "TORCH_BACKPLANE_FALLBACK": "silent"}
    try:
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [row_of_crash(name, f"not done after {LIMIT} seconds")]
    if ran.returncode:
        print(ran.stderr, file=sys.stderr)
    try:
        found = json.loads(ran.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return [row_of_crash(name, f"exit code {ran.returncode}: {(ran.stderr.splitlines() or [''])[-1]}")]
    return [{"library": found["library"], "version": found["version"], **row} for row in found["programs"]]


def main() -> int:
    known = sorted(path.stem.removeprefix("try_") for path in FOLDER.glob("try_*.py"))
    parser = argparse.ArgumentParser(description="Runs the scripts of examples/ecosystem on one driver.")
    parser.add_argument("--driver", required=True, help="Backplane's driver")
    parser.add_argument("names", nargs="*", help=f"scripts (default all): {', '.join(known)}")
    given = parser.parse_args()
    if unknown := set(given.names) - set(known):
        parser.error(f"no script for {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    rows = []
    for name in given.names or known:
        for row in rows_of(name, given.driver):
            print(f"{row['status']:<7} {row['library']}: {row['program']} {row.get('error', '')}", file=sys.stderr)
            rows.append(row)
    print(json.dumps({"results": rows}))
    return int(any(row["status"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
