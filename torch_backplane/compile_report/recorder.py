"""Records what torch.compile does in this process, from the records that PyTorch writes for TORCH_TRACE."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch._functorch.config

from torch_backplane.compile.imports import when_imported
from torch_backplane.compile_report import Compilation, GraphBreak, Report

_BREAK = re.compile(r"Graph break in user code at (.+):(\d+)\nGraph Break Reason: (.*)")
_REASON = re.compile(r"^(.+)\n +Explanation: (.*)", re.MULTILINE)
_HINT = re.compile(r"^ +Hint: (.*)", re.MULTILINE)


def start() -> Report:
    """Record what torch.compile does from now on in this process. The report grows meanwhile.

    Graphs are not taken from Inductor's caches, because these do not know their kernels.
    """
    report = Report()
    logging.getLogger("torch.__trace").addHandler(_Recorder(report))
    torch._functorch.config.enable_autograd_cache = False
    when_imported("torch._inductor.config", lambda config: setattr(config, "fx_graph_cache", False))
    when_imported("torch._inductor.scheduler", note_launches)
    return report


def note_launches(scheduler: ModuleType) -> None:
    """Lets the backends of `Scheduler` list their launches: names of kernels, and of the nodes that they consist of."""
    create_backend: Callable[..., Any] = scheduler.Scheduler.create_backend  # type: ignore[attr-defined]

    @functools.wraps(create_backend)
    def create(self: Any, device: torch.device) -> Any:
        backend = create_backend(self, device)
        define: Callable[..., str] = backend.define_kernel
        backend.launches = []

        def define_kernel(text: str, nodes: Any, *given: Any, **named: Any) -> str:
            name = define(text, nodes, *given, **named)
            kept = (one for one in nodes if isinstance(one, scheduler.BaseSchedulerNode))  # type: ignore[attr-defined]
            backend.launches.append((name, [one.get_name() for one in kept]))
            return name

        backend.define_kernel = define_kernel
        return backend

    scheduler.Scheduler.create_backend = create  # type: ignore[attr-defined]


class _Recorder(logging.Handler):
    """Fills a report. What cannot be read becomes one of its problems, because the program must go on."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        facts: dict[str, Any] = record.metadata  # type: ignore[attr-defined]
        kind = facts["artifact"]["name"] if "artifact" in facts else next(iter(facts))
        if (read := self._READERS.get(kind)) is None:
            return
        try:
            read(self, facts, record.payload)  # type: ignore[attr-defined]
        except Exception as error:
            self._report.problems.append(f"{kind} of {_id(facts)}: {type(error).__name__}: {error}")

    def _latest(self, facts: dict[str, Any]) -> Compilation:
        found = (one for one in reversed(self._report.compilations) if one.id == _id(facts))
        return next(found, None) or self._begin(facts)

    def _begin(self, facts: dict[str, Any]) -> Compilation:
        self._report.compilations.append(Compilation(_id(facts)))
        return self._report.compilations[-1]

    def _read_start(self, facts: dict[str, Any], _: Any) -> None:
        if facts.get("attempt", 0) == 0:
            self._begin(facts)

    def _read_graph(self, facts: dict[str, Any], _: Any) -> None:
        from torch._inductor.virtualized import V

        from torch_backplane.compile_report import graphs

        if getattr(V.graph, "scheduler", None) is None:
            raise ValueError("the graph comes from a cache, which does not know its kernels")
        self._latest(facts).graphs.append(graphs.describe())

    def _read_break(self, _: Any, text: str) -> None:
        match = _BREAK.search(text)
        if match is None:
            raise ValueError(text.strip())
        file, line, reason = match.groups()
        reason, explanation = next(iter(_REASON.findall(text)), (reason, ""))
        hints = list(dict.fromkeys(_HINT.findall(text)))  # a traceback repeats them
        found = GraphBreak(reason, explanation, hints, file, int(line))
        for one in self._report.graph_breaks:
            if (one.reason, one.file, one.line) == (found.reason, found.file, found.line):
                one.count += 1
                return
        self._report.graph_breaks.append(found)

    def _read_times(self, facts: dict[str, Any], _: Any) -> None:
        found = facts.get("compilation_metrics") or facts["bwd_compilation_metrics"]
        one = self._latest(facts)
        one.seconds += (found["end_time_us"] - found["start_time_us"]) / 1e6
        one.inductor_seconds += (found["inductor_cumulative_compile_time_us"] or 0) / 1e6
        if "compilation_metrics" in facts:
            one.function, one.file, one.line = found["co_name"], found["co_filename"], found["co_firstlineno"]
            one.operators = found["graph_op_count"] or 0
            one.recompile_reason = found["recompile_reason"]
            one.failure = _failure(found) if found["fail_type"] else None

    def _read_template(self, _: Any, text: str) -> None:
        self._report.templates.append(text)

    _READERS: ClassVar[dict[str, Callable[..., Any]]] = {
        "dynamo_start": _read_start,
        "inductor_output_code": _read_graph,
        "dynamo_graph_break_reason": _read_break,
        "compilation_metrics": _read_times,
        "bwd_compilation_metrics": _read_times,
        "bp_template": _read_template,
    }


def _failure(found: dict[str, Any]) -> str:
    """Why a function was not compiled, of the metrics of its compilation."""
    text = found["fail_reason"] or found["fail_type"]
    reasons = [reason for reason, _ in _REASON.findall(text)] or [text.strip().partition("\n")[0]]
    file, line = found["fail_user_frame_filename"], found["fail_user_frame_lineno"]
    return (f"{file}:{line}: " if file else "") + "; ".join(reasons)


def _id(facts: dict[str, Any]) -> str:
    """PyTorch's number of a compilation; empty outside of Dynamo."""
    parts = [str(facts[key]) for key in ("compiled_autograd_id", "frame_id", "frame_compile_id") if key in facts]
    return "/".join(parts)
