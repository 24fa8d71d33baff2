"""Command line: `python tests/fuzz --seconds 600 --driver opencl`, or `make fuzz SECONDS=600 DRIVER=opencl`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.campaign import Campaign


def tell(item: dict[str, Any]) -> None:
    print(f"\n#### {item['finding']} (program {item['seed']})\n{item['program']}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description="Compares random programs on a device with the CPU.")
    parser.add_argument("--seconds", type=float, default=60, help="duration in seconds (default: 60)")
    parser.add_argument("--programs", type=int, default=1 << 40, help="maximum number of programs")
    parser.add_argument("--driver", default="opencl", help="driver of the devices (default: opencl)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first program (default: from the time)")
    options = parser.parse_args()
    first = int(time.time()) % 10**7 * 1000 if options.seed is None else options.seed
    print(f"programs from seed {first}, driver {options.driver}", flush=True)
    report = Campaign(options.driver, first, options.seconds, options.programs, tell).run()
    print(f"\n{report.programs} programs, {report.steps} lines; {len(report.findings)} findings")
    for key, count in sorted(report.counts.items(), key=lambda pair: -pair[1]):
        print(f"  {count:4} {key}")
    for item in report.unrepeated:
        print(f"  not repeated: {item['finding']} (program {item['seed']}): {item['message'][:200]}")
    print(
        f"rounding differences, by float64: {report.rounding}; other accepted differences: {sum(report.meant.values())}"
    )
    for reason, count in report.meant.items():
        print(f"  {count:4} {reason}")
    return 1 if report.findings or report.unrepeated else 0


if __name__ == "__main__":
    sys.exit(main())
