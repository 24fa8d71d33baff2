"""Registers Backplane with PyTorch. Imported once, by `torch_backplane`; the order of the steps matters."""

from __future__ import annotations

import sys

import torch

# The device type must be named before the compiled part registers anything for it.
torch.utils.rename_privateuse1_backend("bp")

from torch_backplane import accelerator, backends, ending, fused_attention, interop, printing, settings  # noqa: E402

settings.apply()
ending.install()
torch._register_device_module("bp", accelerator)
torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=True, for_storage=True)
printing.install()
interop.install()
accelerator.processes.install()
fused_attention.install()
# `import torch.bp.streams` finds the existing module instead of loading it a second time.
for _name in ("amp", "graphs", "memory", "nvtx", "random", "streams", "tunable"):
    sys.modules[f"torch.bp.{_name}"] = getattr(accelerator, _name)
torch.backends.bp = backends  # type: ignore[attr-defined]
sys.modules["torch.backends.bp"] = backends
if settings.has_sanitizer():
    from torch_backplane.testing import sanitizer

    sanitizer.enable()
