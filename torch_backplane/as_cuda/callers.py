"""Who asks for the name of a device: PyTorch, which must see the real one, or the program."""

from __future__ import annotations

import types


def is_pytorch(frame: types.FrameType) -> bool:
    """Whether a frame runs PyTorch's or Backplane's code. csrc/python/cuda_names.cpp decides alike."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "torch_backplane")
