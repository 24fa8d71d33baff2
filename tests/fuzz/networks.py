"""Moves as in the training of networks: gradients, layers, lists of tensors, random numbers, and reads of values."""

from __future__ import annotations

from typing import Any

import torch

from fuzz.moves import move
from fuzz.random_arguments import FLOATING, RandomArguments


@move
def gradient(draw: RandomArguments) -> None:
    """Applies operators to a leaf and computes its gradient with a cotangent of random layout."""
    source = draw.tensor(lambda tensor: tensor.dtype in FLOATING, fresh=0.3)
    leaf = draw.assign(f"{source}.detach().requires_grad_()", "leaf")
    value = leaf
    for _ in range(draw.one([1, 1, 2, 3])):
        tensor = draw.get(value)
        if not (isinstance(tensor, torch.Tensor) and tensor.is_floating_point()):
            break
        like = draw.like(value, same_dtype=1.0)
        dim = draw.dim(value)
        index = draw.index(3, draw.size_of(value, dim))
        form, operator = draw.one(DIFFERENTIABLE)
        value = draw.assign(form.format(value, like, dim, index), operator)
        if value not in draw.run.cpu:
            return
    out = draw.get(value)
    if not isinstance(out, torch.Tensor) or not out.requires_grad:
        return
    cotangent = draw.new(out.shape, out.dtype)
    draw.assign(f"torch.autograd.grad({value}, [{leaf}], {cotangent}, allow_unused=True)", f"{operator} backward")


# {0}: the value, {1}: a tensor that broadcasts with it, {2}: a dimension, {3}: an index
_FORMS = """
{0} * {1} | {0} + {1} | {0} / {1}.exp() | {1} - {0} | torch.exp({0}) | torch.tanh({0}) | torch.sigmoid({0})
F.relu({0}) | F.gelu({0}) | F.silu({0}) | {0}.sum({2}) | {0}.mean({2}) | {0}.amax({2}) | {0}.var()
torch.softmax({0}, {2}) | F.log_softmax({0}, {2}) | {0}.cumsum({2}) | {0}.flip(-1)
{0}.index_select({2}, {3}) | {0}[..., 1:] | {0}.mT | {0}.reshape(-1) | torch.cat([{0}, {0}], {2})
torch.where({1} > 0, {0}, {1}) | {0}.clamp(-1, 1) | {0}.abs() | {0}.pow(2) | {0} ** 3
torch.logsumexp({0}, {2}) | {0}.norm() | {0} @ {0}.mT | F.layer_norm({0}, {0}.shape[-1:])
F.leaky_relu({0}, 0.2) | F.softplus({0}) | F.pad({0}, (1, 1)) | {0}.expand(2, *{0}.shape)
F.embedding({3}, {0}) | {0}[{3}] | {0}.masked_fill({1} > 0, 0) | torch.maximum({0}, {1})
F.mse_loss({0}, {1}) | {0}.sort({2}, stable=True).values | {0}.std({2}) | {0}.prod()
torch.addcmul({1}, {0}, {1}) | torch.lerp({0}, {1}, 0.3) | F.normalize({0}, dim={2})
torch.cdist({0}, {0}, 2, 'donot_use_mm_for_euclid_dist')
{0}.cumprod({2}) | F.glu({0}, {2}) | {0}.scatter_add({2}, {3}, {1}) | torch.atan2({0}, {1})
F.huber_loss({0}, {1}) | F.smooth_l1_loss({0}, {1}, reduction='none') | F.elu({0})
torch.renorm({0}, 2, {2}, 1.5) | {0}.to(torch.float32) | {0}.unfold({2}, 2, 1) | {0}.squeeze()
{0}.diagonal() | {0}.tril() | {0}.repeat_interleave(2, {2})
"""
DIFFERENTIABLE = [
    (form.strip(), form.strip().format("x", "y", 0, "i").split("(")[0].replace("torch.", "").replace("x.", ""))
    for line in _FORMS.strip().splitlines()
    for form in line.split("|")
]


@move
def read(draw: RandomArguments) -> None:
    """Reads values or properties on the host."""
    name = draw.tensor()
    form = draw.one([
            "{0}.tolist()", "{0}.sum().item()", "bool(({0} == {0}).all())",
            "{0}.numel() and {0}.flatten()[0].item()", "torch.equal({0}, {0}.clone())",
            "{0}.clone().cpu().numpy().shape",
            "{0}.is_contiguous()", "{0}.stride()", "len({0})", "{0}.nonzero().shape",
        ])  # fmt: skip
    draw.assign(form.format(name), form.format("x"))


@move
def foreach(draw: RandomArguments) -> None:
    """Calls in-place operators on lists of tensors, as optimizers do."""
    first = draw.tensor(lambda tensor: tensor.dtype in FLOATING)
    tensors = [first, *(draw.tensor(lambda tensor: tensor.dtype in FLOATING) for _ in range(draw.one([0, 1, 2])))]
    if len(set(tensors)) < len(tensors) and draw.chance(0.9):
        tensors = list(dict.fromkeys(tensors))
    others = [draw.like(name, same_dtype=0.9) for name in tensors]
    mine, theirs = f"[{', '.join(tensors)}]", f"[{', '.join(others)}]"
    number = draw.number()
    form = draw.one([
            "add_({0}, {2})", "add_({0}, {1}, alpha={2})", "mul_({0}, {1})", "mul_({0}, {2})", "sub_({0}, {1})",
            "div_({0}, {2})", "zero_({0})", "copy_({0}, {1})", "addcmul_({0}, {1}, {1}, {2})",
            "addcdiv_({0}, {1}, {1}, {2})", "lerp_({0}, {1}, {2})", "clamp_max_({0}, {2})", "sqrt_({0})",
            "neg_({0})", "abs_({0})", "maximum_({0}, {1})", "pow_({0}, {2})", "mul_({0}, [{2}] * {3})",
            "add_({0}, torch.tensor(2.0))", "mul_({0}, torch.tensor(2.0, device=d))",
        ])  # fmt: skip
    text = "torch._foreach_" + form.format(mine, theirs, number, len(tensors))
    draw.line(text, text.split("(")[0].replace("torch.", ""))


