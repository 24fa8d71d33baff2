"""Targets as files: devices that are not here, for text and plans as they would have them.

A file is JSON: `name`; `figures`, all of a `Target`, dtypes by their names; and what a roofline is made of,
`bytes_per_second` of memory and `operations_per_second` of float32. What else it has is for people: those that ship
with Backplane (`targets/`) say in `sources` where a figure was read, and in `assumed` which ones were not, and why they
are so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from torch_backplane.kernels.target import Target

SHIPPED = {path.stem: path for path in sorted((Path(__file__).parent / "targets").glob("*.json"))}


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """A device that a file describes."""

    name: str
    target: Target
    bytes_per_second: int
    operations_per_second: int


def read_target(which: str | Path) -> Modelled:
    """The device of a file, or of one that ships with Backplane, by its name.

    Raises:
        ValueError: the file is none, or a figure is missing, absurd or unknown. The message names file and figure.
    """
    path = SHIPPED.get(str(which), Path(which))
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = f"those that ship are {', '.join(SHIPPED)}"
        raise ValueError(f"the target {which} cannot be read: {error.strerror}; {known}") from error
    except ValueError as error:
        raise ValueError(f"the target {path} is no JSON: {error}") from error
    try:
        return _modelled(said)
    except ValueError as error:
        raise ValueError(f"the target {path}: {error}") from error


def _modelled(said: Any) -> Modelled:
    if not isinstance(said, dict) or not isinstance(said.get("figures"), dict):
        raise ValueError("it has to be an object with an object «figures»")
    name, figures = said.get("name"), said["figures"]
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"name is {name!r}, and must be a string that is not empty")
    known = [one.name for one in fields(Target)]
    if missing := [one for one in known if one not in figures]:
        raise ValueError(f"figures lacks {', '.join(missing)}")
    if unknown := [one for one in figures if one not in known]:
        raise ValueError(f"figures has {', '.join(unknown)}, which a Target has not")
    for one in ("bytes_per_second", "operations_per_second"):
        value = said.get(one)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{one} is {value!r}, and must be a whole number above 0")
    target = Target(**figures | {"atomics": _atomics(figures["atomics"])})
    return Modelled(
        name=name,
        target=target,
        bytes_per_second=said["bytes_per_second"],
        operations_per_second=said["operations_per_second"],
    )


def _atomics(said: Any) -> Any:
    return frozenset(map(_dtype, said)) if isinstance(said, list) else said


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"atomics names {name!r}, which is no dtype")
    return found
