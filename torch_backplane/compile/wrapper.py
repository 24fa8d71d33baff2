"""Inductor's Python wrapper for bp: what a compiled graph does, in Python, which the runtime records as a plan."""

from __future__ import annotations

from typing import Any

from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.utils import IndentedBuffer
from torch._inductor.virtualized import V


class GraphWrapper(PythonWrapperCodegen):
    """Generates the wrapper of a graph on bp devices."""

    @staticmethod
    def create(is_subgraph: bool, subgraph_name: Any, parent_wrapper: Any, partition_signatures: Any = None) -> Any:
        if is_subgraph:
            made = PythonWrapperCodegen.create(is_subgraph, subgraph_name, parent_wrapper, partition_signatures)
            if partition_signatures is not None:  # a part of the graph, as in mode="reduce-overhead"
                made.reuses = parent_wrapper.reuses
            return made
        return GraphWrapper()

    def write_header(self) -> None:
        super().write_header()
        self.imports.writeline("from torch_backplane.compile import runtime as bp_compile")

    def make_allocation(self, name: str, device: Any, *given: Any, **named: Any) -> str:
        line = super().make_allocation(name, device, *given, **named)
        return line.replace("device='bp'", f"device='bp:{device.index}'") if device.type == "bp" else line

    def generate_end(self, result: IndentedBuffer) -> None:
        super().generate_end(result)
        if getattr(V.graph, "aot_mode", False):
            return
        # Graphs write mutated inputs, and those that they own and reuse for a result.
        written_names = {*V.graph.mutated_inputs, *self.reuses.values()}
        written = [position for position, name in enumerate(V.graph.graph_input_names) if name in written_names]
        result.writeline("")
        result.writeline(f"call = bp_compile.Graph(call, written={written!r})")
