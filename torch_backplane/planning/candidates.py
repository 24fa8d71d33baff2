"""Heavy operators have several implementations, by their libraries: kernels that are generated, the host's, others'.

Of those that take a call, and have room, the one that is expected to be the quickest has it, but for a library that the
user prefers, which comes first (`torch_backplane.preferences`), or the one that was the quickest when a call like it
was tuned (`torch_backplane.tuning`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torch_backplane import _C, tuning
from torch_backplane.planning.costs import GENERATED, unstated
from torch_backplane.planning.launch import dialect_of
from torch_backplane.preferences import DEFAULT, LIBRARIES, count_without_room, preferred, workspace


class Candidate(NamedTuple):
    """One implementation.

    Args:
        library: its name, one of the family's.
        refuses: why it does not take a call, in words that go on with «it», None where it does; called with what the
            family describes its calls by. It may look at dtypes, devices and numbers of dimensions.
        forms: ways of it other than the usual one, which only calls that are tuned are computed by; called likewise.
        cost: of a call, relative to `costs.GENERATED`, in whole numbers; the cheapest candidate runs. Called likewise.
            It may look at sizes, too: dynamic-shape plans are made on either side of where the order changes. None, or
            a function that returns None: as `costs.unstated` says.
        workspace: how many bytes it cannot do without, beside operands and results; called with one of its forms, ""
            for the usual one, and likewise.
    """

    library: str
    refuses: Callable[..., str | None]
    forms: Callable[..., Sequence[str]] = lambda *described: ()
    cost: Callable[..., int | None] | None = lambda *described: GENERATED
    workspace: Callable[..., int] = lambda form, *described: 0


def _cost(candidate: Candidate, first: torch.Tensor, *described: Any) -> int:
    stated = None if candidate.cost is None else candidate.cost(first, *described)
    return unstated(dialect_of(first.device).target) if stated is None else stated


class Candidates:
    """The implementations of a family of operators, of each of its libraries one.

    Raises:
        ValueError: they are not those of the family.
    """

    def __init__(self, family: str, *candidates: Candidate) -> None:
        self.family = family
        self._candidates = {one.library: one for one in candidates}
        self._failed: set[tuple[str, int]] = set()  # libraries, and devices on which they have
        if tuple(self._candidates) != LIBRARIES[family]:
            raise ValueError(f"{family} have the libraries {LIBRARIES[family]}, and got {tuple(self._candidates)}")

    def choose(self, first: torch.Tensor, *described: Any, problem: Callable[[], tuning.Problem] | None = None) -> str:
        """The library that computes a call, with its form where that is not the usual one: "generated/tile=32".

        A candidate whose workspace is more than `preferences.workspace()` is left out, unless there is no other one.

        Args:
            first, described: what candidates are asked with; first is on the call's device.
            problem: the call as it is tuned, looked at only where something is.
        """
        takers = [
            one
            for one in self._candidates.values()
            if (one.library, first.get_device()) not in self._failed and one.refuses(first, *described) is None
        ]
        if len(takers) > 1:
            takers = [one for one in takers if self._has_room(one, "", first, *described)] or takers[-1:]
        if len(takers) > 1:
            takers.sort(key=lambda one: _cost(one, first, *described))
        wanted = tuning.forced(self.family) or preferred(self.family)
        library, _, form = wanted.partition("/")
        for one in takers:
            if one.library == library:
                return wanted if form and form in self._forms(one, first, *described) else library
        if wanted == DEFAULT and problem is not None and tuning.context.tunes(self.family):
            forms = (
                [one.library, *(f"{one.library}/{form}" for form in self._forms(one, first, *described))]
                for one in takers
            )
            names = [name for each in forms for name in each]
            if len(names) > 1:
                cache_bytes = dialect_of(first.device).target.cache_bytes
                return tuning.winner(self.family, problem(), first.device, names, cache_bytes)
        return takers[0].library

    def _forms(self, candidate: Candidate, *described: Any) -> list[str]:
        """Those that there is room for."""
        return [form for form in candidate.forms(*described) if self._has_room(candidate, form, *described)]

    def _has_room(self, candidate: Candidate, form: str, *described: Any) -> bool:
        limit = workspace()
        if limit is None or candidate.workspace(form, *described) <= limit:
            return True
        count_without_room(f"{self.family}: {candidate.library}{'/' if form else ''}{form}")
        return False

    def has_library_for(self, first: torch.Tensor, *described: Any) -> bool:
        """Whether there is another one than kernels that takes a call."""
        return any(
            one.library != "generated" and one.refuses(first, *described) is None for one in self._candidates.values()
        )

    def tries(self, library: str, first: torch.Tensor, compute: Callable[[], None]) -> bool:
        """Computes a call by a library that may fail, such as for want of memory. False where it has: then it is not
        asked again on this device, and the next one takes the call. A trial of a tuner gets the error.
        """
        try:
            compute()
            return True
        except torch.AcceleratorError as error:
            if tuning.forced(self.family) is not None:
                raise
            self._failed.add((library, first.get_device()))
            _C.advance_configuration_epoch()  # plans have calls of it
            said = str(error).strip().partition("\n")[0]
            warnings.warn(f"{self.family} go on without the {library}'s library: {said}", stacklevel=2)
            return False
