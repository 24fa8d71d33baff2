"""What torch.compile made of a program: `python -m torch_backplane explain`.

`recorder` listens to the records that PyTorch writes for TORCH_TRACE, and fills a `Report`. `graphs` reads the kernels
of a graph from Inductor. `page.html` draws a report.
"""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass, field
from importlib import resources


@dataclass
class Buffer:
    """A tensor that steps of a graph read or write. Symbolic sizes are text; `bytes` is that of the compiled call."""

    dtype: str
    size: list[int | str]
    bytes: int


@dataclass
class Step:
    """A launch of a kernel, or a call of an operator.

    Args:
        kind: "kernel", "operator" (of eager PyTorch), or "none" (joins buffers that were written in place).
        name: the function in the generated code.
        operators: what it computes, as operators of ATen that the program called.
        reads: for each buffer, the bytes that it reads.
        writes: for each buffer, the bytes that it writes.
    """

    kind: str
    name: str
    operators: list[str]
    reads: dict[str, int]
    writes: dict[str, int]


@dataclass
class Graph:
    """A graph that Inductor compiled.

    Args:
        kind: "inference", "forward" or "backward".
        devices: the devices of its tensors.
        compiled_for: the device that the kernels are for, if it is another one: "cpu" for graphs on host devices.
        steps: in the order in which a call runs them.
        compiled_bytes: bytes that all steps read and write.
        unfused_bytes: bytes that they would read and write without fusion (`graphs.unfused_bytes`).
    """

    kind: str
    devices: list[str]
    compiled_for: str | None
    inputs: list[str]
    outputs: list[str]
    buffers: dict[str, Buffer]
    steps: list[Step]
    compiled_bytes: int
    unfused_bytes: int


@dataclass
class Compilation:
    """A function, or a part of one between graph breaks, that Dynamo compiled once.

    Args:
        id: PyTorch's number, such as "0/1" for the second compilation of the first function.
        function: the function's name, empty if there is none.
        file: the file of the function.
        line: the first line of the function.
        operators: how many operators Dynamo found.
        seconds: time to trace and compile, with the backward graph.
        inductor_seconds: the part of it that Inductor took.
        recompile_reason: the guard that failed, if the function had been compiled before.
        failure: why it was not compiled, with the place in the program.
        graphs: forward and backward graphs.
    """

    id: str
    function: str = ""
    file: str = ""
    line: int = 0
    operators: int = 0
    seconds: float = 0.0
    inductor_seconds: float = 0.0
    recompile_reason: str | None = None
    failure: str | None = None
    graphs: list[Graph] = field(default_factory=list)


@dataclass
class GraphBreak:
    """A place where a graph ends because Dynamo cannot trace on. `count`: how many compilations met it."""

    reason: str
    explanation: str
    hints: list[str]
    file: str
    line: int
    count: int = 1


@dataclass
class Report:
    """What was compiled.

    Args:
        problems: what could not be recorded.
        templates: what runs each product or convolution with elementwise operators, under max-autotune.
    """

    compilations: list[Compilation] = field(default_factory=list)
    graph_breaks: list[GraphBreak] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    templates: list[str] = field(default_factory=list)


def page(report: Report, title: str) -> str:
    """Return an HTML page that draws the graphs. It needs no other files."""
    text = json.dumps(asdict(report)).replace("<", "\\u003c")  # no `</script>` in data
    made = resources.files(__name__).joinpath("page.html").read_text(encoding="utf-8")
    return made.replace("{{title}}", html.escape(title)).replace("{{data}}", text)
