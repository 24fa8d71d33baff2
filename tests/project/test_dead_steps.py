"""Tests tests/support/dead_steps.py, which finds plan steps without effect."""

from __future__ import annotations

import pytest
from dead_steps import dead_steps

LAUNCH = "launch bp_add on 8×1×1 items in groups of 8×1×1: "
COPY = "copy 4 bytes from argument 0 to allocation 0"


@pytest.mark.parametrize(
    ("lines", "dead"),
    [
        (["allocate 0: 4 bytes", f"{LAUNCH}allocation 0 (written), 8", "return tensor in allocation 0"], []),
        (["allocate 0: 4 bytes", "return argument 0"], [0]),
        (["allocate 0: 0 bytes", "return tensor in allocation 0"], [0]),
        (["allocate 0: 4 bytes", f"{LAUNCH}allocation 0 (written), argument 0", "free 0", "return argument 0"], [0, 1]),
        ([f"{LAUNCH}argument 0 (written), argument 1"], []),
        ([f"{LAUNCH}kept 0 (written), argument 1"], []),  # error words
        (["on the host sscal_ at 1 with argument 0, 8"], []),
        (["copy 4 bytes from argument 0 to argument 0"], [0]),
        (["copy 4 bytes from argument 0 + 4 to argument 0"], []),
        (
            [
                "allocate 0: 4 bytes", f"{LAUNCH}allocation 0 (written), 8", COPY,
                "return tensor in allocation 0",
            ],
            [1],
        ),
        (
            [
                "allocate 0: 8 bytes", f"{LAUNCH}allocation 0 (written), 8", COPY,
                "return tensor in allocation 0",
            ],
            [],
        ),
        (
            [
                "allocate 0: 4 bytes", "allocate 1: 4 bytes", f"{LAUNCH}allocation 0 (written), argument 0",
                f"{LAUNCH}allocation 1 (written), allocation 0", "free 0", "return tensor in allocation 1",
            ],
            [],
        ),
        (
            [
                "allocate 0: 4 bytes", "allocate 1: 4 bytes", f"{LAUNCH}allocation 0 (written), argument 0",
                f"{LAUNCH}allocation 1 (written), allocation 0", "return argument 0",
            ],
            [0, 1, 2, 3],
        ),
    ],
)  # fmt: skip
def test_steps_without_effect_are_found(lines: list[str], dead: list[int]) -> None:
    assert dead_steps(lines) == [lines[at] for at in dead]


def test_unknown_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown step"):
        dead_steps(["fill 4 bytes"])
