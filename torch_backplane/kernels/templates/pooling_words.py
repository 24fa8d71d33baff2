"""Kernel text for windows over images: planes, window positions o, and image elements i."""

from __future__ import annotations

from torch_backplane.kernels.templates.source import split
from torch_backplane.kernels.templates.unfold import linear


def places(rank: int, name: str, sizes: str, letter: str = "o") -> str:
    """Returns statements that declare `plane` and the coordinates of the work item's element."""
    return split(
        "item", ["planes", *(f"{sizes}{d}" for d in range(rank))], ["plane", *(f"{letter}{d}" for d in range(rank))]
    )


def plane_at(rank: int, sizes: str) -> str:
    return " * ".join(["plane", *(f"{sizes}{d}" for d in range(rank))])


def element(rank: int) -> str:
    return linear([f"i{d}" for d in range(rank)], [f"image{d}" for d in range(1, rank)])


def place(rank: int) -> str:
    return linear([f"o{d}" for d in range(rank)], [f"places{d}" for d in range(1, rank)])


def loops(rank: int) -> str:
    return " ".join(f"for (index_t k{d} = 0; k{d} < window{d}; ++k{d}) {{" for d in range(rank))


def covered(rank: int) -> str:
    """Returns statements that declare i, the image coordinates of element k of window o."""
    return " ".join(f"const index_t i{d} = o{d} * stride{d} - padding{d} + k{d} * dilation{d};" for d in range(rank))


def inside(rank: int) -> str:
    return " && ".join(f"i{d} >= 0 && i{d} < image{d}" for d in range(rank))


def covering_loops(rank: int) -> str:
    """Returns loops over the windows o that cover element i."""
    return " ".join(
        f"const index_t least{d} = i{d} + padding{d} - (window{d} - 1) * dilation{d}; "
        f"const index_t first{d} = least{d} <= 0 ? 0 : (least{d} + stride{d} - 1) / stride{d}, "
        f"last{d} = min((i{d} + padding{d}) / stride{d}, places{d} - 1); "
        f"for (index_t o{d} = first{d}; o{d} <= last{d}; ++o{d}) {{ "
        f"if (dilation{d} != 1 && (i{d} + padding{d} - o{d} * stride{d}) % dilation{d} != 0) continue;"
        for d in range(rank)
    )


def count(rank: int, count_padding: bool, divisor: int | None) -> str:
    """Returns statements that declare `count`, the divisor for the sum of window o.

    Elements beyond the padding never count.
    """
    if divisor is not None:
        return "const index_t count = divisor;"
    lines = []
    for d in range(rank):
        begin = f"o{d} * stride{d} - padding{d}"
        if count_padding:
            lines.append(f"const index_t covered{d} = min({begin} + window{d}, image{d} + padding{d}) - ({begin});")
        else:
            lines.append(f"const index_t covered{d} = min({begin} + window{d}, image{d}) - max({begin}, (index_t)0);")
    return " ".join([*lines, f"const index_t count = {' * '.join(f'covered{d}' for d in range(rank))};"])
