"""Moves with autograd: graphs of several leaves with views and writes, accumulated gradients, and double backward."""

from __future__ import annotations

import torch

from fuzz.moves import move
from fuzz.networks import DIFFERENTIABLE
from fuzz.random_arguments import FLOATING, RandomArguments

# {0}: a value of the graph, {1}: another value, {2}: a dimension
_WRITES = [
    "{0}.mul_({1})", "{0}.add_({1}, alpha=2)", "{0}[..., :1].mul_(3)", "{0}.relu_()", "{0}.tanh_()",
    "{0}.clamp_(-1, 1)", "{0}.copy_({1})", "{0}.zero_()", "{0}[0] = 0", "{0}.masked_fill_({1} > 0, 2)",
    "{0}.unsqueeze_({2})", "{0}.transpose_({2}, -1)", "{0}.div_(2)", "{0}.exp_()", "{0}.pow_(2)",
    "{0}.sub_({1}.detach())",
    "{0}.select({2}, 0).add_(1)", "{0}.lerp_({1}, 0.5)", "{0}.addcmul_({1}, {1})", "{0}.flatten()[:2].neg_()",
]  # fmt: skip


@move
def graph(draw: RandomArguments) -> None:
    """Builds a graph with views and in-place writes; computes gradients with backward() (once or twice) or grad()."""
    dtype = draw.one([torch.float32, torch.float32, draw.dtype(FLOATING)])
    first = draw.tensor(lambda tensor: tensor.dtype == dtype, fresh=0.4)
    leaves = [draw.assign(f"{first}.detach().requires_grad_()", "leaf")]
    for _ in range(draw.one([0, 1, 1, 2])):
        leaves.append(draw.assign(f"{draw.like(first, same_dtype=0.9)}.detach().requires_grad_()", "leaf"))
    leaves = [leaf for leaf in leaves if leaf in draw.run.cpu and draw.get(leaf).requires_grad]
    if not leaves:
        return
    values = list(leaves)
    for _ in range(draw.one([1, 2, 3, 4, 6])):
        value = draw.one(values[-3:])
        other = draw.one(values) if draw.chance(0.6) else draw.like(value, same_dtype=1.0)
        dim = draw.dim(value)
        if value not in leaves and draw.chance(0.25):
            form = draw.one(_WRITES)
            draw.line(form.format(value, other, dim), "in a graph: " + form.format("x", "y", 0).split("(")[0])
            continue
        index = draw.index(3, draw.size_of(value, dim))
        form, operator = draw.one(DIFFERENTIABLE)
        name = draw.assign(form.format(value, other, dim, index), operator)
        if isinstance(draw.run.cpu.get(name), torch.Tensor) and draw.get(name).is_floating_point():
            values.append(name)
    last = values[-1]
    if last not in draw.run.cpu or not draw.get(last).requires_grad:
        return
    kind = draw.one(["backward", "backward", "twice", "grad", "second"])
    among = ", ".join(leaves)
    if kind == "grad":
        draw.assign(f"torch.autograd.grad({last}.sum(), [{among}], allow_unused=True)", "graph backward")
    elif kind == "second":
        first_order = draw.assign(
            f"torch.autograd.grad({last}.sum(), [{among}], create_graph=True, allow_unused=True)", "graph backward"
        )
        total = f"sum(x.square().sum() for x in {first_order} if x is not None)"
        draw.assign(f"torch.autograd.grad({total}, [{among}], allow_unused=True)", "graph double backward")
    else:
        draw.line(f"{last}.sum().backward(retain_graph={kind == 'twice'})", "graph backward")
        if kind == "twice":
            draw.line(f"{last}.mean().backward()", "graph backward")
        for leaf in leaves:
            draw.assign(f"{leaf}.grad", "grad")
