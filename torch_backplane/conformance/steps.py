"""Is every step of a call right, where its result is not?

Many entries of the database are chains of operators, and a chain passes on what each operator rounds: where scores of
7,000 go through a softmax, an error of 3e-4 that the CPU has as well becomes one of the result. Two chains whose steps
are equally exact then end equally far from float64's on average, and not in each sample. So a result that is farther
is judged again, step by step: each operator that the call comes to on the device is given the device's own inputs on
the CPU, in their dtype and in float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_backplane.conformance import judge
from torch_backplane.conformance.accuracy import EPSILONS_OF_LARGEST, allowed_error, error_of
from torch_backplane.conformance.transfer import WIDER, Transfer, leaves, tensors

_CPU = torch.device("cpu")

# The error of a chain may be this many times the CPU's: more is no chance.
TIMES_OF_CHAIN = 16.0

Call = Callable[[torch.device, TorchDispatchMode], Any]


def carried(call: Call, device: torch.device, exact: Callable[[], Any]) -> str:
    """What to say of a chain of which every step is right; "" where one is not, or nobody can tell.

    A step is right if the CPU's tolerances hold (`judge.compare`), and if its largest error is one that `--accuracy`
    allows beside the CPU's. The device must have come to the same operators as the CPU, with the same numbers and
    shapes, and to two at least that round.

    Args:
        call: makes the call and, of gradients, the backward, on the device that it is given, with the same inputs;
            in the mode that it is given, but for what copies inputs there. Returns a tree of what came of it.
        exact: the same tree, of the CPU in float64.
    """
    asked, found = _Operators(), _Judge()
    on_cpu, on_device = call(_CPU, asked), call(device, found)
    if found.wrong or found.made != asked.made or found.rounding < 2 or not _is_near(on_device, on_cpu, exact()):
        return ""
    return f"each of the {found.rounding} steps that round is as exact as the CPU's"


def _is_near(on_device: Any, on_cpu: Any, exact: Any) -> bool:
    found, expected, rights = tensors(Transfer(_CPU)(on_device)), tensors(on_cpu), tensors(exact)
    if not len(found) == len(expected) == len(rights):
        return False
    for one, other, right in zip(found, expected, rights, strict=True):
        if other.dtype in WIDER and other.numel():
            least = EPSILONS_OF_LARGEST * torch.finfo(other.dtype).eps
            allowed = TIMES_OF_CHAIN * max(error_of(other.detach(), right.detach()).largest, least)
            if error_of(one.detach(), right.detach()).largest > allowed:
                return False
    return True


class _Operators(TorchDispatchMode):
    """Counts the operators of a call, by their names, numbers and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        words = (
            str((one.dtype, tuple(one.shape)) if isinstance(one, torch.Tensor) else one)
            for _, one in leaves(given)
            if not isinstance(one, torch.device)
        )
        self.made[f"{func} {' '.join(words)}"] += 1
        return func(*given[0], **given[1])


class _Judge(_Operators):
    """Makes each call of the device once more on the CPU, twice, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.rounding = 0  # steps that are not exact
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        narrow, wide = (Transfer(_CPU, wider=wider)(given) for wider in (False, True))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if "empty" not in func.__name__:  # memory as it was found
            try:
                self._compare(func, (given, result), narrow, wide)
            except Exception as error:  # the CPU cannot do it: then nobody can tell
                self.wrong.append(f"{func}: {error}")
        return result

    def _compare(self, func: Any, found: Any, narrow: Any, wide: Any) -> None:
        """Of results and arguments, which may have been written."""
        found, expected, exact = (
            tensors(one)
            for one in (
                Transfer(_CPU)(found),
                (narrow, func(*narrow[0], **narrow[1])),
                (wide, func(*wide[0], **wide[1])),
            )
        )
        rounds = False
        for one, other, right in zip(found, expected, exact, strict=True):
            differences = judge.compare(other, one, _CPU, exact=right.detach)
            if any(kind not in ("nearer", "layout") for kind, _ in differences):
                self.wrong.append(str(func))
            elif other.dtype in WIDER and other.numel():
                ours, theirs = error_of(one, right), error_of(other, right)
                rounds |= max(ours.largest, theirs.largest) > 0
                if ours.largest > allowed_error(theirs, other.dtype).largest:
                    self.wrong.append(str(func))
        self.rounding += rounds
