"""Inductor's scheduling for devices with a dialect: which kernels there are, and their definition in the wrapper."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config
from torch._inductor.codegen.common import BackendFeature, Kernel
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.scheduler import WhyNoFuse
from torch._inductor.utils import get_fused_kernel_name, get_kernel_metadata
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from torch_backplane.compile.fused_templates import FusedTemplate
from torch_backplane.compile.kernel import GraphKernel
from torch_backplane.compile.reduction_form import fits_local_memory
from torch_backplane.planning.launch import dialect_of


class GraphScheduling(SIMDScheduling):
    """Schedules fused kernels of GraphKernel."""

    kernel_type = GraphKernel  # type: ignore[assignment]

    @classmethod
    def get_backend_features(cls, device: torch.device) -> OrderedSet[BackendFeature]:
        return OrderedSet([BackendFeature.INPLACE_BUFFERS, BackendFeature.SCAN, BackendFeature.TUPLE_REDUCTION])

    @classmethod
    def get_tiling_and_scores(cls, *given: Any, **named: Any) -> Any:
        """As for other devices, with at most two dimensions, and one reduced dimension, which is one of the two."""
        most = min(2, config.triton.max_tiles or 2)
        with config.patch({"triton.max_tiles": most, "triton.tile_reductions": False}):
            return super().get_tiling_and_scores(*given, **named)

    def can_fuse(self, node1: Any, node2: Any) -> bool:
        """As for other devices, if the device has enough space for the kernel's arguments and local memory."""
        buffers = {one.name for node in (node1, node2) for one in (*node.read_writes.reads, *node.read_writes.writes)}
        dialect = dialect_of(node1.get_device())
        is_template = node1.is_template() or node2.is_template()
        numbers = (64 if is_template else 16) * 8  # sizes and strides; there are fewer of them in practice
        if len(buffers) * dialect.buffer_bytes + numbers > dialect.target.max_argument_bytes:
            WhyNoFuse(node1, node2)("%s buffers are too many arguments for the device", len(buffers))
            return False
        if not fits_local_memory(dialect.target, [*node1.get_nodes(), *node2.get_nodes()]):
            WhyNoFuse(node1, node2)("the scans and sorts need too much local memory")
            return False
        return bool(super().can_fuse(node1, node2))

    can_fuse_vertical = can_fuse
    can_fuse_horizontal = can_fuse

    def codegen_template(self, template_node: Any, epilogue_nodes: Any, prologue_nodes: Any, **given: Any) -> None:
        """Writes a product or a convolution, with the elementwise operations on its operands and its results."""
        if not epilogue_nodes and not prologue_nodes:
            with V.set_kernel_handler(Kernel(increase_kernel_count=False)):
                template_node.mark_run()
            V.graph.wrapper_code.writelines(template_node.node.lines())
        else:
            fused = FusedTemplate(template_node, epilogue_nodes, prologue_nodes)
            name = self.define_kernel(fused.codegen_kernel(), fused.nodes, None)
            fused.mark_run()
            self.codegen_comment(fused.nodes, name)
            fused.call(name)
        self.free_buffers_in_scheduler()

    def define_kernel(self, src_code: str, node_schedule: Any, kernel: Any) -> str:
        wrapper = V.graph.wrapper_code
        if src_code in wrapper.src_to_kernel:
            return wrapper.src_to_kernel[src_code]
        kind = config.triton.descriptive_names
        fused = [get_fused_kernel_name(node_schedule, kind)] if kind else []
        name = "_".join(["bp", *fused, wrapper.next_kernel_suffix()])
        wrapper.src_to_kernel[src_code] = name
        origins, detailed = get_kernel_metadata(node_schedule, wrapper)
        definition = f"bp_compile.define_kernel({src_code.replace('KERNEL_NAME', name)})"
        wrapper.define_kernel(name, definition, f"{origins}\n{detailed}")
        return name
