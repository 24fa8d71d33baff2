"""Tuning: finds the fastest candidate of a heavy operator for a dtype, sizes and layout, and remembers it.

`torch.bp.tunable` is the users' API. `planning.candidates` uses the results.
"""

from __future__ import annotations

from torch_backplane.tuning.choosing import TF32, context, forced, is_trial, tune, winner
from torch_backplane.tuning.problems import Problem
from torch_backplane.tuning.trials import Operands, trial

__all__ = ["TF32", "Operands", "Problem", "context", "forced", "is_trial", "trial", "tune", "winner"]
