"""Writes the kernels of compiled graphs: Inductor's scheduler nodes as one kernel in the device's dialect.

There are four forms:

- Elementwise: a work item computes one element of an iteration space with one or two dimensions.
- Reduction by threads: a work item reduces all elements of a result, one after another. Adjacent work items have
  adjacent results.
- Reduction by teams: the work items of a group share a result. Each reduces every TEAM-th element, and a tree in local
  memory combines their states.
- Reduction by tiles: a work item reduces the elements of several adjacent results. It executes each section for all of
  them before it goes on.

A scan is a reduction with a result for each element (scans.py). So is a sort, which only teams compute (sorts.py).

A kernel that reduces has sections: loops over the reduced elements, and statements outside of loops, which every work
item of a team executes and whose stores only the first one does. With tiles, each section begins with all earlier
statements outside of loops, and stores outside of loops come last.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.common import DeferredLine, IndentedBuffer
from torch._inductor.codegen.simd import IterationRangesEntry, SIMDKernel
from torch._inductor.codegen.triton_utils import should_unwrap_unspec_arg
from torch._inductor.utils import prefix_is_reduction
from torch._inductor.virtualized import V
from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis, ValueRanges

from torch_backplane.compile.elements import SLOW, Elements
from torch_backplane.compile.formulas import computed_in, traced
from torch_backplane.compile.indexing import FUNCTIONS, Float64Printer, IndexPrinter
from torch_backplane.compile.kernel_functions import ATOMIC_ADD, ATOMIC_DTYPES, RANDOM, REPORTS
from torch_backplane.compile.operations import Operations
from torch_backplane.compile.reduction_form import choose_form
from torch_backplane.compile.reductions import Reduction, reduction
from torch_backplane.compile.scans import Scan
from torch_backplane.compile.sorts import Order, sort
from torch_backplane.compile.variables import Variable
from torch_backplane.kernels.dialects.base import Dialect, Value
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.element import loop_statements, statements
from torch_backplane.kernels.expression import Program, constant, trace
from torch_backplane.kernels.kernel import Kernel, Parameter
from torch_backplane.kernels.templates.random import scalar_words
from torch_backplane.kernels.templates.sort import key_function
from torch_backplane.kernels.templates.spelling import macros
from torch_backplane.planning.launch import dialect_of


class GraphKernel(SIMDKernel[Variable]):
    """A kernel of a compiled graph."""

    overrides = Operations  # type: ignore[assignment]
    kexpr: Callable[[sympy.Expr], str] = IndexPrinter().doprint  # type: ignore[assignment]
    sexpr = kexpr  # type: ignore[assignment]

    def __init__(self, tiling: dict[str, sympy.Expr], **kwargs: Any) -> None:
        self.dialect: Dialect = dialect_of(V.graph.get_current_device_or_throw())
        super().__init__(tiling, **kwargs)
        self.outside_loops: set[Variable] = set()  # variables that are valid in the whole kernel
        self.used_dtypes: set[torch.dtype] = set()
        self.shared: dict[str, tuple[torch.dtype, int]] = {}  # arrays in local memory: element and length, by name
        self.variables: dict[str, str] = {}  # declarations at the beginning of the kernel, by name
        self.error_texts: list[str] = []
        self.reports_errors = False
        self.draws = False
        self.more_input: tuple[Value, str] | None = None  # a variable, and the index of its element in VARIABLE_ptr
        self.named_parameters: dict[str, Parameter] = {}
        self.scans: dict[Any, tuple[Variable, ...]] = {}  # results of the scans and sorts in the current loop
        self.sorted_dtypes: set[torch.dtype] = set()
        self.after_loop = IndentedBuffer()
        self._states = itertools.count()
        form = choose_form(self.features, self.dialect.target, len(self._kept_trees()))
        self.team, self.teams, self.lanes, self.tile, self.kept = form
        self.elements = Elements(self)
        self.group = self.team * self.teams
        # The work item's index in its team, and what to add to it for its index in the group.
        self.item, self.first_item = ("ITEM", "") if self.teams == 1 else ("member", "first_item + ")
        # Whether some items of a team can have no element in an iteration of a loop. `inside` tells it. With several
        # teams in a group, `has_result` tells whether the team has a result.
        self.has_inside = self.team > 1 and self.features.contains_op("scan")
        # Statements outside of loops, and their stores if they come last.
        self.outside = self.body if self.tile == 1 else IndentedBuffer()
        self.last_stores = IndentedBuffer()

    def get_index_dtype_as_torch_dtype(self) -> torch.dtype:
        # CPU compilers see that work items access adjacent elements only where indices cannot wrap.
        return super().get_index_dtype_as_torch_dtype() if self.dialect.target.simt else torch.int64

    def create_cse_var(self, *given: Any, **named: Any) -> Variable:
        return Variable(*given, **named)

    def dtype_to_str(self, dtype: torch.dtype) -> str:
        self.used_dtypes.add(dtype)
        return self.dialect.type(dtype)

    # Variables

    def new_variable(self, dtype: torch.dtype, bounds: ValueRanges[Any] | None = None) -> Variable:
        self.used_dtypes.add(dtype)
        return self.cse.newvar(bounds or ValueRanges.unknown(), dtype, ())

    def number(self, value: Any, dtype: torch.dtype) -> Variable:
        """A constant, which the text contains where it is used. `value` can be an expression of sizes."""
        if isinstance(value, sympy.Expr) and not value.is_number:
            return self.expression(value, dtype)
        if isinstance(value, sympy.Expr):
            value = float(value) if dtype.is_floating_point else int(value)
        category = facts(dtype).category
        bounds = SymPyValueRangeAnalysis.constant(value, dtype)
        if category == "bool":
            value = bool(value)
        elif category in ("signed", "unsigned"):
            bits = facts(dtype).bits
            value = int(value) % (1 << bits)
            value -= (1 << bits) if category == "signed" and value >> (bits - 1) else 0
        value = constant(value, dtype).value
        self.used_dtypes.add(dtype)
        var = self.create_cse_var(self.dialect.constant(value, dtype), bounds, dtype, ())
        self.outside_loops.add(var)
        return var

    def expression(self, expr: sympy.Expr, dtype: torch.dtype) -> Variable:
        """The value of an expression of sizes and loop variables. It can be real, such as the inverse of a size."""
        dtype = value_dtype(dtype)
        keeps_dtype = dtype.is_floating_point or dtype == torch.int64
        computed = dtype if keeps_dtype else self.get_index_dtype_as_torch_dtype()
        printer = Float64Printer() if dtype == torch.float64 else IndexPrinter()
        text = printer.doprint(self.rename_indexing(expr))
        return self.cast(self.declare(f"({self.dialect.type(computed)})({text})", computed), dtype)

    def declare(self, text: str, dtype: torch.dtype, buffer: IndentedBuffer | None = None) -> Variable:
        """The variable that holds the value of `text`; declares it if there is none yet."""
        buffer = self.compute if buffer is None else buffer
        key = f"{dtype} {text}"
        var = self.cse.try_get(key)
        is_outside = not self.inside_reduction or buffer is self.outside
        if var is not None and (var in self.outside_loops or (not is_outside and self.elements.has(var))):
            var.use_count += 1
            return var
        if var is None or self._is_scoped():
            var = self.new_variable(dtype)
            self.cse.put(key, var)
        buffer.writeline(f"const {self.dialect.type(dtype)} {var} = {text};")
        if is_outside:
            self.outside_loops.add(var)
        else:
            self.elements.add(var, buffer)
        return var

    def cast(self, value: Any, dtype: torch.dtype) -> Variable:
        if not isinstance(value, Variable):
            return self.number(value, dtype)
        if value.dtype == dtype:
            return value
        return self.declare(self.dialect.cast(Value(str(value), value.dtype), dtype), dtype)

    def compute_formula(self, name: str, operands: Sequence[Any]) -> Any:
        """Computes one of FORMULAS. Operands are variables and Python numbers."""
        variables = [one for one in operands if isinstance(one, Variable)]
        if not variables:
            variables = [self.number(operands[0], torch.float32 if isinstance(operands[0], float) else torch.int64)]
            operands = [variables[0], *operands[1:]]
        # The condition of `where` keeps its dtype.
        first = 1 if name == "where" else 0
        promoted = [one for one in operands[first:] if isinstance(one, Variable)]
        numbers = [one for one in operands[first:] if not isinstance(one, Variable)]
        dtypes = [one.dtype for one in promoted]
        if any(isinstance(one, float) for one in numbers):
            dtypes.append(torch.promote_types(dtypes[0], torch.float32) if dtypes else torch.float32)
        if name not in ("ldexp",) and dtypes:
            common = computed_in(name, dtypes)
            operands = [*operands[:first], *(self.cast(one, common) for one in operands[first:])]
        if name == "where":
            operands = [self.cast(operands[0], torch.bool), *operands[1:]]
        given = [one for one in operands if isinstance(one, Variable)]
        literals = tuple(None if isinstance(one, Variable) else one for one in operands)
        program = traced(name, tuple(one.dtype for one in given), literals)
        results = self.emit(program, given)
        return results[0] if len(results) == 1 else tuple(results)

    def emit(self, program: Program, operands: Sequence[Variable]) -> list[Variable]:
        """Writes the statements of a program."""
        values: list[Variable] = []
        for instruction in program.instructions:
            given = [values[number] for number in instruction.operands]
            if instruction.operation == "argument":
                values.append(operands[instruction.value])  # type: ignore[index]
            elif instruction.operation == "constant":
                values.append(self.number(instruction.value, instruction.dtype))
            elif instruction.operation == "loop":
                values.append(self._emit_loop(instruction.value, given))
            elif instruction.operation == "loop_result":
                values.append(self._part_of_loop(given[0], instruction.value, instruction.dtype))
            else:
                as_values = [Value(str(one), one.dtype) for one in given]
                text = self.dialect.spell(instruction.operation, as_values, instruction.dtype)
                values.append(self.declare(text, instruction.dtype))
                if instruction.operation in SLOW:
                    self.elements.add_slow(values[-1])
        return [values[number] for number in program.results]

    def _emit_loop(self, loop: Any, state: Sequence[Variable]) -> Variable:
        var = self.new_variable(state[0].dtype)
        name = f"{var}_"
        given = [Value(str(one), one.dtype) for one in state]
        self.compute.writelines([line.removeprefix("  ") for line in loop_statements(loop, self.dialect, given, name)])
        self.used_dtypes |= {one.dtype for one in state}
        return var

    def _part_of_loop(self, loop: Variable, position: Any, dtype: torch.dtype) -> Variable:
        var = self.create_cse_var(f"{loop}_{position}", ValueRanges.unknown(), dtype, ())
        if not self.inside_reduction:
            self.outside_loops.add(var)
        return var

    # Loads and stores

    def load(self, name: str, index: sympy.Expr) -> Variable:
        pointer = self.args.input(name)
        dtype = V.graph.get_dtype(name)
        self.used_dtypes.add(dtype)
        if should_unwrap_unspec_arg(name):  # a CPU scalar, which is an argument by value
            buffer = self.outside if self.inside_reduction else self.loads
            return self.declare(self.dialect.decode(pointer, dtype), value_dtype(dtype), buffer)
        indirect = self.is_indirect_indexing(index)
        index = self.prepare_indexing(index)
        buffer = self.loads
        if self.inside_reduction and not indirect and not self._depends_on_reduction(index) and not self._is_scoped():
            buffer = self.outside
        text = self.dialect.decode(f"{pointer}[{self.index_to_str(index)}]", dtype)
        text = self._if_inside(text, value_dtype(dtype), in_loop=buffer is not self.outside)
        return self.declare(text, value_dtype(dtype), buffer)

    def _if_inside(self, text: str, dtype: torch.dtype, in_loop: bool = True) -> str:
        """`text`, which must not be evaluated without an element, or without a result; then 0 instead."""
        condition = self._condition(in_loop and self.inside_reduction)
        return f"{condition} ? {text} : {self.dialect.constant(0, dtype)}" if condition else text

    def _condition(self, in_loop: bool) -> str:
        """Tells whether there is an element, or a result, if that is not sure."""
        return "inside" if self.has_inside and in_loop else "has_result" if self.teams > 1 else ""

    def _is_scoped(self) -> bool:
        """Whether the statements of a conditional are being written."""
        return self.loads is self.compute

    def _depends_on_reduction(self, index: sympy.Expr) -> bool:
        return any(
            symbol in self.range_tree_nodes and prefix_is_reduction(self.range_tree_nodes[symbol].root.prefix)
            for symbol in index.free_symbols
        ) or any(str(symbol).startswith("r0_") for symbol in index.free_symbols)

    def _stored(self, name: str, value: Variable) -> str:
        dtype = V.graph.get_dtype(name)
        self.used_dtypes.add(dtype)
        return self.dialect.encode(str(self.cast(value, value_dtype(dtype))), dtype)

    def store(  # type: ignore[override]
        self, name: str, index: sympy.Expr, value: Variable, mode: Any = None
    ) -> None:
        pointer = self.args.output(name)
        place = self.index_to_str(self.prepare_indexing(index))
        if mode == "atomic_add":
            self._store_atomically(name, pointer, place, value)
            return
        if mode not in (None, "tma"):
            raise NotImplementedError(f"kernels have no stores of mode {mode}")
        self._write(name, f"{pointer}[{place}] = {self._stored(name, value)};")

    def store_reduction(  # type: ignore[override]
        self, name: str, index: sympy.Expr, value: Variable
    ) -> None:
        pointer = self.args.output(name)
        prior, self.inside_reduction = self.inside_reduction, False
        compute, self.compute = self.compute, self.after_loop
        try:
            place = self.index_to_str(self.prepare_indexing(index))
            line = f"{pointer}[{place}] = {self._stored(name, value)};"
        finally:
            self.inside_reduction, self.compute = prior, compute
        buffer = self.after_loop if self.tile == 1 else self.last_stores
        buffer.writeline(DeferredLine(name, f"{self._once() if self.team > 1 else ''}{line}"))

    def _write(self, name: str, line: str) -> None:
        once = self.features.is_reduction() and not self.inside_reduction and self.team > 1
        condition = self._condition(self.inside_reduction)
        guard = self._once() if once else f"if ({condition}) " if condition else ""
        self.stores.writeline(DeferredLine(name, f"{guard}{line}"))

    def _once(self) -> str:
        """The head of a statement that one item of a team executes."""
        return f"if ({self.item} == 0{' && has_result' if self.teams > 1 else ''}) "

    def _store_atomically(self, name: str, pointer: str, place: str, value: Variable) -> None:
        dtype = V.graph.get_dtype(name)
        if dtype not in ATOMIC_DTYPES:
            raise NotImplementedError(f"kernels have no atomic addition of {dtype}")
        if dtype == torch.float32:
            add = "const float sum = as_float(before) + addend; after = as_uint(sum);"
        else:
            add = "after = before + (uint)addend;"
        addend, kind = self._stored(name, value), self.dialect.type(dtype)
        self._write(name, f"ATOMIC_ADD({pointer} + ({place}), {addend}, {kind}, {add})")

    def checked_index(self, index: Variable, size: sympy.Expr | int) -> Variable:
        """`index`, or 0 if it is out of range, which is reported as an error."""
        size = sympy.Integer(size) if isinstance(size, int) else size
        bounds = index.bounds
        if bounds.lower >= 0 and isinstance(size, sympy.Integer) and bounds.upper < size:
            return index
        self.reports_errors = True
        limit = self.index_to_str(size)
        integer = self.dialect.type(torch.int64)
        self.used_dtypes.add(torch.int64)
        text = f"or_first(checked_index(errors, error_operator, ({integer}){index}, ({integer})({limit})))"
        var = self.declare(self._if_inside(text, torch.int64), torch.int64)
        var.bounds = ValueRanges(0, torch.iinfo(torch.int64).max)
        return var

    def check_bounds(self, expr: sympy.Expr, size: sympy.Expr, lower: bool, upper: bool) -> None:
        """`checked_index` has checked the index already."""

    def device_assert_async(self, cond: Variable, msg: str) -> None:  # type: ignore[override]
        self.reports_errors = True
        self.error_texts.append(msg)
        fails = self._if_inside(f"!({cond})", torch.bool)
        self.compute.writeline(f"if ({fails}) report(errors, error_text{len(self.error_texts) - 1});")

    def random(self, kind: str, seed: Variable, offset: Variable, *limits: Variable) -> Variable:
        self.draws = True
        dtype = torch.int64 if kind == "integer" else torch.float32
        self.used_dtypes |= {torch.int64, torch.uint64}
        operands = [self.cast(one, torch.int64) for one in (seed, offset, *limits)]
        return self.declare(f"draw_{kind}({', '.join(map(str, operands))})", dtype)

    # Reductions

    def reduction(self, dtype: torch.dtype, src_dtype: torch.dtype, reduction_type: Any, value: Any) -> Any:
        values = value if isinstance(value, tuple) else (value,)
        key = (src_dtype, reduction_type, value)
        if key in self.cse.reduction_cache:
            return self.cse.reduction_cache[key]
        made = reduction(reduction_type, src_dtype, self.dialect.target.has_wide_sums)
        self.used_dtypes |= {*made.state, torch.int64}
        number = next(self._states)
        state = [f"state{number}_{k}" for k in range(len(made.state))]
        states = max(self.lanes, self.tile)
        partial = [f"{name}_lanes[lane]" if states > 1 else name for name in state]
        for name, kept, identity in zip(state, made.state, made.identity, strict=True):
            kind, begin = self.dialect.type(kept), self.dialect.constant(identity, kept)
            if self.tile == 1:
                self.body.writeline(f"{kind} {name} = {begin};")
            else:
                self.after_loop.writeline(f"const {kind} {name} = {name}_lanes[lane];")
            if states > 1:
                fill = f"for (int lane = 0; lane < {states}; ++lane) {name}_lanes[lane] = {begin};"
                self.body.writeline(f"{kind} {name}_lanes[{states}]; {fill}")
        position = Value("r0_position", torch.int64)
        given = [Value(str(one), one.dtype) for one in values]
        start = trace(made.start, [*(one.dtype for one in given), torch.int64])
        lines, started = statements(start, self.dialect, [*map(str, given), position.name], f"s{number}_")
        combined = trace(made.combine, [*made.state, *made.state])
        more, results = statements(combined, self.dialect, [*partial, *map(str, started)], f"c{number}_")
        uses_position = any(position.name in line for line in (*lines, *more)) or position.name in map(str, started)
        scope = [f"const {self.dialect.type(torch.int64)} r0_position = r0_index;"] if uses_position else []
        assign = self.assignments(made.state, state, results, partial)
        head = "if (inside) {" if self.has_inside else "{"
        self.compute.writelines([head, *scope, *(line.strip() for line in (*lines, *more)), *assign, "}"])
        if self.lanes > 1:
            self._combine_lanes(made, state, combined, number)
        if self.team > 1:
            self._combine_team(made, state, combined, number)
        found = []
        for at in made.results:
            name, kept = state[at], made.state[at]
            if kept != (wanted := value_dtype(dtype)) and reduction_type in ("sum", "prod"):
                text = self.dialect.cast(Value(name, kept), wanted)
                name, kept = f"{name}_rounded", wanted
                self.after_loop.writeline(f"const {self.dialect.type(kept)} {name} = {text};")
            var = self.create_cse_var(name, ValueRanges.unknown(), kept, ())
            self.outside_loops.add(var)
            found.append(var)
        result: Any = tuple(found) if len(found) > 1 else found[0]
        self.cse.reduction_cache[key] = result
        return result

    def assignments(
        self, dtypes: Sequence[torch.dtype], names: Sequence[str], values: Sequence[Value], places: Sequence[str] = ()
    ) -> list[str]:
        """Assigns all values together: a value can depend on a place that is assigned before it."""
        types = [self.dialect.type(dtype) for dtype in dtypes]
        lines = [f"const {one} {name}_next = {value};" for one, name, value in zip(types, names, values, strict=True)]
        return [*lines, *(f"{place} = {name}_next;" for place, name in zip(places or names, names, strict=True))]

    def _combine_lanes(self, made: Reduction, state: Sequence[str], combined: Program, number: int) -> None:
        """Statements after the loop: the partial states of the work item, combined one after another."""
        other = [f"{name}_lanes[lane]" for name in state]
        lines, results = statements(combined, self.dialect, [*state, *other], f"l{number}_")
        step = [*(line.strip() for line in lines), *self.assignments(made.state, state, results)]
        self.after_loop.writelines([f"for (int lane = 0; lane < {self.lanes}; ++lane) {{", *step, "}"])

    def _combine_team(self, made: Reduction, state: Sequence[str], combined: Program, number: int) -> None:
        """Statements after the loop: the states of all work items of the group, combined in a tree."""
        arrays = [self.shared_array("shared", dtype, k, self.group) for k, dtype in enumerate(made.state)]
        other = [f"{name}_other" for name in state]
        lines, results = statements(combined, self.dialect, [*state, *other], f"t{number}_")
        put = [f"{array}[ITEM] = {name};" for array, name in zip(arrays, state, strict=True)]
        loads = [
            f"const {self.dialect.type(dtype)} {name} = {array}[ITEM + distance];"
            for dtype, name, array in zip(made.state, other, arrays, strict=True)
        ]
        step = [*loads, *lines, *self.assignments(made.state, state, results), *put]
        self.after_loop.writelines(
            [
                *put,
                "BARRIER;",
                f"for (int distance = {self.team // 2}; distance > 0; distance >>= 1) {{",
                f"  if ({self.item} < distance) {{",
                *(f"    {line.strip()}" for line in step),
                "  }",
                "  BARRIER;",
                "}",
                *(f"{name} = {array}[{self.first_item}0];" for array, name in zip(arrays, state, strict=True)),
                "BARRIER;",
            ]
        )

    def shared_array(self, purpose: str, dtype: torch.dtype, number: int, length: int) -> str:
        """The name of an array in local memory. Other callers with the same purpose, dtype and number share it."""
        name = f"{purpose}_{str(dtype).removeprefix('torch.')}_{number}"
        self.shared[name] = (dtype, length)
        return name

    # Scans and sorts

    def scan(self, dtypes: Any, combine_fn: Any, values: Any) -> tuple[Variable, ...]:
        key = (dtypes, combine_fn, values)  # each result of a scan asks for all of them
        if key not in self.scans:
            number = next(self._states)
            if isinstance(combine_fn, Order):
                self.scans[key] = sort(self, number, values, combine_fn)
            else:
                self.scans[key] = Scan(self, number, dtypes, combine_fn).write(values)
        return self.scans[key]

    def key_function(self, dtype: torch.dtype) -> str:
        """The name of a function that maps values of `dtype` to unsigned integers of the same order."""
        self.sorted_dtypes.add(dtype)
        self.used_dtypes |= {torch.uint32, torch.uint64}
        return f"key_of_{str(dtype).removeprefix('torch.')}"

    @property
    def iteration(self) -> str:
        """The number of the loop's iteration: an index of arrays of `kept` elements."""
        return "step" if self.dialect.target.simt else f"{self.reduced_tree().prefix}index"

    def reduced_tree(self) -> Any:
        """The dimension of the iteration space that is reduced, scanned or sorted."""
        (tree,) = (tree for tree in self.range_trees if tree.is_loop)
        return tree

    # Loops

    def codegen_iteration_ranges_entry(self, entry: IterationRangesEntry) -> None:
        line = f"const {self.index_dtype} {entry.name} = {self.kexpr(self.rename_indexing(entry.expr))};"
        (self.indexing_code if entry.root.is_loop else self.outside).writeline(line)

    def codegen_body(self) -> None:
        if not (self.indexing_code or self.loads or self.compute or self.stores or self.after_loop):
            return
        if self.inside_reduction and any(tree.is_loop for tree in self.range_trees):
            tree = self.reduced_tree()
            earlier = (self.outside,) if self.tile > 1 else ()
            kept = self.elements.end_loop(self.loads, self.compute, self.stores)
            for head in self._loop_heads(f"{tree.prefix}index", self.numel_text(tree)):
                self.body.writelines(head.split("\n"))
                with self.body.indent():
                    self.body.writelines(kept)
                    for part in (*earlier, self.indexing_code, self.loads, self.compute, self.stores):
                        self.body.splice(part)
                self.body.writeline("}")
            self.scans.clear()
            tree.cache_clear()
            for node in self.range_tree_nodes.values():
                if node.root is tree:
                    node.cache_clear()
        else:
            stores_once = self.features.is_reduction() and self.team > 1 and bool(self.stores)
            for part in (self.indexing_code, self.loads, self.compute):
                self.outside.splice(part)
            if stores_once:  # other work items may still read what the first one overwrites
                self.body.writeline("BARRIER;")
            (self.body if self.tile == 1 else self.last_stores).splice(self.stores)
        self.outside.splice(self.after_loop)
        for part in (self.indexing_code, self.loads, self.compute, self.stores, self.after_loop):
            part.clear()

    def _loop_heads(self, index: str, numel: str) -> Iterator[str]:
        """The heads of the loops over the reduced elements. `lane` is the partial state that an element belongs to."""
        kind, first, lanes = self.index_dtype, f"{index}_first", self.lanes
        if self.tile > 1:
            loop = f"for ({kind} {index} = 0; {index} < {numel}; ++{index})"
            if self._has_partial_tiles():
                yield f"if (results < {self.tile}) {loop} {self._tile_head('results')}"
            # Compilers vectorize the inner loop, as its length is a constant.
            yield f"if (results == {self.tile}) {loop} {self._tile_head(str(self.tile))}"
            return
        if self.scans and self.team > 1:
            # All items reach the barriers. Those without an element access no memory.
            inside = "true" if numel.isdigit() and int(numel) % self.team == 0 else f"{index} < {numel}"
            inside += " && has_result" if self.teams > 1 else ""
            yield (
                f"for ({kind} {first} = 0; {first} < {numel}; {first} += {self.team}) {{ "
                f"const {kind} {index} = {first} + {self.item}; const bool inside = {inside};"
            )
            return
        if self.kept and self.dialect.target.simt:
            # Unrolled, so that kept values are in registers.
            place = f"ITEM + step * {self.team}" if self.team > 1 else "step"
            skip = f" if ({index} >= {numel}) continue;" if int(numel) % self.team else ""
            yield (
                f"#pragma unroll\nfor (int step = 0; step < {self.kept}; ++step) {{ "
                f"const {kind} {index} = {place};{skip}"
            )
            return
        if lanes == 1:
            begin, step = (self.item, str(self.team)) if self.team > 1 else ("0", "1")
            inside = f" const bool inside = {self._condition(False) or 'true'};" if self.has_inside else ""
            yield f"for ({kind} {index} = {begin}; {index} < {numel}; {index} += {step}) {{{inside}"
            return
        # Compilers vectorize the inner loop, as its length is a constant.
        yield (
            f"for ({kind} {first} = 0; {first} + {lanes} <= {numel}; {first} += {lanes}) "
            f"for (int lane = 0; lane < {lanes}; ++lane) {{ const {kind} {index} = {first} + lane;"
        )
        if not numel.isdigit() or int(numel) % lanes:
            yield f"for ({kind} {index} = {numel} / {lanes} * {lanes}, lane = 0; {index} < {numel}; ++{index}) {{"

    def _has_partial_tiles(self) -> bool:
        numel = self.numel_text(self._kept_trees()[0])
        return not numel.isdigit() or int(numel) % self.tile != 0

    def _tile_head(self, results: str) -> str:
        """The head of a loop over the results of a tile."""
        index = f"{self._kept_trees()[0].prefix}index"
        return (
            f"for (int lane = 0; lane < {results}; ++lane) {{ const {self.index_dtype} {index} = {index}_first + lane;"
        )

    def numel_text(self, tree: Any) -> str:
        """The number of elements along a dimension of the iteration space."""
        if isinstance(tree.numel, (int, sympy.Integer)):
            return str(int(tree.numel))
        return f"{tree.prefix}numel"

    # The whole kernel

    def _kept_trees(self) -> list[Any]:
        """The dimensions of the iteration space that are not reduced, innermost first."""
        trees = (tree for tree in self.range_trees if not prefix_is_reduction(tree.prefix))
        return sorted(trees, key=lambda tree: tree.prefix)

    def _dynamic_trees(self) -> list[Any]:
        return [tree for tree in self.range_trees if not isinstance(tree.numel, (int, sympy.Integer))]

    def codegen_kernel(self, name: str | None = None) -> str:
        """The kernel in the wrapper: a `torch_backplane.compile.runtime.GraphKernel`."""
        self.codegen_body()
        entry = name or "KERNEL_NAME"
        kernel = self.finished(entry)
        roles = [repr(one.role) if one.role in ("input", "output") else str(one.dtype) for one in kernel.parameters]
        lines = [
            "bp_compile.GraphKernel(",
            f"    name={entry!r},",
            f"    parameters=[{', '.join(roles)}],",
            f"    local_bytes={kernel.local_bytes!r},",
            f"    team={self.team!r},",
            f"    teams={self.teams!r},",
            f"    tile={self.tile!r},",
            f"    reduces={self.features.is_reduction()!r},",
            f"    reports_errors={self.reports_errors!r},",
            f"    error_texts={self.error_texts!r},",
            f"    device={V.graph.get_current_device_or_throw().index!r},",
            '    text="""',
            kernel.text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"'),
            '""",',
            ")",
        ]
        return "\n".join(lines)

    def finished(self, entry: str) -> Kernel:
        """The kernel: its text and parameters."""
        dialect = self.dialect
        self.named_parameters = {}
        declared: list[str] = []
        pointers: list[str] = []
        index_dtype = self.get_index_dtype_as_torch_dtype()

        def add_parameter(name: str, role: Any, dtype: torch.dtype) -> None:
            self.used_dtypes.add(dtype)
            self.named_parameters[name] = Parameter(role, dtype, len(self.named_parameters))

        def buffer(pointer: str, dtype: torch.dtype, written: bool) -> None:
            add_parameter(pointer, "output" if written else "input", dtype)
            declared.extend(dialect.buffer_parameters(pointer, dtype, written))
            pointers.extend(dialect.buffer_pointer(pointer, dtype, written))

        definitions, _, arguments, dtypes = self.args.python_argdefs()
        written = {*self.args.output_buffers.values()} | {
            one.inner_name for one in self.args.inplace_buffers.values() if hasattr(one, "inner_name")
        }
        numbers = []
        for definition, argument, dtype in zip(definitions, arguments, dtypes, strict=True):
            if hasattr(argument, "buffer") and should_unwrap_unspec_arg(argument.buffer):
                numbers.append((definition.name, dtype))
            elif hasattr(argument, "buffer"):
                buffer(definition.name, dtype, definition.name in written)
            else:
                numbers.append((definition.name, torch.float32 if is_float(argument) else index_dtype))
        loaded = []
        if self.more_input is not None:
            variable, place = self.more_input
            buffer(f"{variable}_ptr", variable.dtype, False)
            text = dialect.decode(f"{variable}_ptr[{place}]", variable.dtype)
            loaded.append(f"const {dialect.type(value_dtype(variable.dtype))} {variable} = {text};")
        if self.reports_errors:
            buffer("errors", torch.int32, True)
        numbers += [(f"{tree.prefix}numel", index_dtype) for tree in self._dynamic_trees()]
        if self.reports_errors:
            names = ["error_operator", *(f"error_text{k}" for k in range(len(self.error_texts)))]
            numbers += [(name, torch.int32) for name in names]
        for number, dtype in numbers:
            add_parameter(number, "scalar", dtype)
            declared.append(f"const {dialect.storage_type(dtype)} {number}")
        if self.tile > 1:
            self.body.writeline(self._tile_head("results"))
            with self.body.indent():
                self.body.splice(self.outside)
                self.body.splice(self.last_stores)
            self.body.writeline("}")
        shared = [f"LOCAL {dialect.storage_type(dtype)} {name}[{n}];" for name, (dtype, n) in self.shared.items()]
        head = [*pointers, *shared, *self.variables.values(), *self._work_item(), *loaded]
        body = [*head, *self.body.getvalue().splitlines()]
        body = [line if line.startswith("  ") and line in pointers else f"  {line}" for line in body]
        functions = self._functions("\n".join(body))
        text = "\n".join([functions, *body])
        header = dialect.header(frozenset(self.used_dtypes), text)
        group_size = self.group if self.team > 1 else None
        whole = dialect.kernel(entry, declared, group_size, body, bounded=self.team == 1)
        local = sum(length * dtype.itemsize for dtype, length in self.shared.values())
        source = "\n".join([header, macros(dialect, text), functions, whole])
        return Kernel(entry, source, tuple(self.named_parameters.values()), None, group_size, local)

    def _work_item(self) -> Iterator[str]:
        """Statements that declare the indices of the work item, and end those that are out of bounds."""
        dialect, wide = self.dialect, self.get_index_dtype_as_torch_dtype() == torch.int64
        index = self.index_dtype
        kept = self._kept_trees()
        if self.team > 1:
            assert len(kept) == 1
            result = f"{kept[0].prefix}index"
            if self.teams == 1:
                yield f"const {index} {result} = ({index})GROUP;"
                return
            yield f"const int member = ITEM % {self.team}, first_item = ITEM - member;"
            yield f"const {index} {result} = ({index})GROUP * {self.teams} + ITEM / {self.team};"
            yield f"const bool has_result = {result} < {self.numel_text(kept[0])};"
            return
        if self.tile > 1:
            first, numel = f"{kept[0].prefix}index_first", self.numel_text(kept[0])
            yield f"const {index} {first} = ({index})({dialect.global_index(wide)}) * {self.tile};"
            yield f"if ({first} >= {numel}) return;"
            yield f"const int results = (int)({numel} - {first} < {self.tile} ? {numel} - {first} : {self.tile});"
            return
        for tree, text in zip(kept, (dialect.global_index(wide), dialect.global_row(wide)), strict=False):
            yield f"const {index} {tree.prefix}index = ({index})({text});"
        bounds = [(f"{tree.prefix}index", self.numel_text(tree)) for tree in kept]
        yield f"if ({dialect.beyond(*bounds)}) return;"

    def _functions(self, text: str) -> str:
        dialect, parts = self.dialect, []
        if "floor_div" in text or "floor_mod" in text:
            parts.append(FUNCTIONS)
        if "ATOMIC_ADD" in text:
            parts.append(ATOMIC_ADD)
        if self.reports_errors:
            parts.append(REPORTS)
        parts += [key_function(dialect, one, self.key_function(one)) for one in sorted(self.sorted_dtypes, key=str)]
        if self.draws:
            parts += ["typedef float value_t;", scalar_words(dialect, torch.float32), RANDOM]
        types = {"uint64": dialect.type(torch.uint64), "int64": dialect.type(torch.int64)}
        return re.sub(r"\bu?int64\b", lambda match: types[match[0]], "\n".join(parts))

    def call_kernel(self, name: str, node: ir.IRNode | None = None, deallocate_ws: bool = True) -> None:
        V.graph.wrapper_code.writeline(f"{name}.run({', '.join(self.call_arguments(name))})")

    def codegen_nan_check(self) -> None:
        """Statements that check the kernel's buffers after it ran, for `torch._inductor.config.nan_asserts`."""
        _, call_args, arguments, _ = self.args.python_argdefs()
        for given, argument in zip(call_args, arguments, strict=True):
            if hasattr(argument, "buffer") and not should_unwrap_unspec_arg(argument.buffer):
                for kind in ("isnan", "isinf"):
                    V.graph.wrapper_code.writeline(f"assert not {given}.{kind}().any().item()")

    def call_arguments(self, name: str, without: str = "") -> list[str]:
        """The arguments of the kernel's `run` in the wrapper: buffers but `without`, numbers and sizes."""
        wrapper = V.graph.wrapper_code
        _, call_args, arguments, _ = self.args.python_argdefs()
        tensors, numbers = [], []
        for given, argument in zip(call_args, arguments, strict=True):
            if hasattr(argument, "buffer") and should_unwrap_unspec_arg(argument.buffer):
                numbers.append(f"{given}.item()")
            elif hasattr(argument, "buffer"):
                tensors += [str(given)] if str(given) != without else []
            else:
                numbers.append(wrapper.codegen_python_sizevar(given))
        for tree in self._dynamic_trees():
            numbers.append(str(wrapper.generate_numel_expr(name, tree).inner))
        sizes = []
        for tree in self._kept_trees():
            static = isinstance(tree.numel, (int, sympy.Integer))
            sizes.append(str(int(tree.numel)) if static else f"{name}_{tree.prefix}numel")
        return [f"[{', '.join(each)}]" for each in (tensors, numbers, sizes)]


def is_float(argument: Any) -> bool:
    """Whether an argument of a kernel is a float that is known when the graph runs."""
    return isinstance(getattr(argument, "expr", None), sympy.Symbol) and str(argument.expr).startswith("zuf")
