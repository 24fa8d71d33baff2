"""Tests of this folder that are expected to fail, with the reason, by the devices on which they do."""

from __future__ import annotations

EXPECTED: dict[str, dict[str, str]] = {"all": {}, "host": {}, "opencl": {}}
