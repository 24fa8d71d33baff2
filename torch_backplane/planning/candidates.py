"""Heavy operators have several implementations, by their libraries: kernels that are generated, the host's, others'.

The first one that takes a call has it, but for a library that the user prefers, which comes first
(`torch_backplane.libraries`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch_backplane.libraries import LIBRARIES, preferred


class Candidate(NamedTuple):
    """One implementation.

    Args:
        library: its name, one of the family's.
        refuses: why it does not take a call, in words that go on with «it», None where it does; called with what the
            family describes its calls by. It may look at dtypes, devices and numbers of dimensions.
    """

    library: str
    refuses: Callable[..., str | None]


class Candidates:
    """The implementations of a family of operators, of each of its libraries one.

    Raises:
        ValueError: they are not those of the family.
    """

    def __init__(self, family: str, *candidates: Candidate) -> None:
        self.family = family
        self._candidates = {one.library: one for one in candidates}
        if tuple(self._candidates) != LIBRARIES[family]:
            raise ValueError(f"{family} have the libraries {LIBRARIES[family]}, and got {tuple(self._candidates)}")

    def choose(self, *described: Any) -> str:
        """The library that computes a call."""
        first = preferred(self.family)
        order = sorted(self._candidates.values(), key=lambda one: one.library != first)
        return next(one.library for one in order if one.refuses(*described) is None)
