"""Tuning: which candidate of a heavy operator is the quickest for a dtype, sizes and layout, timed and remembered.

`torch.bp.tunable` is what users see, `planning.candidates` asks.
"""

from __future__ import annotations

from torch_backplane.tuning.choosing import context, forced, winner
from torch_backplane.tuning.problems import Problem
from torch_backplane.tuning.trials import Operands, trial

__all__ = ["Operands", "Problem", "context", "forced", "trial", "winner"]
