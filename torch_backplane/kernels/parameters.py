"""The text of kernel parameters: names, declarations, and index arithmetic over sizes and strides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.kernel import Parameter


def parameter_name(parameter: Parameter) -> str:
    """The name of `parameter` in the text."""
    return {
        "output": f"out{parameter.operand}",
        "input": f"in{parameter.operand}",
        "scalar": f"scalar{parameter.operand}",
        "count": "count",
        "rows": "rows",
        "tiles": "tiles",
        "size": f"size{parameter.dimension}",
        "stride": f"stride{parameter.operand}_{parameter.dimension}",
    }[parameter.role]


def declarations(dialect: Dialect, parameters: Sequence[Parameter]) -> list[str]:
    """The kernel's parameter list."""
    found: list[str] = []
    for parameter in parameters:
        name = parameter_name(parameter)
        if parameter.role in ("output", "input"):
            found += dialect.buffer_parameters(name, parameter.dtype, parameter.role == "output")
        else:
            found.append(f"const {dialect.storage_type(parameter.dtype)} {name}")
    return found


def pointers(dialect: Dialect, parameters: Sequence[Parameter]) -> list[str]:
    """Statements that declare a pointer for each tensor."""
    return [
        line
        for parameter in parameters
        if parameter.role in ("output", "input")
        for line in dialect.buffer_pointer(parameter_name(parameter), parameter.dtype, parameter.role == "output")
    ]


def advance(
    index_type: str,
    index: str,
    rank: int,
    places: Mapping[str, str],
    first: int = 0,
) -> list[str]:
    """Statements that split a linear index into positions in `rank` dimensions and add their offsets to `places`.

    Args:
        index: name of the variable that holds the linear index; also a prefix of the variables that this declares.
        places: maps the name of each offset to the name of its strides without the dimension number.
        first: the innermost dimension that the index counts; earlier dimensions are skipped.
    """
    lines = [f"{index_type} {index}_rest = {index};"] if rank > first else []
    for dimension in range(first, rank):
        at = f"{index}_rest"
        if dimension < rank - 1:
            at = f"{index}_{dimension}"
            lines.append(f"const {index_type} {at} = {index}_rest % size{dimension};")
            lines.append(f"{index}_rest /= size{dimension};")
        lines += [f"{place} += {at} * {stride}{dimension};" for place, stride in places.items()]
    return ["  " + line for line in lines]
