"""Records a training step on bp:0 with torch.profiler and draws its trace: docs/images/profile.svg.

TORCH_BACKPLANE_DRIVERS=opencl python tools/profile_picture.py
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "profile", "font.size": 8}

from matplotlib import pyplot  # noqa: E402

PATH = Path(__file__).resolve().parents[1] / "docs" / "images" / "profile.svg"
ROWS = ("program", "operators", "runtime calls", "kernels on bp:0")
COLOURS = dict(zip(ROWS, ("#dddddd", "#8fb1d9", "#e0a458", "#6aa56a"), strict=True))
TRIES = 100
CHARACTER = 0.007  # width of a letter, as a part of the picture's width


def trace() -> list[dict[str, Any]]:
    """The events of a training step of a small network: of several steps, the one with the least time on the host.

    That is the time before the synchronization, and between the last kernel and its end. In other steps, other
    processes interrupted the program.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).to("bp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(128, 256, device="bp"), torch.randint(256, (128,), device="bp")

    def step() -> None:
        with record_function("forward"):
            loss = F.cross_entropy(model(x), y)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        with record_function("synchronize"):
            torch.bp.synchronize()  # type: ignore[attr-defined]

    for _ in range(5):  # plans the operators and builds the kernels
        step()
    found = []
    for _ in range(TRIES):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as recorded:
            step()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            recorded.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text(encoding="utf-8"))["traceEvents"]
        found.append([one for one in events if one.get("ph") == "X" and one.get("cat") != "Trace"])
    return min(found, key=lambda events: times(events)[0])


def times(events: list[dict[str, Any]]) -> tuple[float, float, float]:
    """The host's time, as above, and when the step begins and ends."""
    parts = {one["name"]: (one["ts"], one["ts"] + one["dur"]) for one in events if one["cat"] == "user_annotation"}
    (begin, _), (waits, end) = parts["forward"], parts["synchronize"]
    kernels_end = max(one["ts"] + one["dur"] for one in events if one["cat"] == "kernel")
    return waits - begin + end - kernels_end, begin, end


def rows(events: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The row of each event that is shown. Of nested operators, the innermost one that makes a call is shown."""
    operators = [one for one in events if one["cat"] == "cpu_op" and one["name"].startswith("aten::")]
    for event in events:
        if event["cat"] == "user_annotation" and "#" not in event["name"]:
            yield "program", event
        elif event["cat"] == "kernel":
            yield "kernels on bp:0", event
        elif event["cat"] == "privateuse1_runtime":
            yield "runtime calls", event
            around = [one for one in operators if one["tid"] == event["tid"] and within(event, one)]
            if around:
                yield "operators", min(around, key=lambda one: float(one["dur"]))


def within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"])


def draw(events: list[dict[str, Any]]) -> None:
    _, begin, end = times(events)
    width = end - begin
    figure, axes = pyplot.subplots(figsize=(10, 2.2), layout="constrained")
    for row, event in rows(events):
        place, title = len(ROWS) - 1 - ROWS.index(row), event["name"].removeprefix("aten::").removeprefix("bp_")
        left = (event["ts"] - begin) / 1000
        axes.barh(place, event["dur"] / 1000, 0.8, left, color=COLOURS[row], edgecolor="white", linewidth=0.3)
        if event["dur"] / width > CHARACTER * len(title):
            axes.text(left + event["dur"] / 2000, place, title, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(ROWS)), reversed(ROWS))
    axes.set_xlim(0, width / 1000)
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PATH, metadata={"Date": None})


if __name__ == "__main__":
    draw(trace())