@move
def factory_out(draw: RandomArguments) -> None:
    out = draw.tensor()
    count = draw.get(out).numel()
    form = draw.one([
            "arange({1}, out={0})", "linspace(0, 1, {1}, out={0})", "full({2}, 3, out={0})", "zeros({2}, out={0})",
            "eye({1}, out={0})", "arange(0, {1}, 1, out={0})", "ones({1}, out={0})",
            "logspace(0, 1, {1}, out={0})", "tril_indices(2, 2, out={0})",
        ])  # fmt: skip
    if "tril_indices" in form:
        return
    shape = tuple(draw.get(out).shape) if draw.chance(0.6) else draw.shape()
    count = count if draw.chance(0.6) else draw.one([0, 1, 3, 5])
    if count > 120 and not draw.get(out).dtype.is_floating_point:
        return
    draw.line("torch." + form.format(out, count, shape), form.split("(")[0] + " out=")


@move
def random_numbers(draw: RandomArguments) -> None:
    """Calls random operators. Only the properties of the results and the errors are compared."""
    name = draw.tensor(lambda tensor: tensor.dtype in FLOATING)
    form = draw.one([
            "torch.rand_like({0})", "torch.randn_like({0})", "F.dropout({0}, {1})", "torch.bernoulli({0})",
            "torch.randint_like({0}, 5)", "torch.randperm(5, device=d)", "torch.multinomial({0}, 1)",
            "torch.normal({0}, 1.0)", "torch.poisson({0})",
        ])  # fmt: skip
    draw.assign(
        form.format(name, draw.one([0.0, 0.5, 1.0, -0.5, 1.5])), form.split("(")[0].replace("torch.", ""), random=True
    )


@move
def random_in_place(draw: RandomArguments) -> None:
    name = draw.tensor()
    form = draw.one([
            "uniform_()", "uniform_(2, 1)", "normal_()", "normal_(0, -1)", "bernoulli_(0.5)", "bernoulli_(1.5)",
            "exponential_()", "exponential_(-1)", "random_(5)", "random_(5, 2)", "geometric_(0.5)",
            "geometric_(0)", "cauchy_()", "log_normal_()",
        ])  # fmt: skip
    draw.line(f"{name}.{form}", form.split("(")[0], random=True)


@move
def modules(draw: RandomArguments) -> None:
    """Calls the functions of network layers with matching sizes."""
    batch, channels, size = draw.one([0, 1, 2, 3]), draw.one([2, 4]), draw.one([3, 4, 5, 8])
    dtype = draw.dtype(FLOATING)
    x = draw.new((batch, channels, size), dtype)
    image = draw.new((batch, channels, size, size), dtype)
    if draw.chance(0.3):
        image = draw.assign(f"{image}.contiguous(memory_format=torch.channels_last)", "contiguous")
    weight = draw.new((channels,), dtype)
    kernel = draw.new((3, channels, 3, 3), dtype)
    form = draw.one([
            "F.layer_norm({x}.mT, [{c}], {w}, {w})", "F.group_norm({x}, 2, {w}, {w})",
            "F.batch_norm({x}, None, None, {w}, {w}, True)", "F.conv2d({i}, {k})",
            "F.conv2d({i}, {k}, padding=1, stride=2)", "F.max_pool2d({i}, 2)",
            "F.avg_pool2d({i}, 2, ceil_mode=True)", "F.adaptive_avg_pool2d({i}, 2)",
            "F.interpolate({i}, scale_factor=2)", "F.interpolate({i}, size=(3, 2), mode='bilinear')",
            "F.pad({i}, (1, 1, 0, 2), mode='reflect')", "F.pad({x}, (1, -1), value=2.5)",
            "F.linear({x}.mT, {k}[:, :, 0, 0])", "F.rms_norm({x}, [{s}])",
            "F.scaled_dot_product_attention({x}, {x}, {x})", "F.conv1d({x}, {k}[..., 0])", "F.instance_norm({x})",
            "F.unfold({i}, 2)", "F.local_response_norm({x}, 2)", "F.pixel_shuffle({i}, 2)",
            "F.max_pool2d({i}, 3, 1, 1, return_indices=True)", "F.lp_pool1d({x}, 2, 2)",
            "F.conv_transpose2d({i}, {k}.transpose(0, 1))", "F.prelu({x}, {w})",
            "F.cross_entropy({x}, torch.zeros(({b}, {s}), dtype=torch.int64, device=d))",
            "F.bilinear({x}, {x}, {k}[:, :1, :1, 0].expand(3, {s}, {s}))",
        ])  # fmt: skip
    words: dict[str, Any] = {"x": x, "i": image, "w": weight, "k": kernel, "c": channels, "s": size, "b": batch}
    draw.assign(form.format(**words), form.split("(")[0].replace("F.", ""))
