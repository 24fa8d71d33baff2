"""Tests that each operator is declared once, so the files of torch_backplane/operators can be imported in any order."""

from __future__ import annotations

from pathlib import Path

import forked

CODE = """
from collections import Counter

import torch
from torch_backplane.planning import declare, registry

counts, register = Counter(), declare._register

def counted(overload, *arguments):
    counts[str(overload)] += 1
    register(overload, *arguments)

declare._register = counted
import torch_backplane.operators
assert len(counts) == len(registry.planned) > 900, len(counts)
assert not (again := [name for name, count in counts.items() if count > 1]), again
"""


def test_each_operator_is_declared_once(tmp_path: Path) -> None:
    result = forked.run(CODE, tmp_path)
    assert result.returncode == 0, result.stderr
