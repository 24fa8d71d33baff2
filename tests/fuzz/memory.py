"""Moves that create views or write to memory: fills, copies, conversions, overlapping memory."""

from __future__ import annotations

import torch

from fuzz.calls import attempt, convertible
from fuzz.moves import move
from fuzz.random_arguments import RandomArguments


def view(draw: RandomArguments) -> None:
    """Creates a view of a live tensor."""
    name = draw.tensor()
    tensor = draw.get(name)
    rank = tensor.dim()
    dim = draw.dim(name)
    size = draw.size_of(name, dim)
    start = draw.whole(0, size)
    options: list[tuple[str, str]] = [
        (f"{name}.unsqueeze({dim})", "unsqueeze"), (f"{name}.squeeze({dim})", "squeeze"),
        (f"{name}.flatten()", "flatten"), (f"{name}.detach()", "detach"),
        (f"torch._lazy_clone({name})", "_lazy_clone"), (f"{name}.reshape(-1)", "reshape"),
        (f"{name}.view(-1)", "view"), (f"{name}.squeeze()", "squeeze"),
        (f"{name}.contiguous()", "contiguous"), (f"{name}.ravel()", "ravel"),
    ]  # fmt: skip
    if rank:
        options += [
            (f"{name}.narrow({dim}, {start}, {draw.whole(0, max(0, size - start))})", "narrow"),
            (f"{name}[{draw.whole(-size, max(0, size - 1))}]", "select"),
            (f"{name}[{start}:]", "slice"),
            (f"{name}[..., ::{draw.one([1, 2, 3])}]", "slice"),
            (f"{name}.movedim({dim}, {draw.dim(name)})", "movedim"),
            (f"{name}.transpose({dim}, {draw.dim(name)})", "transpose"),
            (f"{name}[None]", "slice"),
            (f"{name}.unfold({dim}, {draw.one([1, 2, 3])}, {draw.one([1, 2])})", "unfold"),
            (f"{name}.expand(2, *{name}.shape)", "expand"),
            (f"{name}.split({draw.one([1, 2, 3])}, {dim})", "split"),
            (f"{name}.chunk({draw.one([1, 2, 3])}, {dim})", "chunk"),
        ]
        if size < 5:
            options.append((f"{name}.unbind({dim})", "unbind"))
    if rank > 1:
        options += [
            (f"{name}.diagonal({draw.one([0, 1, -1])})", "diagonal"),
            (f"{name}.mT", "mT"),
            (f"{name}.flatten(0, 1)", "flatten"),
        ]
    if rank == 4:
        options += [(f"{name}.contiguous(memory_format=torch.channels_last)", "contiguous")] * 2
    if tensor.dtype.is_complex:
        options += [(f"{name}.{word}", word) for word in ("real", "imag", "conj()", "resolve_conj()")] * 2
    if tensor.dtype in (torch.float32, torch.int32, torch.int16, torch.uint8, torch.int64):
        other = draw.one([torch.int32, torch.uint8, torch.int16])
        options.append((f"{name}.view({other})", "view_dtype"))
    draw.assign(*draw.one(options))


@move
def fill(draw: RandomArguments) -> None:
    name = draw.tensor()
    tensor = draw.get(name)
    if draw.chance(0.2):
        draw.line(f"{name}.zero_()", "zero_")
    elif draw.chance(0.3):
        draw.line(
            f"{name}.fill_({draw.like(name)}[()])"
            if draw.chance(0.1)
            else f"{name}.fill_({draw.number(tensor.dtype)})",
            "fill_",
        )
    elif tensor.dim() >= 2 and draw.chance(0.3):
        draw.line(f"{name}.fill_diagonal_({draw.number(tensor.dtype)})", "fill_diagonal_")
    else:
        draw.line(f"{name}.masked_fill_({draw.mask(tensor.shape)}, {draw.number(tensor.dtype)})", "masked_fill_")


@move
def shape_of_itself(draw: RandomArguments) -> None:
    """Changes a tensor's sizes, strides or storage in place."""
    name = draw.tensor()
    tensor = draw.get(name)
    dim = draw.dim(name)
    other = draw.tensor(lambda one: one.dtype == tensor.dtype)
    rows, step = draw.one([1, 2, 3]), draw.one([0, 1, 2])
    form = draw.one([
            "{0}.transpose_({1}, -1)", "{0}.squeeze_()", "{0}.squeeze_({1})", "{0}.unsqueeze_({1})",
            "{0}.swapaxes_(0, {1})", "{0}.resize_({3}).zero_()", "{0}.resize_as_({2}).zero_()", "{0}.set_({2})",
            "{0}.data = {2}.detach()", "{0}.as_strided_(({4},), ({5},))", "{0}.detach_()",
            "{0}.requires_grad_({6})", "{0}.set_()",
        ])  # fmt: skip
    if "as_strided" in form and (rows - 1) * step >= tensor.numel():
        return
    shape = draw.one([tuple(tensor.shape), draw.shape(), (tensor.numel(),), (0,), ()])
    text = form.format(name, dim, other, shape, rows, step, draw.one([True, False]))
    draw.line(text, "in place: " + form.format("x", 0, "y", "s", 1, 1, True).split("(")[0])


