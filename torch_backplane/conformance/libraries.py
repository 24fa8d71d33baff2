"""Library calls: how often the plans of an entry call a library instead of launching generated kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from torch_backplane import _C

Result = TypeVar("Result")

# Steps of plans (csrc/plans/plan_text.cpp): a function of the driver's library, or a CPU kernel as a host callback.
_STEP = re.compile(r"^(?:call (?P<library>.+) at \d+ on the queue|on the host) ", re.MULTILINE)
HOST = "host"  # as in preferences.LIBRARIES


def count_library_calls(function: Callable[[], Result]) -> tuple[Result, dict[str, int]]:
    """Call `function()`.

    Returns:
        Its result, and the number of calls of each library function in this thread: by its name, such as "CLBlast
        matmul", or "host" for PyTorch's CPU kernels and functions of C libraries that access device memory directly.
    """
    results: list[Result] = []
    events = _C.listen_to_plans(lambda: results.append(function()))
    counts = Counter(step["library"] or HOST for *_, plan in events for step in _STEP.finditer(plan))
    return results[0], dict(counts)
