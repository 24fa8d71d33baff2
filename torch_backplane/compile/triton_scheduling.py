"""Inductor's Triton kernels for bp, which `torch.backends.bp.inductor_backend` chooses: scheduling and text."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config
from torch._inductor.codegen import triton
from torch._inductor.codegen.common import BackendFeature
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from torch_backplane.triton_driver.targets import triton_target

_ACTIVATES = "triton_helpers.set_driver_to_gpu()\n"  # chooses Triton's driver for the whole process


class Operations(triton.TritonKernelOverrides):
    """Operations as text: those of Inductor, with the random numbers of eager PyTorch on bp."""

    @staticmethod
    def rand(seed: Any, offset: Any) -> str:
        return f"bp_random.uniform({seed}, {offset})"

    @staticmethod
    def randn(seed: Any, offset: Any) -> str:
        return f"bp_random.normal({seed}, {offset})"

    @staticmethod
    def randint64(seed: Any, offset: Any, low: Any, high: Any) -> str:
        return f"bp_random.integer({seed}, {offset}, {low}, {high})"


class TritonGraphKernel(triton.TritonKernel):
    """A kernel in Triton. Its autotuner is that of triton_runtime.py."""

    overrides = Operations  # type: ignore[assignment]

    @classmethod
    def gen_common_triton_imports(cls) -> str:  # type: ignore[override]
        """The imports of a kernel's text, and the decorators for the target of its device."""
        target = triton_target(V.graph.get_current_device_or_throw().index)
        return (
            f"{super().gen_common_triton_imports()}"
            "from torch_backplane.compile import triton_random as bp_random\n"
            "from torch_backplane.compile.triton_runtime import Heuristics\n"
            f"triton_heuristics = Heuristics({target.backend!r}, {target.architecture!r}, {target.warp_size})\n"
        )

    def codegen_kernel(self, name: Any = None) -> str:
        return super().codegen_kernel(name).replace(_ACTIVATES, "")


class TritonGraphScheduling(triton.TritonScheduling):
    """Schedules Triton kernels. Products and convolutions are calls of operators, not templates of Triton."""

    kernel_type = TritonGraphKernel

    @classmethod
    def get_backend_features(cls, device: torch.device) -> OrderedSet[BackendFeature]:
        """The features of Inductor without its templates.

        Raises:
            NotImplementedError: cooperative reductions are enabled.
        """
        if config.triton.cooperative_reductions or config.triton.force_cooperative_reductions:
            raise NotImplementedError(
                "Inductor's cooperative reductions in Triton are not available on bp; set "
                "torch._inductor.config.triton.cooperative_reductions and force_cooperative_reductions to False"
            )
        return super().get_backend_features(device) - OrderedSet([BackendFeature.TRITON_TEMPLATES])
