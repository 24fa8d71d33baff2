"""Draws random arguments of calls: tensors with various layouts, numbers, dimensions, indices."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuzz.lockstep import Lockstep
from fuzz.programs import Finding, Step, living

# Relative frequencies.
DTYPES = {
    torch.float32: 10, torch.int64: 4, torch.bool: 3, torch.float16: 3, torch.bfloat16: 2, torch.int32: 2,
    torch.float64: 2, torch.uint8: 2, torch.int8: 1, torch.int16: 1, torch.complex64: 2,
    torch.complex128: 0.5, torch.uint16: 0.3, torch.uint32: 0.3,
}  # fmt: skip
FLOATING = [dtype for dtype in DTYPES if dtype.is_floating_point]
WHOLE = [torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16]
SIZES = [0, 1, 1, 2, 2, 3, 3, 4, 5, 7]
LIVING = 9
LARGEST = 3000  # elements

Shape = Sequence[int]


class RandomArguments:
    """Draws lines of a program and runs them. The live tensors decide which lines can follow.

    Args:
        numbers: the source of random choices.
        run: the program, which runs each line when it is drawn.
        report: called with the findings of each line.
        announce: called with each line before it runs, because it can crash the process.
    """

    def __init__(
        self,
        numbers: random.Random,
        run: Lockstep,
        report: Callable[[list[Finding]], None],
        announce: Callable[[Step], None],
    ) -> None:
        self.random = numbers
        self.run = run
        self.report = report
        self.announce = announce
        self.count = 0
        self.data = 0
        # A program uses few dtypes, so that tensors can be combined.
        self.palette = {torch.float32, *numbers.choices(list(DTYPES), list(DTYPES.values()), k=2)}
        self.bad = numbers.choice([0.01, 0.02, 0.02, 0.1])  # probability of an argument that is probably invalid

    # --- lines -------------------------------------------------------------------------------------------------------
    def line(self, text: str, operator: str, random: bool = False) -> None:
        step = Step(text, operator, random)
        self.announce(step)
        self.report(self.run.run(step))

    def assign(self, text: str, operator: str, random: bool = False) -> str:
        name = f"t{self.count}"
        self.count += 1
        self.line(f"{name} = {text}", operator, random)
        return name

    def tidy(self) -> None:
        """Deletes large tensors, and random ones if there are too many."""
        names = [name for name, _ in living(self.run.cpu)]
        large = [name for name in names if any(t.numel() > LARGEST for t in self._tensors(name))]
        extra = self.random.sample(names, max(0, len(names) - LIVING))
        for name in dict.fromkeys([*large, *extra]):
            self.line(f"del {name}", "del")

    # --- chances -----------------------------------------------------------------------------------------------------
    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def one(self, options: Sequence[Any]) -> Any:
        return options[self.random.randrange(len(options))]

    def dtype(self, among: Sequence[torch.dtype] | None = None) -> torch.dtype:
        options = list(among or DTYPES)
        near = [option for option in options if option in self.palette]
        options = near if near and not self.chance(0.06) else options
        return self.random.choices(options, [DTYPES[option] for option in options])[0]

    def shape(self) -> tuple[int, ...]:
        if self.chance(0.04):
            return (self.one([33, 65, 130]), self.one([1, 3, 16]))
        return tuple(self.one(SIZES) for _ in range(self.one([0, 1, 1, 2, 2, 2, 3, 3, 4])))

    # --- tensors -----------------------------------------------------------------------------------------------------
    def _tensors(self, name: str) -> list[torch.Tensor]:
        value = self.run.cpu.get(name)
        items = value if isinstance(value, (list, tuple)) else [value]
        return [item for item in items if isinstance(item, torch.Tensor)]

    def tensors(self, where: Callable[[torch.Tensor], bool] = lambda tensor: True) -> list[tuple[str, torch.Tensor]]:
        """Returns (expression, tensor) of the live tensors on the first device."""
        found = []
        for name, value in living(self.run.cpu):
            other = self.run.bp.get(name)
            pairs = (
                [(f"{name}[{i}]", a, b) for i, (a, b) in enumerate(zip(value, other, strict=False))]
                if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple))
                else [(name, value, other)]
            )
            for spelt, tensor, theirs in pairs:
                if not isinstance(tensor, torch.Tensor) or not isinstance(theirs, torch.Tensor):
                    continue
                if str(theirs.device) == self.run.bp["d"] and tensor.numel() <= LARGEST and where(tensor):
                    found.append((spelt, tensor))
        return found

    def tensor(self, where: Callable[[torch.Tensor], bool] = lambda tensor: True, fresh: float = 0.1) -> str:
        """Returns the expression of a live tensor, or of a new one."""
        found = self.tensors(where)
        if found and not self.chance(fresh):
            return self.one(found)[0]
        for _ in range(8):
            name = self.new(self.shape(), self.dtype())
            if self.get(name) is not None and where(self.get(name)):
                return name
        return name

    def get(self, spelt: str) -> torch.Tensor:
        try:
            return eval(spelt, self.run.cpu)
        except Exception:
            return torch.zeros(())

    def data_line(self, shape: Shape, dtype: torch.dtype, kind: str | None = None) -> str:
        self.data += 1
        kind = kind or self.random.choices(["whole", "normal", "unit", "special"], [5, 5, 1, 0.6])[0]
        shown = "" if kind == "normal" else f", {kind!r}"
        return self.assign(f"make({tuple(shape)}, {dtype}, {self.data}{shown}).to(d)", "make")

    def new(self, shape: Shape, dtype: torch.dtype, kind: str | None = None) -> str:
        """Creates a tensor with a random layout."""
        shape = tuple(shape)
        layout = self.one(["plain"] * 4 + ["gap", "turned", "offset", "expanded", "permuted"])
        if layout == "gap" and shape:
            base = self.data_line((*shape[:-1], 2 * shape[-1]), dtype, kind)
            return self.assign(f"{base}[..., {self.one(['::2', '1::2'])}]", "slice")
        if layout == "turned" and len(shape) > 1:
            base = self.data_line((*shape[:-2], shape[-1], shape[-2]), dtype, kind)
            return self.assign(f"{base}.mT", "mT")
        if layout == "permuted" and len(shape) > 2:
            order = list(range(len(shape)))
            self.random.shuffle(order)
            base = self.data_line([shape[dim] for dim in order], dtype, kind)
            back = [order.index(dim) for dim in range(len(shape))]
            return self.assign(f"{base}.permute({tuple(back)})", "permute")
        if layout == "offset" and shape:
            count = 1
            for size in shape:
                count *= size
            base = self.data_line((count + 1,), dtype, kind)
            return self.assign(f"{base}[1:].view({shape})", "slice")
        if layout == "expanded" and shape:
            dim = self.random.randrange(len(shape))
            base = self.data_line([1 if at == dim else size for at, size in enumerate(shape)], dtype, kind)
            return self.assign(f"{base}.expand({shape})", "expand")
        return self.data_line(shape, dtype, kind)

    def like(self, spelt: str, same_dtype: float = 0.6, kind: str | None = None) -> str:
        """Returns a tensor that usually broadcasts with this one."""
        tensor = self.get(spelt)
        if kind is None and not self.chance(0.3):
            found = self.tensors(lambda other: other.shape == tensor.shape)
            if found:
                return self.one(found)[0]
        dtype = tensor.dtype if self.chance(same_dtype) and tensor.dtype in DTYPES else self.dtype()
        return self.new(self.broadcastable(tensor.shape), dtype, kind)

    def broadcastable(self, shape: Shape) -> tuple[int, ...]:
        if self.chance(0.6):
            return tuple(shape)
        if self.chance(self.bad):
            return self.shape()
        kept = [1 if self.chance(0.25) else size for size in shape]
        return tuple(kept[self.one([0, 0, 1, 2]) :])

    # --- numbers -----------------------------------------------------------------------------------------------------
    def number(self, dtype: torch.dtype = torch.float32) -> str:
        if self.chance(0.03):
            return self.one(["nan", "inf", "-inf", "300", "-1", "1e30", "-0.5", "True", "1 + 2j", "2**40"])
        if dtype.is_floating_point and self.chance(0.6):
            return repr(self.one([0.5, -1.25, 2.0, 1e-3, 3.7, round(self.random.uniform(-4, 4), 3)]))
        if self.chance(0.15):
            return repr(self.one([0.5, -1.5, 2.0, 0.0]))
        return repr(self.one([0, 1, 2, 3, -1, -2, 5, 7]))

    def whole(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def dim(self, spelt: str) -> str:
        rank = max(1, self.get(spelt).dim())
        if self.chance(self.bad):
            return str(self.one([rank, -rank - 1, 7]))
        return str(self.whole(-rank, rank - 1))

    def dims(self, spelt: str) -> str:
        rank = max(1, self.get(spelt).dim())
        if self.chance(0.3):
            return self.dim(spelt)
        chosen = self.random.sample(range(rank), self.whole(0 if self.chance(0.1) else 1, rank))
        return str([dim - rank if self.chance(0.3) else dim for dim in chosen])

    def size_of(self, spelt: str, dim: str) -> int:
        tensor = self.get(spelt)
        try:
            return tensor.shape[int(dim)]
        except IndexError:
            return 1

    def index(self, count: int, size: int, distinct: bool = False, shape: Shape | None = None) -> str:
        """Creates an index tensor with `count` indices below `size`."""
        wrong = self.chance(self.bad)
        if distinct:
            places = self.random.sample(range(size), min(count, size))
        else:
            places = [self.random.randrange(size) for _ in range(count)] if size else [0] * count
        if wrong and places:
            places[self.random.randrange(len(places))] = self.one([size, -size - 1, 10**6])
        dtype = "torch.int64" if not self.chance(0.1) else "torch.int32"
        if self.chance(self.bad):
            dtype = self.one(["torch.int16", "torch.int8", "torch.uint8", "torch.float32", "torch.bool"])
        shaped = f".view({tuple(shape)})" if shape is not None else ""
        name = self.assign(f"torch.tensor({places}, dtype={dtype}, device=d){shaped}", "tensor")
        if self.chance(0.3) and self.get(name).dim():
            base = self.assign(f"torch.stack([{name}, {name}], -1)", "stack")
            return self.assign(f"{base}[..., 1]", "slice")
        return name

    def mask(self, shape: Shape) -> str:
        found = self.tensors(lambda other: other.dtype == torch.bool and other.shape == shape)
        if found and self.chance(0.7):
            return self.one(found)[0]
        return self.new(shape, torch.bool)

    def out(self, result: Any, dtypes: Sequence[torch.dtype] | None = None) -> str:
        """Returns an `out=` tensor for a result: with its shape and dtype, or with others."""
        shape, dtype = (
            (tuple(result.shape), result.dtype) if isinstance(result, torch.Tensor) else ((2,), torch.float32)
        )
        if self.chance(0.35):
            found = self.tensors(
                lambda other: other.shape == result.shape if isinstance(result, torch.Tensor) else True
            )
            if found:
                return self.one(found)[0]
        if self.chance(0.15):
            found = self.tensors()
            if found:
                return self.one(found)[0]
        if self.chance(0.3) or dtype not in DTYPES:
            dtype = self.dtype()
        if self.chance(0.15):
            shape = self.one([(0,), (), self.shape(), (max(1, sum(shape)),)])
        return self.new(shape, dtype)
