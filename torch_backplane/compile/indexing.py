"""Prints Inductor's index expressions (sympy) as text of a kernel, in a dialect like C."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from sympy.printing.precedence import PRECEDENCE
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv, ModularIndexing
from torch.utils._sympy.printers import ExprPrinter

# Division and remainder that round down, for operands that can be negative.
FUNCTIONS = """\
#define floor_div(a, b) ((a) / (b) - (((a) % (b) != 0) && (((a) < 0) != ((b) < 0))))
#define floor_mod(a, b) ((a) % (b) + ((((a) % (b) != 0) && (((a) < 0) != ((b) < 0))) ? (b) : 0))
"""


class IndexPrinter(ExprPrinter):
    """Prints expressions over int32 or int64 variables. Sizes are at most 64-bit integers."""

    real = "float"  # the type of real parts, such as the inverse of a size

    def _print_FloorDiv(self, expr: Any) -> str:
        x, divisor = expr.args
        if x.is_nonnegative and divisor.is_positive:
            return f"({self._operand(x)} / {self._operand(divisor)})"
        return f"floor_div({self._print(x)}, {self._print(divisor)})"

    def _print_ModularIndexing(self, expr: Any) -> str:
        x, divisor, modulus = expr.args
        negative = not (x.is_nonnegative and divisor.is_positive)
        text = self._operand(x)
        if divisor != 1:
            text = f"floor_div({text}, {self._print(divisor)})" if negative else f"({text} / {self._operand(divisor)})"
        if negative:
            return f"floor_mod({text}, {self._print(modulus)})"
        return f"({text} % {self._operand(modulus)})"

    def _print_PythonMod(self, expr: Any) -> str:
        a, b = expr.args
        return f"floor_mod({self._print(a)}, {self._print(b)})"

    def _print_Mod(self, expr: Any) -> str:
        return self._infix("%", expr)

    def _print_Min(self, expr: Any) -> str:
        return self._extremum(expr.args, "<")

    def _print_Max(self, expr: Any) -> str:
        return self._extremum(expr.args, ">")

    def _extremum(self, operands: Any, sign: str) -> str:
        text = self._operand(operands[0])
        for operand in operands[1:]:
            other = self._operand(operand)
            text = f"({text} {sign} {other} ? {text} : {other})"
        return text

    def _print_Where(self, expr: Any) -> str:
        condition, a, b = (self._operand(one) for one in expr.args)
        return f"({condition} ? {a} : {b})"

    def _print_And(self, expr: Any) -> str:
        return self._infix("&&", expr)

    def _print_Or(self, expr: Any) -> str:
        return self._infix("||", expr)

    def _infix(self, sign: str, expr: Any) -> str:
        return "(" + f" {sign} ".join(self._operand(one) for one in expr.args) + ")"

    def _print_Not(self, expr: Any) -> str:
        return f"!({self._print(expr.args[0])})"

    def _print_Abs(self, expr: Any) -> str:
        a = self._operand(expr.args[0])
        return f"({a} < 0 ? -{a} : {a})"

    def _print_LShift(self, expr: Any) -> str:
        return self._infix("<<", expr)

    def _print_RShift(self, expr: Any) -> str:
        return self._infix(">>", expr)

    def _print_PowByNatural(self, expr: Any) -> str:
        base, exponent = expr.args
        if not isinstance(exponent, sympy.Integer):
            raise NotImplementedError(f"an index with a power of a size: {expr}")
        return "(" + " * ".join([self._operand(base)] * int(exponent)) + ")" if exponent else "1"

    def _print_ToFloat(self, expr: Any) -> str:
        return f"({self.real})({self._print(expr.args[0])})"

    def _print_IntTrueDiv(self, expr: Any) -> str:
        a, b = expr.args
        return f"(({self.real})({self._print(a)}) / ({self.real})({self._print(b)}))"

    def _print_TruncToInt(self, expr: Any) -> str:
        return f"(long)({self._print(expr.args[0])})"

    def _print_FloorToInt(self, expr: Any) -> str:
        return f"(long)floor(({self.real})({self._print(expr.args[0])}))"

    def _print_CeilToInt(self, expr: Any) -> str:
        return f"(long)ceil(({self.real})({self._print(expr.args[0])}))"

    def _print_RoundToInt(self, expr: Any) -> str:
        return f"(long)rint(({self.real})({self._print(expr.args[0])}))"

    def _print_RoundDecimal(self, expr: Any) -> str:
        number, digits = expr.args
        power = self._print(sympy.Float(10 ** abs(int(digits))))
        there, back = ("*", "/") if digits > 0 else ("/", "*")
        return f"(rint(({self.real})({self._print(number)}) {there} {power}) {back} {power})"

    def _print_Float(self, expr: Any) -> str:
        return str(int(expr)) if expr == int(expr) else float(expr).hex() + ("f" if self.real == "float" else "")

    def _operand(self, expr: Any) -> str:
        return self.parenthesize(expr, PRECEDENCE["Atom"] - 0.5)


class Float64Printer(IndexPrinter):
    """Prints real parts in float64."""

    real = "double"


PLACE = sympy.Symbol("place", integer=True, nonnegative=True)


def index_at_place(place: sympy.Expr, entries: Mapping[sympy.Symbol, Any], numel: sympy.Expr) -> sympy.Expr | None:
    """Inverts the place of an element in memory: returns the index of the element at PLACE in a kernel's iterations.

    Args:
        place: the place, an expression of loop variables.
        entries: loop variables with their lengths, and their divisors in the index.
        numel: number of iterations.

    Returns:
        None if `place` is not a sum of variables times strides, or if strides overlap.
    """
    sizes = V.graph.sizevars
    place = sympy.expand(place)
    strides = {one: place.coeff(one) for one in place.free_symbols if one in entries}
    rest = sympy.expand(place - sum(one * stride for one, stride in strides.items()))
    variables = [one for stride in (rest, *strides.values()) for one in stride.free_symbols if one in entries]
    lengths = sympy.prod([entries[one].length for one in strides])
    if variables or rest != 0 or not sizes.statically_known_equals(lengths, numel):
        return None
    ordered: list[sympy.Symbol] = []  # the innermost first
    reached = sympy.Integer(1)
    while left := strides.keys() - {*ordered}:
        least = [one for one in left if all(sizes.statically_known_leq(strides[one], strides[other]) for other in left)]
        if not least or not sizes.statically_known_leq(reached, strides[least[0]]):
            return None
        ordered.append(least[0])
        reached = strides[least[0]] * entries[least[0]].length
    if all(sizes.statically_known_equals(entries[one].divisor, stride) for one, stride in strides.items()):
        return PLACE
    index, rest = sympy.Integer(0), PLACE
    for one in reversed(ordered):
        index += FloorDiv(rest, strides[one]) * entries[one].divisor
        rest = ModularIndexing(rest, 1, strides[one])
    return index
