"""Checks every step of a call whose result is farther from float64's than the CPU's.

Many entries of the database are chains of operators, and a chain propagates the rounding errors of each operator. For
example, an error of 3e-4 in scores of 7,000, which the CPU has, too, becomes an error of their softmax. The results of
two chains with equally exact steps are equally far from float64's on average, but not in each sample. So such a result
is checked step by step: each operator of the call on the device is repeated on the CPU with the device's own inputs, in
their dtype and in float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_backplane.conformance import comparison
from torch_backplane.conformance.accuracy import EPSILONS_OF_LARGEST, allowed_error, error_of
from torch_backplane.conformance.transfer import WIDER, Transfer, leaves, tensors

_CPU = torch.device("cpu")

# The error of a chain may be this many times the CPU's. More is not explained by chance.
TIMES_OF_CHAIN = 16.0

Call = Callable[[torch.device, TorchDispatchMode], Any]


def carried(call: Call, device: torch.device, exact: Callable[[], Any]) -> str:
    """Return a message if every step of the call is right, and "" if one is wrong or cannot be checked.

    A step is right if it is within the tolerances of the CPU's (`comparison.compare`), and if `--accuracy` would allow
    its largest error (`allowed_error`). The device must have called the same operators as the CPU, with the same
    numbers and shapes, and at least two of them must round. The error of the whole call is limited by `TIMES_OF_CHAIN`.

    Args:
        call: makes the call (for gradients, also the backward pass) with the same inputs on the given device, under the
            given mode except for copies of inputs. Returns a tree of results.
        exact: returns the same tree, computed on the CPU in float64.
    """
    asked, found = _Operators(), _StepCheck()
    try:
        on_cpu, on_device = call(_CPU, asked), call(device, found)
    except Exception:
        # Compositions of operators do not see lazily conjugated tensors under a mode, and kernels refuse these.
        return ""
    if found.wrong or found.made != asked.made or found.rounding < 2 or not _is_near(on_device, on_cpu, exact()):
        return ""
    return f"each of the {found.rounding} steps with rounding is as exact as the CPU's"


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
    """Counts the operators of a call by name, numbers and shapes."""

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


class _StepCheck(_Operators):
    """Repeats each operator of the device on the CPU, in the same dtype and in a wider one, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.rounding = 0  # number of steps with rounding errors
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        narrow, wide = (Transfer(_CPU, wider=wider)(given) for wider in (False, True))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if "empty" not in func.__name__:  # uninitialized
            try:
                self._compare(func, (given, result), narrow, wide)
            except Exception as error:  # the CPU cannot run it, so the step cannot be checked
                self.wrong.append(f"{func}: {error}")
        return result

    def _compare(self, func: Any, found: Any, narrow: Any, wide: Any) -> None:
        """Compare the results, and the arguments, which the operator can have written to."""
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
            differences = comparison.compare(other, one, _CPU, exact=right.detach)
            if any(kind not in ("nearer", "layout") for kind, _ in differences):
                self.wrong.append(str(func))
            elif other.dtype in WIDER and other.numel():
                ours, theirs = error_of(one, right), error_of(other, right)
                rounds |= max(ours.largest, theirs.largest) > 0
                if ours.largest > allowed_error(theirs, other.dtype).largest:
                    self.wrong.append(str(func))
        self.rounding += rounds
