"""Programs as lines of PyTorch code, and their findings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import torch
import torch.nn.functional as F

from torch_backplane import plans

NAME = re.compile(r"\bt\d+\b")
ASSIGNED = re.compile(r"^(t\d+) = ")


@dataclass(frozen=True)
class Step:
    """A line of a program.

    Args:
        line: the code. Tensors have the names t0, t1, …; `d` and `e` are two devices of the tested driver.
        operator: the name for findings in this line.
        random: the values are not compared with the CPU.
    """

    line: str
    operator: str
    random: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"line": self.line, "operator": self.operator, "random": self.random}

    @property
    def assigned(self) -> str | None:
        found = ASSIGNED.match(self.line)
        return found and found[1]

    @property
    def used(self) -> set[str]:
        return set(NAME.findall(ASSIGNED.sub("", self.line)))


@dataclass
class Finding:
    """A difference between the device and the CPU."""

    kind: str
    operator: str
    message: str
    steps: list[Step] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.kind}: {self.operator}"


def make(shape, dtype, seed, kind="normal"):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "whole":
        x = x.round()
    elif kind == "unit":
        x = torch.rand(shape, generator=generator, dtype=torch.float64)
    elif kind == "special":
        numbers = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 60000.0, -3e-5, torch.inf, -torch.inf, torch.nan]).double()
        x = numbers[torch.randint(len(numbers), shape, generator=generator)]
    if dtype == torch.bool:
        return x > 0
    if dtype.is_complex:
        return torch.complex(x, x.flip(0) if x.dim() else -x).to(dtype)
    if not dtype.is_floating_point:
        x = (3 * x).nan_to_num(7, 90, -90).round().clamp(-120, 120)
        return (x if dtype.is_signed else x.abs()).to(dtype)
    return x.to(dtype)


def namespace(device: str, other: str) -> dict[str, Any]:
    return {"torch": torch, "F": F, "make": make, "nan": nan, "inf": inf, "d": device, "e": other}


def living(names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in names.items() if NAME.fullmatch(name))


def needed(steps: Iterable[Step], also: set[int] | None = None) -> list[Step]:
    """Returns the steps whose names are defined by earlier steps."""
    known: set[str] = set()
    kept = []
    for step in steps:
        if step.used <= known:
            kept.append(step)
            if step.assigned:
                known.add(step.assigned)
            if step.line.startswith("del "):
                known -= step.used
    return kept


def fresh_plans() -> None:
    """Discards all plans, so that a program behaves the same in every process."""
    plans.clear()


def as_program(
    steps: list[Step], finding: Finding, device: str, other: str, settings: dict[str, str], raised: set[int]
) -> str:
    """Returns a standalone program that runs the steps on the CPU and on the device.

    Args:
        settings: environment variables to show in the header.
        raised: indices of the steps that raise an error on both.
    """
    head = ["import torch", "import torch.nn.functional as F", "from torch import inf, nan"]
    if any("make(" in step.line for step in steps):
        head += ["", "", inspect.getsource(make).replace("  # type: ignore[no-untyped-def]", "").rstrip()]
    body: list[str] = []
    for at, step in enumerate(steps[:-1]):
        body += _guarded(step.line) if at in raised else [f"    {step.line}"]
    last = steps[-1]
    shown = sorted(last.used | ({last.assigned} if last.assigned else set()), key=lambda name: int(name[1:]))
    body += [
        "    try:",
        f"        {last.line}",
        "        torch.bp.synchronize()",
        "    except Exception as error:",
        "        print(d, type(error).__name__, error)",
    ]
    body += [f"    print(d, {name!r}, locals().get({name!r}))" for name in shown]
    around = " ".join(f"{name}={value}" for name, value in settings.items())
    first = finding.message.splitlines()[0][:200] if finding.message else ""
    return "\n".join(
        [
            f"# {finding.key}: {first}",
            *([f"# {around} python …"] if around else []),
            *head,
            "",
            "",
            "def program(d, e):",
            *body,
            "",
            "",
            'program("cpu", "cpu")',
            f'program("{device}", "{other}")',
        ]
    )


def _guarded(line: str) -> list[str]:
    return ["    try:", f"        {line}", "    except Exception:", "        pass"]