@move
def in_part(draw: RandomArguments) -> None:
    """Calls select_scatter, slice_scatter, diagonal_scatter and as_strided_scatter."""
    name = draw.tensor(lambda tensor: tensor.dim() > 0)
    tensor = draw.get(name)
    dim = draw.dim(name)
    size = draw.size_of(name, dim)
    place = draw.whole(-size, max(0, size - 1))
    views = {
        "select": (f"{name}.select({dim}, {place})", f"{dim}, {place}"),
        "slice": (f"{name}.narrow({dim}, 0, {size // 2})", f"{dim}, 0, {size // 2}"),
        "diagonal": (f"{name}.diagonal(0, {dim}, 0)", f"0, {dim}, 0"),
        "as_strided": (f"{name}.reshape(-1)[:1]", "(1,), (1,)"),
    }
    kind = draw.one(list(views))
    view, where = views[kind]
    found = attempt(draw, view)
    shape = tuple(found.shape) if isinstance(found, torch.Tensor) and not draw.chance(draw.bad) else draw.shape()
    source = draw.new(shape, tensor.dtype if draw.chance(0.8) else draw.dtype())
    if convertible(draw, source, tensor.dtype):
        draw.assign(f"torch.{kind}_scatter({name}, {source}, {where})", f"{kind}_scatter")


@move
def copy(draw: RandomArguments) -> None:
    name = draw.tensor()
    source = draw.like(name, same_dtype=0.5)
    if convertible(draw, source, draw.get(name).dtype):
        draw.line(f"{name}.copy_({source})", "copy_")


@move
def overlapping(draw: RandomArguments) -> None:
    """Reads and writes overlapping memory. PyTorch does not check for this in sums and for tensors that are not dense;
    the results are then undefined, so only errors are compared.
    """
    name = draw.tensor(lambda tensor: tensor.dim() > 0 and tensor.shape[0] > 1)
    form = draw.one([
            "{0}[1:].copy_({0}[:-1])", "{0}[:-1].add_({0}[1:])", "torch.mul({0}[1:], 2, out={0}[:-1])",
            "torch.cumsum({0}[:-1], 0, out={0}[1:])", "torch.exp({0}[:-1], out={0}[1:])", "{0}.copy_({0}.flip(0))",
            "{0}.mul_({0}[0])", "{0}[1:].sub_({0}[0])", "torch.add({0}[1:], {0}[:-1], out={0}[1:])", "{0}.t_()",
            "torch.sum({0}, 0, out={0}[0])", "torch.flip({0}, [0], out={0})",
            "torch.sort({0}[1:], 0, stable=True, out=({0}[:-1], t0))", "torch.cat([{0}[1:], {0}[:1]], out={0})",
            "{0}[0].add_({0}.sum(0).to({0}.dtype))",
        ])  # fmt: skip
    if "t0" in form and "t0" not in draw.run.cpu:
        return
    checked = draw.get(name).is_contiguous() and "torch.sum" not in form
    draw.line(form.format(name), "overlap " + form.format("x").split("(")[0], random=not checked)


@move
def expanded_target(draw: RandomArguments) -> None:
    """Writes to a tensor with overlapping elements, which is an error unless all elements get the same value."""
    name = draw.tensor(lambda tensor: tensor.dim() > 0)
    wide = draw.assign(f"{name}.unsqueeze(0).expand(3, *{name}.shape)", "expand")
    number = draw.number(draw.get(name).dtype)
    form = draw.one([
            "{0}.fill_({1})", "{0}.zero_()", "{0}.add_(1)", "{0}.copy_({2})", "torch.neg({2}, out={0})",
            "{0}.masked_fill_({0} > 0, {1})", "{0}.clamp_(0, 1)", "{0}[0].add_(1)",
            "torch.cumsum({0}, 0, out={0})", "{0}.index_fill_(0, torch.tensor([0], device=d), {1})",
        ])  # fmt: skip
    if form == "{0}.copy_({2})" and not convertible(draw, name, draw.get(name).dtype):
        return
    draw.line(form.format(wide, number, name), "expanded " + form.format("x", 1, "y").split("(")[0])


@move
def convert(draw: RandomArguments) -> None:
    name = draw.tensor()
    dtype = draw.dtype()
    if convertible(draw, name, dtype):
        form = draw.one(
            [
                "{}.to({})",
                "{}.type({})",
                "{}.to({}, copy=True)",
                "{}.to(dtype={}, memory_format=torch.preserve_format)",
            ]
        )
        draw.assign(form.format(name, dtype), "to")


@move
def between_devices(draw: RandomArguments) -> None:
    name = draw.tensor()
    there = draw.one(
        [
            "{0}.to(e, copy=True)",
            "{0}.to('cpu', copy=True)",
            "torch.empty_like({0}, device=e).copy_({0})",
            "{0}.new_zeros({0}.shape, device=e).copy_({0})",
        ]
    )
    form = (
        there
        + draw.one(["", ".add(1)", "[..., :2]", ".mT", "[..., ::2]"])
        + draw.one([".to(d, copy=True)", ".to(d, copy=True, non_blocking=True)"])
    )
    if draw.chance(0.2):
        shape = tuple(draw.get(name).shape)
        draw.line(f"{name}.copy_(torch.ones({shape}, device=e)[...])", "copy_ between devices")
        return
    if draw.chance(0.2):
        draw.line(f"{name}.copy_(torch.arange(({name}.shape or [1])[-1]).remainder(100))", "copy_ from the CPU")
        return
    draw.assign(form.format(name), "to device")
