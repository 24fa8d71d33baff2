"""Tells PyTorch's code, which must see the real names of devices, from the program's."""

from __future__ import annotations

import types


def is_pytorch(frame: types.FrameType) -> bool:
    """Whether a frame runs PyTorch's or Backplane's code. csrc/python/cuda_names.cpp has the same rule."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "torch_backplane")
