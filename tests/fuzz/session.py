"""A process that runs programs and prints each finding as a line of JSON.

    python tests/fuzz/session.py '{"first": 0, "seconds": 60, "progress": "/tmp/lines"}'

Each line of a program is written to the file `progress` before it runs, so that a program that crashes is known.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DEVICE, OTHER = "bp:0", "bp:1"
SHRUNK = 2  # maximum number of examples per key that are shrunk


class Session:
    """Runs programs and collects their findings."""

    def __init__(self, progress: str, say: Any) -> None:
        self.progress = open(progress, "w+")  # noqa: SIM115
        self.say = say
        self.steps = 0
        self.programs = 0
        self.counts: dict[str, int] = {}
        self.findings: list[Any] = []

    def announce(self, step: Any) -> None:
        self.steps += 1
        self.progress.write(json.dumps(step.to_json()) + "\n")
        self.progress.flush()

    def note(self, findings: list[Any]) -> None:
        for finding in findings:
            self.counts[finding.key] = self.counts.get(finding.key, 0) + 1
            if self.counts[finding.key] <= SHRUNK:
                self.findings.append(finding)

    def program(self, seed: int) -> None:
        from fuzz import generator

        self.progress.seek(0)
        self.progress.truncate()
        self.programs += 1
        self.findings = []
        generator.program(seed, DEVICE, OTHER, self.note, self.announce)
        for finding in self.findings:
            self.say(self.example(finding, seed))

    def example(self, finding: Any, seed: int) -> dict[str, Any]:
        """Shrinks a finding and returns it in JSON form."""
        from fuzz import shrinking
        from fuzz.programs import as_program

        found = shrinking.replayed(finding.steps, finding.key, DEVICE, OTHER)
        kind = finding.kind
        steps = finding.steps
        verdict = "repeats" if found else "does not repeat"
        if found and kind.endswith("values") and shrinking.excused(found.steps, DEVICE, OTHER):
            verdict = "excused"
        elif found:
            steps = shrinking.shrink(
                found.steps, lambda steps: shrinking.replayed(steps, finding.key, DEVICE, OTHER) is not None
            )
            again = shrinking.replayed(steps, finding.key, DEVICE, OTHER)
            if again:
                finding, steps = again, again.steps
            if kind.endswith("values") and shrinking.excused(steps, DEVICE, OTHER):
                verdict = "excused"
        raised = shrinking.raising(steps[:-1], DEVICE, OTHER)
        settings = {name: value for name, value in os.environ.items() if name.startswith("TORCH_BACKPLANE_")}
        return {
            "finding": finding.key,
            "message": finding.message,
            "seed": seed,
            "verdict": verdict,
            "steps": [step.to_json() for step in steps],
            "program": as_program(steps, finding, DEVICE, OTHER, settings, raised),
        }


def run(task: dict[str, Any]) -> None:
    import torch

    torch.bp.init()
    warnings.simplefilter("ignore")
    import torch_backplane

    torch_backplane._C.set_fallback_policy(torch_backplane._C.FallbackPolicy.silent)

    def say(item: dict[str, Any]) -> None:
        print(json.dumps(item), flush=True)

    if "replay" in task:
        from fuzz import shrinking
        from fuzz.programs import Step

        found = shrinking.replayed([Step(**step) for step in task["replay"]], "", DEVICE, OTHER)
        say({"replayed": found is not None})
        return
    session = Session(task["progress"], say)
    start = time.monotonic()
    seed = task["first"]
    while time.monotonic() - start < task["seconds"] and session.programs < task.get("programs", 1 << 60):
        say({"program": seed})
        session.program(seed)
        seed += 1
        say({"programs": session.programs, "steps": session.steps, "next": seed, "counts": session.counts})
    say({"done": True})


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
