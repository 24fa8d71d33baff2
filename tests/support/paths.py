"""Folders of the repository that tests refer to."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
SWEEPS = TESTS / "sweeps"
