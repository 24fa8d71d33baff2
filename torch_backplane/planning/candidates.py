"""Candidates: the implementations of a heavy operator, one for each library (generated kernels, host, driver).

Of the candidates that accept a call and whose workspace fits the limit, the cheapest runs. A library that the user
prefers comes first (`torch_backplane.preferences`). A tuned call runs the candidate that was fastest
(`torch_backplane.tuning`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torch_backplane import tuning
from torch_backplane.planning.costs import GENERATED, unstated
from torch_backplane.planning.launch import dialect_of
from torch_backplane.planning.library_calls import LibraryFailed, computes_in_tf32
from torch_backplane.preferences import (
    DEFAULT,
    LIBRARIES,
    count_without_room,
    has_float32_precision,
    preferred,
    workspace,
)


class Candidate(NamedTuple):
    """One implementation of a family of operators.

    The functions are called with the arguments by which the family describes a call (`Candidates.choose`).

    Args:
        library: the name of the library, one of those in `preferences.LIBRARIES` for the family.
        refuses: the guard. Returns None if the candidate accepts the call, else the reason as a phrase that continues
            «it», such as "takes no complex numbers". It may depend on dtypes, devices and numbers of dimensions.
        forms: returns the names of variants other than the default one, which tuned calls use.
        has_form: called with a name and then the description; returns whether the candidate has a form of this name for
            the call. None: if `forms` lists it. For forms that users can prefer.
        cost: returns an integer relative to `costs.GENERATED`; the cheapest candidate runs. It may also depend on
            sizes: each side of a threshold gets its own dynamic-shape plan. None, or a function that returns None,
            means the cost is `costs.unstated`.
        workspace: returns the bytes that the candidate needs in addition to operands and results. Its first argument
            is the form, "" for the default one.
    """

    library: str
    refuses: Callable[..., str | None]
    forms: Callable[..., Sequence[str]] = lambda *described: ()
    cost: Callable[..., int | None] | None = lambda *described: GENERATED
    workspace: Callable[..., int] = lambda form, *described: 0
    has_form: Callable[..., bool] | None = None


def _cost(candidate: Candidate, first: torch.Tensor, *described: Any) -> int:
    stated = None if candidate.cost is None else candidate.cost(first, *described)
    return unstated(dialect_of(first.device).target) if stated is None else stated


class Candidates:
    """The candidates of a family of operators, one for each of its libraries.

    Args:
        family: a key of `preferences.LIBRARIES`.
        candidates: in the order of the family's libraries.

    Raises:
        ValueError: the libraries of the candidates are not those of the family.
    """

    def __init__(self, family: str, *candidates: Candidate) -> None:
        self.family = family
        self._candidates = {one.library: one for one in candidates}
        if tuple(self._candidates) != LIBRARIES[family]:
            raise ValueError(f"{family} must have the libraries {LIBRARIES[family]}, but got {tuple(self._candidates)}")

    def choose(self, first: torch.Tensor, *described: Any, problem: Callable[[], tuning.Problem] | None = None) -> str:
        """Chooses the library for a call. Tunes the call if tuning is enabled for the family.

        A candidate whose workspace exceeds `preferences.workspace()` is left out, unless it is the last one.

        Args:
            first, described: the description of the call that candidates get; `first` is on the call's device.
            problem: returns the call as a tuning problem. Only called if tuning is enabled for the family.

        Returns:
            The library, with the form if it is not the default one, such as "generated/tile=32".
        """
        takers = [one for one in self._candidates.values() if one.refuses(first, *described) is None]
        if len(takers) > 1:
            takers = [one for one in takers if self._has_room(one, "", first, *described)] or takers[-1:]
        if len(takers) > 1:
            takers.sort(key=lambda one: _cost(one, first, *described))
        wanted = tuning.forced(self.family) or preferred(self.family)
        library, _, form = wanted.partition("/")
        for one in takers:
            if one.library == library:
                return wanted if form and self._has_form(one, form, first, *described) else library
        if wanted == DEFAULT and problem is not None and tuning.context.tunes(self.family):
            forms = (
                [one.library, *(f"{one.library}/{form}" for form in self._forms(one, first, *described))]
                for one in takers
            )
            names = [name for each in forms for name in each]
            if len(names) > 1:
                cache_bytes = dialect_of(first.device).target.cache_bytes
                return tuning.winner(self.family, self._described(problem(), first), first.device, names, cache_bytes)
        return takers[0].library

    def _described(self, problem: tuning.Problem, first: torch.Tensor) -> tuning.Problem:
        """The problem, with whether libraries may compute it in TF32, as another one may then be the fastest."""
        has_precision = has_float32_precision(self.family)
        is_tf32 = has_precision and computes_in_tf32(self.family, first.device, first.dtype)
        return problem._replace(parameters=f"{problem.parameters} {tuning.TF32}") if is_tf32 else problem

    def _forms(self, candidate: Candidate, *described: Any) -> list[str]:
        """The candidate's forms whose workspace fits the limit."""
        return [form for form in candidate.forms(*described) if self._has_room(candidate, form, *described)]

    def _has_form(self, candidate: Candidate, form: str, *described: Any) -> bool:
        """Whether a form that the user or a trial asks for can run."""
        if candidate.has_form is None:
            return form in self._forms(candidate, *described)
        return candidate.has_form(form, *described) and self._has_room(candidate, form, *described)

    def _has_room(self, candidate: Candidate, form: str, *described: Any) -> bool:
        limit = workspace()
        if limit is None or candidate.workspace(form, *described) <= limit:
            return True
        count_without_room(f"{self.family}: {candidate.library}{'/' if form else ''}{form}")
        return False

    def has_library_for(self, first: torch.Tensor, *described: Any) -> bool:
        """Whether a candidate other than generated kernels accepts the call."""
        return any(
            one.library != "generated" and one.refuses(first, *described) is None for one in self._candidates.values()
        )


def try_library(compute: Callable[[], None]) -> bool:
    """Runs a call with a library of the driver, which may fail, for example for lack of memory.

    Returns:
        Whether it succeeded. After a failure, the caller runs another candidate. `LibraryCall.run` has given a warning,
        and refuses such calls from then on.

    Raises:
        torch.AcceleratorError: the library failed in a tuning trial, or the device is lost.
    """
    try:
        compute()
        return True
    except LibraryFailed:
        return False
