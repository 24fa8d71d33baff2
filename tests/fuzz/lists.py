"""Moves with lists of tensors: all overloads of torch._foreach_*, from their schemas."""

from __future__ import annotations

from functools import cache

import torch

from fuzz.moves import move
from fuzz.random_arguments import RandomArguments


@cache
def _overloads() -> list[tuple[str, tuple[tuple[str, str, bool], ...]]]:
    """Returns (name, arguments as (name, type, whether it is optional)) of each overload without `out=`."""
    found = []
    for name in sorted(dir(torch)):
        if not name.startswith("_foreach_") or not hasattr(torch.ops.aten, name):
            continue
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            schema = getattr(packet, overload)._schema
            if any(one.is_out for one in schema.arguments):
                continue
            arguments = tuple((one.name, str(one.type), one.has_default_value()) for one in schema.arguments)
            found.append((name, arguments))
    return found


@move
def lists(draw: RandomArguments) -> None:
    """Calls an overload one to three times, with different numbers and tensors."""
    alone = draw.chance(0.25)
    name, arguments = draw.one([one for one in _overloads() if (len(one[1]) == 1) == alone])
    count = draw.one([0, 1, 2, 2, 3, 9])
    tensors = [draw.tensor(fresh=0.3) for _ in range(count)]
    for _ in range(draw.one([1, 2, 3])):
        if tensors and draw.chance(0.4):
            tensors[draw.random.randrange(len(tensors))] = draw.tensor(fresh=0.5)
        if name.endswith("_"):  # write each tensor only once
            tensors = list(dict.fromkeys(tensors))
        given = [_argument(draw, kind, word, tensors, at == 0) for at, (word, kind, optional) in enumerate(arguments)
                 if not optional or draw.chance(0.5)]  # fmt: skip
        text = f"torch.{name}({', '.join(given)})"
        if name.endswith("_"):
            draw.line(text, name)
        else:
            draw.assign(text, name)


def _argument(draw: RandomArguments, kind: str, word: str, tensors: list[str], is_first: bool) -> str:
    count = len(tensors) + (draw.one([-1, 1]) if draw.chance(draw.bad) and tensors else 0)
    dtype = draw.get(tensors[0]).dtype if tensors else torch.float32
    match kind:
        case "List[Tensor]" if is_first:
            return f"[{', '.join(tensors)}]"
        case "List[Tensor]":
            others = [draw.like(tensors[at % len(tensors)], same_dtype=0.9) for at in range(count)]
            return f"[{', '.join(others)}]"
        case "List[number]":
            return f"{word}=[{', '.join(draw.number(dtype) for _ in range(count))}]"
        case "Tensor":
            where = draw.one(["", ", device=d"])
            if word in ("scalars",):
                return f"torch.tensor([{', '.join(draw.number(torch.float32) for _ in range(count))}])"
            return f"torch.tensor({draw.number(dtype)}{where})"
        case "number" | "float":
            return draw.number(dtype) if word not in ("ord", "alpha", "value") else f"{word}={draw.number(dtype)}"
        case "bool":
            return f"{word}={draw.one([True, False])}"
    return f"{word}=None"
