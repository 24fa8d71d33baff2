"""Moves with indices and masks."""

from __future__ import annotations

import torch

from fuzz.calls import convertible
from fuzz.moves import move
from fuzz.random_arguments import RandomArguments


def subscript(draw: RandomArguments, name: str, distinct: bool) -> tuple[str, bool]:
    """Returns the text of a subscript, and whether it contains an index tensor or a mask."""
    shape = draw.get(name).shape
    parts: list[str] = []
    dim = 0
    indexed = False
    count = draw.one([0, 1, 2, 3, 4])
    while dim < len(shape):
        size = shape[dim]
        kind = draw.one(["slice", "whole", "index", "index", "number", "none", "mask", "list", "end"])
        if kind == "index" or (kind == "list" and size):
            here = count if not distinct or indexed else min(count, size)
            if distinct and indexed:
                here = count  # the first index is distinct, so the combinations are
            index = draw.index(here, size, distinct=distinct and not indexed)
            count = draw.get(index).numel()
            parts.append(index if kind == "index" else f"{index}.tolist()")
            indexed = True
        elif kind == "mask" and not indexed and draw.chance(0.5):
            parts.append(draw.mask(shape[dim : dim + 1]))
            indexed = True
            dim += 1
            break
        elif kind == "slice":
            parts.append(draw.one(["::2", "1:", ":-1", ":2", "-2:"]))
        elif kind == "number" and size:
            parts.append(str(draw.whole(-size, size - 1 + draw.chance(draw.bad))))
        elif kind == "none":
            parts.append("None")
            continue
        elif kind == "end":
            break
        else:
            parts.append(":")
        dim += 1
    if not parts:
        parts = ["..."]
    return ", ".join(parts), indexed


@move
def read_index(draw: RandomArguments) -> None:
    name = draw.tensor()
    if draw.chance(0.2):
        draw.assign(f"{name}[{draw.mask(draw.get(name).shape)}]", "index mask")
        return
    brackets, _ = subscript(draw, name, distinct=False)
    draw.assign(f"{name}[{brackets}]", "index")


@move
def write_index(draw: RandomArguments) -> None:
    name = draw.tensor()
    dtype = draw.get(name).dtype
    if draw.chance(0.25):
        draw.line(f"{name}[{draw.mask(draw.get(name).shape)}] = {draw.number(dtype)}", "index_put mask")
        return
    brackets, _ = subscript(draw, name, distinct=True)
    try:
        target = eval(f"{name}[{brackets}]", dict(draw.run.cpu))
    except Exception:
        target = torch.zeros(())
    if draw.chance(0.4):
        draw.line(f"{name}[{brackets}] = {draw.number(dtype)}", "index_put")
        return
    source = draw.new(draw.broadcastable(target.shape), dtype if draw.chance(0.8) else draw.dtype())
    if convertible(draw, source, dtype):
        draw.line(f"{name}[{brackets}] = {source}", "index_put")


@move
def along(draw: RandomArguments) -> None:
    """Calls index_select, gather, scatter and related operators."""
    name = draw.tensor()
    tensor = draw.get(name)
    dim = draw.dim(name)
    size = draw.size_of(name, dim)
    if draw.chance(0.5):
        count = draw.one([0, 1, 2, 3])
        kind = draw.one(["index_select", "index_fill", "index_copy", "index_add", "index_reduce"])
        index = draw.index(count, size, distinct=kind in ("index_copy", "index_fill"))
        if kind == "index_select":
            draw.assign(f"torch.index_select({name}, {dim}, {index})", kind)
            return
        mark, put = draw.one([("", draw.assign), ("_", draw.line)])
        if kind == "index_fill":
            put(f"{name}.index_fill{mark}({dim}, {index}, {draw.number(tensor.dtype)})", kind + mark)
            return
        shape = list(tensor.shape)
        if shape and -len(shape) <= int(dim) < len(shape):
            shape[int(dim)] = draw.get(index).numel()
        source = draw.new(shape, tensor.dtype if draw.chance(0.95) else draw.dtype(), "whole")
        if kind == "index_reduce":
            how = draw.one(["'prod'", "'mean'", "'amax'", "'amin'"])
            put(
                f"{name}.index_reduce{mark}({dim}, {index}, {source}, {how}, include_self={draw.one([True, False])})",
                kind + mark,
            )
            return
        alpha = f", alpha={draw.number(tensor.dtype)}" if kind == "index_add" and draw.chance(0.4) else ""
        put(f"{name}.{kind}{mark}({dim}, {index}, {source}{alpha})", kind + mark)
        return
    shape = [draw.whole(0, extent) if extent else 0 for extent in tensor.shape]
    place = int(dim) % max(1, len(shape))
    kind = draw.one(
        [
            "gather",
            "scatter",
            "scatter_add",
            "scatter_reduce",
            "take_along_dim",
            "scatter value",
        ]
    )
    count = 1
    for extent in shape:
        count *= extent
    if kind in ("gather", "take_along_dim", "scatter_add", "scatter_reduce"):
        index = draw.index(count, size, shape=shape)
    else:  # each index at most once
        order = draw.random.sample(range(size), min(shape[place], size)) if shape else [0]
        along_dim = [1] * len(shape)
        if shape:
            shape[place] = along_dim[place] = len(order)
        index = draw.assign(
            f"torch.tensor({order}, device=d).view({tuple(along_dim)}).expand({tuple(shape)})", "expand"
        )
    if kind in ("gather", "take_along_dim"):
        where = f"{dim}, {index}" if kind == "gather" else f"{index}, {dim}"
        draw.assign(f"torch.{kind}({name}, {where})", kind)
        return
    mark, put = draw.one([("", draw.assign), ("_", draw.line)])
    if kind == "scatter value":
        put(f"{name}.scatter{mark}({dim}, {index}, {draw.number(tensor.dtype)})", "scatter" + mark)
        return
    source = draw.new(
        [extent + draw.one([0, 0, 1]) for extent in shape], tensor.dtype if draw.chance(0.95) else draw.dtype(), "whole"
    )
    how = ""
    if kind == "scatter_reduce":
        how = f", {draw.one(['sum', 'prod', 'mean', 'amax', 'amin'])!r}, include_self={draw.one([True, False])}"
    put(f"{name}.{kind}{mark}({dim}, {index}, {source}{how})", kind + mark)


@move
def flat(draw: RandomArguments) -> None:
    """Calls take, put_, masked_scatter_ or masked_select."""
    name = draw.tensor()
    tensor = draw.get(name)
    kind = draw.one(["take", "put_", "masked_scatter_", "masked_select"])
    if kind == "take":
        draw.assign(f"torch.take({name}, {draw.index(draw.one([0, 1, 4]), tensor.numel())})", kind)
    elif kind == "put_":
        add = draw.one([True, False])
        index = draw.index(draw.one([0, 1, 3]), tensor.numel(), distinct=not add)
        source = draw.new((draw.get(index).numel(),), tensor.dtype, "whole")
        draw.line(f"{name}.put_({index}, {source}, accumulate={add})", kind)
    elif kind == "masked_select":
        draw.assign(f"torch.masked_select({name}, {draw.mask(tensor.shape)})", kind)
    else:
        source = draw.new((tensor.numel() + 1,), tensor.dtype)
        draw.line(f"{name}.masked_scatter_({draw.mask(tensor.shape)}, {source})", kind)
