"""Calls of the operators in the table, in all forms, and repeated with other numbers, shapes and layouts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial

import torch

from fuzz.lockstep import copied
from fuzz.operators import Row
from fuzz.programs import NAME
from fuzz.random_arguments import DTYPES, FLOATING, RandomArguments

LARGEST_COUNT = 10**5


@dataclass
class Made:
    """A completed call; its arguments are expressions."""

    row: Row
    form: str
    arguments: list[str]
    keywords: list[str]


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape


def suits(row: Row, tensor: torch.Tensor) -> bool:
    only = row.only
    if tensor.dtype not in DTYPES:
        return False
    if "f" in only and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return False
    if "n" in only and tensor.dtype == torch.bool:
        return False
    if "w" in only and (
        tensor.dtype.is_floating_point
        or tensor.dtype.is_complex
        or (tensor.dtype.is_signed and tensor.numel() and int(tensor.min()) < 0)
        or counts_too_far(row, tensor)
    ):
        return False
    if "v" in only and tensor.dim() != 1:
        return False
    if "2" in only and tensor.dim() != 2:
        return False
    return not ("m" in only and tensor.dim() < 2)


def counts_too_far(row: Row, tensor: torch.Tensor) -> bool:
    """Whether the result would be too large: it has an element for each number up to the largest one."""
    return "w" in row.only and any(one > LARGEST_COUNT for one in tensor.flatten().tolist() if isinstance(one, int))


def first_tensor(draw: RandomArguments, row: Row, kind: str | None = None) -> str:
    if draw.chance(draw.bad):
        return draw.tensor(lambda tensor: not counts_too_far(row, tensor))
    if row.only:
        found = draw.tensors(lambda tensor: suits(row, tensor))
        if found and draw.chance(0.9):
            return draw.one(found)[0]
        dtype = draw.dtype(FLOATING if "f" in row.only else None)
        if "n" in row.only and dtype == torch.bool:
            dtype = torch.int64
        if "w" in row.only:
            dtype = torch.uint8
        size = lambda: draw.one([0, 1, 2, 3, 4, 6])  # noqa: E731
        shape = draw.shape()
        if "v" in row.only:
            shape = (size(),)
        elif "2" in row.only:
            shape = (size(), size())
        elif "m" in row.only and len(shape) < 2:
            shape = (*shape, size(), size())
        return draw.new(shape, dtype)
    return draw.tensor(lambda tensor: tensor.dtype in DTYPES)


def value(draw: RandomArguments, letter: str, first: str, row: Row) -> str:
    """Draws an argument for this letter (operators.py). `first` is the first tensor."""
    tensor = draw.get(first) if first else torch.zeros(())
    match letter:
        case "T":
            return draw.tensor()
        case "L":
            return draw.like(first)
        case "N":
            if draw.chance(0.06):
                return draw.assign(f"torch.tensor({draw.number(tensor.dtype)})", "tensor")  # a CPU tensor
            return draw.like(first) if draw.chance(0.6) else draw.number(tensor.dtype)
        case "n":
            return draw.number(tensor.dtype)
        case "s":
            return draw.number(tensor.dtype if first else torch.float32)
        case "M":
            return draw.mask(tensor.shape)
        case "d":
            return draw.dim(first)
        case "D":
            return draw.dims(first)
        case "b":
            return draw.one(["True", "False"])
        case "i":
            return str(draw.one([0, 1, 2, 3, 4, -1] if row.name not in _COUNTS else [0, 1, 2, 3, 5, 9]))
        case "I":
            return str([draw.one([0, 1, 1, 2, 3]) for _ in range(draw.one([0, 1, 2, 3]))])
        case "t":
            return str(draw.dtype())
        case "r":
            return draw.one(["None", "'floor'", "'trunc'"])
        case "R":
            return draw.one(["'mean'", "'sum'", "'none'"])
        case "v":
            found = draw.tensors(lambda other: other.dim() == 1 and other.numel() < 8)
            return draw.one(found)[0] if found else draw.new((draw.one([0, 1, 3, 4]),), torch.float32)
        case "m":
            inner = tensor.shape[-1] if tensor.dim() else 1
            dtype = tensor.dtype if draw.chance(0.95) else draw.dtype()
            rows, columns = (
                (inner, draw.one([0, 1, 2, 5])) if row.name in ("mm", "matmul") else (draw.one([1, 3]), inner)
            )
            return draw.new((rows, columns), dtype)
        case "A":
            count = draw.one([1, 2, 2, 3])
            picked = [draw.tensor() if not tensor.dim() else draw.like(first) for _ in range(count - 1)]
            return "[" + ", ".join([first or draw.tensor(), *picked]) + "]"
    return letter  # a literal


_COUNTS = {"arange", "linspace", "logspace", "eye", "histc", "histogram"}


def complete(draw: RandomArguments, row: Row, keep: Made | None = None) -> Made:
    """Draws a call of this row. With `keep`, keeps most arguments of an earlier call."""

    def again() -> bool:
        return keep is None or draw.chance(0.35)

    lists = [at for at, letter in enumerate(row.arguments) if letter == "A"]
    first = ""
    arguments: list[str] = []
    keywords: list[str] = []
    if lists:
        pool = draw.tensors(lambda tensor: tensor.dtype in DTYPES and tensor.dim() > 0)
        first = draw.one(pool)[0] if pool and draw.chance(0.7) else draw.new(draw.shape() or (2,), draw.dtype())
    for at, letter in enumerate(row.arguments):
        if "=" in letter:
            name, _, drawn = letter.partition("=")
            known = next((text for text in keep.keywords if text.startswith(name + "=")), None) if keep else None
            if known and not again():
                keywords.append(known)
            elif drawn not in _LETTERS or draw.chance(0.5) or (row.name == "sort"):
                keywords.append(f"{name}={value(draw, drawn, first, row) if drawn in _LETTERS else drawn}")
            continue
        if at == 0 and letter == "T":
            if keep is not None:
                old = draw.get(keep.arguments[0])
                same = draw.tensors(partial(alike, old))
                if draw.chance(0.4):
                    first = keep.arguments[0]
                elif draw.chance(0.4):
                    first = draw.new(old.shape, old.dtype if old.dtype in DTYPES else torch.float32)
                elif same and draw.chance(0.6):
                    first = draw.one(same)[0]
            first = first or first_tensor(draw, row)
            arguments.append(first)
        elif keep is not None and not again() and at < len(keep.arguments):
            arguments.append(keep.arguments[at])
        else:
            arguments.append(value(draw, letter, first, row) if letter in _LETTERS else letter)
    if keep is not None and draw.chance(0.85):
        form = keep.form
    else:
        form = draw.one(["functional"] * 5 + ["in-place"] * 3 * row.in_place + ["out="] * 2 * row.out)
    return Made(row, form, arguments, keywords)


_LETTERS = set("TLNMsdDbinItrRvmA")


def call(draw: RandomArguments, made: Made) -> None:
    """Runs the call."""
    row = made.row
    if row.name in _FACTORIES:
        made.keywords = [text for text in made.keywords if not text.startswith("device")]
        made.keywords.append("device=d")
    text = f"torch.{row.name}({', '.join([*made.arguments, *made.keywords])})"
    operator = row.name
    if not sane(draw, made, text):
        return
    if made.form == "in-place":
        rest = ", ".join([*made.arguments[1:], *[word for word in made.keywords if not word.startswith("dtype")]])
        draw.line(f"{made.arguments[0]}.{row.name}_({rest})", operator + "_")
    elif made.form == "out=":
        result = attempt(draw, text)
        if isinstance(result, (tuple, list)):
            outs = "(" + ", ".join(draw.out(item) for item in result) + ",)"
        elif isinstance(result, torch.Tensor) or result is None:
            outs = draw.out(result)
        else:
            return
        words = [word for word in made.keywords if not word.startswith("device")]
        if row.name in ("sum", "prod", "mean", "nansum", "nanmean", "std", "var") and not any(
            "dim" in w for w in words
        ):
            words.insert(0, "dim=[]" if row.name != "prod" else "dim=0")
        line = f"torch.{row.name}({', '.join([*made.arguments, *words, 'out=' + outs])})"
        draw.line(line, operator + " out=")
    else:
        draw.assign(text, operator)


_FACTORIES = {"arange", "linspace", "logspace", "eye", "full"}


def attempt(draw: RandomArguments, text: str) -> object:
    """Evaluates an expression on the CPU without changing the program; None if it raises an error."""
    names = dict(draw.run.cpu)
    names |= {name: copied(names[name]) for name in set(NAME.findall(text)) & set(names)}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return eval(text, names)
    except Exception:
        return None


def sane(draw: RandomArguments, made: Made, text: str) -> bool:
    """Whether the call is defined on the CPU: numbers that are converted to integers must be in their range."""
    if (
        any(f"torch.{name}" in text for name in ("uint8", "int8", "int16", "int32", "int64"))
        or made.row.name in _FACTORIES
    ):
        for name in made.arguments[:1]:
            tensor = draw.get(name) if name.startswith("t") else None
            if isinstance(tensor, torch.Tensor) and not whole_in(tensor, torch.int8):
                return False
        return not any(word in text for word in _NO_BYTES)
    if "polynomial" in made.row.name:  # degrees
        degree = made.arguments[1]
        return is_small(draw.get(degree)) if degree.startswith("t") else degree not in _NO_BYTES
    return True


_NO_BYTES = ("nan", "inf", "1e30", "2**40", "300", "-1")


def is_small(tensor: torch.Tensor) -> bool:
    """Whether all absolute values are below 128, so that a kernel that counts up to them is fast."""
    return bool((tensor.detach().double().abs() < 128).all())


def whole_in(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all values are in the range of an integer dtype."""
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return True
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.dtype.is_complex else tensor
    info = torch.iinfo(dtype)
    numbers = numbers.detach().double()
    low = 0 if dtype == torch.uint8 else max(info.min, -(2**31))
    return bool(
        torch.isfinite(numbers).all() and (numbers >= low).all() and (numbers <= min(info.max, 2**31 - 1)).all()
    )


def convertible(draw: RandomArguments, source: str, dtype: torch.dtype) -> bool:
    """Whether the conversion of `source` to `dtype` is defined on the CPU."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return True
    return whole_in(draw.get(source), dtype)
