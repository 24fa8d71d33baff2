"""Target files: descriptions of devices that are not present, to generate their kernels and plans.

A target file is JSON with `name`; `figures`, all fields of a `Target`, with dtypes by name; and the parameters of a
roofline, `bytes_per_second` of memory and `operations_per_second` of float32. Other keys are for readers: in the files
that ship with Backplane (`targets/`), `sources` says where figures were found, and `assumed` gives the reason for
figures that have no source.
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
    """A device that a target file describes."""

    name: str
    target: Target
    bytes_per_second: int
    operations_per_second: int


def read_target(which: str | Path) -> Modelled:
    """Reads a target file, given by its path or, if it ships with Backplane, by its name.

    Raises:
        ValueError: the file cannot be read or is not valid JSON, or a figure is missing, invalid or unknown. The
            message names the file and the figure.
    """
    path = SHIPPED.get(str(which), Path(which))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = f"the targets that ship with Backplane are {', '.join(SHIPPED)}"
        raise ValueError(f"the target {which} cannot be read: {error.strerror}; {known}") from error
    except ValueError as error:
        raise ValueError(f"the target {path} is not valid JSON: {error}") from error
    try:
        return _modelled(content)
    except ValueError as error:
        raise ValueError(f"the target {path}: {error}") from error


def _modelled(content: Any) -> Modelled:
    if not isinstance(content, dict) or not isinstance(content.get("figures"), dict):
        raise ValueError("it must be an object that contains an object 'figures'")
    name, figures = content.get("name"), content["figures"]
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"name is {name!r}, and must be a string that is not empty")
    known = [one.name for one in fields(Target)]
    if missing := [one for one in known if one not in figures]:
        raise ValueError(f"figures lacks {', '.join(missing)}")
    if unknown := [one for one in figures if one not in known]:
        raise ValueError(f"figures contains {', '.join(unknown)}, which Target does not have")
    for one in ("bytes_per_second", "operations_per_second"):
        value = content.get(one)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{one} is {value!r}, and must be a whole number above 0")
    target = Target(**figures | {one: _dtypes(one, figures[one]) for one in ("atomics", "matrix_dtypes")})
    return Modelled(
        name=name,
        target=target,
        bytes_per_second=content["bytes_per_second"],
        operations_per_second=content["operations_per_second"],
    )


def _dtypes(figure: str, content: Any) -> Any:
    return frozenset(_dtype(figure, one) for one in content) if isinstance(content, list) else content


def _dtype(figure: str, name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{figure} contains {name!r}, which is not a dtype")
    return found
