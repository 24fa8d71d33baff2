"""Registers Backplane with PyTorch. Imported once, by `torch_backplane`; the order of the steps matters."""

from __future__ import annotations

import sys

import torch

# The device type must be named before the compiled part registers anything for it.
torch.utils.rename_privateuse1_backend("bp")

from torch_backplane import (  # noqa: E402
    accelerator,
    backends,
    compile,
    fused_attention,
    interop,
    printing,
    settings,
    shutdown,
)

settings.apply()
shutdown.install()
torch._register_device_module("bp", accelerator)
accelerator.__name__ = "torch.bp"  # Dynamo derives the module's place in torch from it (torch.get_device_module)
torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=True, for_storage=True)
printing.install()
interop.install()
accelerator.processes.install()
fused_attention.install()
compile.install()
# `import torch.bp.streams` finds the existing module instead of loading it a second time.
for _name in ("amp", "graphs", "memory", "nvtx", "random", "streams", "tunable"):
    sys.modules[f"torch.bp.{_name}"] = getattr(accelerator, _name)
torch.backends.bp = backends  # type: ignore[attr-defined]
sys.modules["torch.backends.bp"] = backends
if torch.distributed.is_available():
    from torch_backplane import distributed

    distributed.register()
if settings.switch("TORCH_BACKPLANE_SANITIZER"):
    from torch_backplane.testing import sanitizer

    sanitizer.enable()
# Set by `python -m torch_backplane run` for the processes that its program starts.
if settings.switch("TORCH_BACKPLANE_INTEGRATIONS"):
    from torch_backplane import integrations

    integrations.enable()
if settings.switch("TORCH_BACKPLANE_AS_CUDA"):
    from torch_backplane import as_cuda

    as_cuda.enable()
