"""torch.func on bp: vmap, grad, jvp, vjp, Jacobians and Hessians; and forward-mode AD without torch.func."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, stack_module_state, vjp, vmap
from torch.utils._pytree import tree_map_only

# Importing some of torch.func's rules compiles them with torch.jit, and linearize folds constants of a graph.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:DeprecationWarning", "ignore:Attempted to insert a get_attr Node:UserWarning"
)


def both(function: Callable[..., object], *inputs: Tensor) -> None:
    """Asserts that function(*inputs) returns bp tensors on bp, with the CPU's values."""
    on_bp = torch.utils._pytree.tree_leaves(function(*(tensor.to("bp") for tensor in inputs)))
    on_cpu = torch.utils._pytree.tree_leaves(function(*inputs))
    assert on_bp
    for mine, theirs in zip(on_bp, on_cpu, strict=True):
        assert mine.device.type == "bp"
        torch.testing.assert_close(mine.cpu(), theirs)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x @ y,
        lambda x, y: torch.softmax(x, 0) * y,
        lambda x, y: x.sort().values + y.cumsum(0),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: torch.linalg.norm(x) * y.index_select(0, torch.tensor([0, 1], device=x.device)).sum(),
        lambda x, y: nn.functional.layer_norm(torch.stack([x, y]), (4,)),
        lambda x, y: x.clone().index_put_((torch.tensor([0], device=x.device),), y[:1]),
    ],
    ids=["matmul", "softmax", "sort", "where", "norm", "layer_norm", "index_put"],
)
def test_vmap(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    both(vmap(function), torch.randn(5, 4), torch.randn(5, 4))
    both(vmap(function, in_dims=(1, None), out_dims=-1), torch.randn(4, 3), torch.randn(4))


def test_nested_vmap_and_chunks() -> None:
    both(vmap(vmap(torch.dot, (None, 0)), (0, None)), torch.randn(3, 4), torch.randn(5, 4))
    both(vmap(torch.sin, chunk_size=2), torch.randn(5, 4))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_random_operators_under_vmap(randomness: str) -> None:
    x = torch.ones(6, 50, device="bp")
    result = vmap(lambda row: row * torch.rand_like(row), randomness=randomness)(x)
    assert result.device.type == "bp"
    assert torch.equal(result[0], result[1]) == (randomness == "same")
    with pytest.raises(RuntimeError, match="called random operation while in randomness error mode"):
        vmap(torch.rand_like)(x)


def test_gradients() -> None:
    both(grad(lambda x: x.sin().sum()), torch.randn(4))
    both(grad(grad(lambda x: x**3)), torch.tensor(2.0))
    both(torch.func.grad_and_value(lambda x, y: (x * y).sum(), argnums=(0, 1)), torch.randn(3), torch.randn(3))
    both(lambda x: vjp(torch.tanh, x)[1](torch.ones_like(x)), torch.randn(3))
    both(lambda x, t: jvp(torch.tanh, (x,), (t,)), torch.randn(3), torch.randn(3))
    both(lambda x, t: linearize(torch.exp, x)[1](t), torch.randn(3), torch.randn(3))


def test_jacobians_and_hessians() -> None:
    both(jacrev(lambda x: torch.outer(x, x).sum(1)), torch.randn(4))
    both(jacfwd(lambda x: torch.outer(x, x).sum(1)), torch.randn(4))
    both(hessian(lambda x: (x.exp() * x.flip(0)).sum()), torch.randn(4))
    both(vmap(jacrev(torch.tanh)), torch.randn(2, 3))
    both(lambda x: torch.autograd.functional.jacobian(torch.exp, x, vectorize=True), torch.randn(3))
    both(lambda x: torch.autograd.functional.hessian(lambda t: t.pow(3).sum(), x), torch.randn(3))
    both(
        lambda x: torch.autograd.functional.jacobian(torch.exp, x, vectorize=True, strategy="forward-mode"),
        torch.randn(3),
    )


def test_per_sample_gradients() -> None:
    layer = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(9, 2))

    def run(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        model = layer.to(inputs.device)
        parameters = {name: value.detach() for name, value in model.named_parameters()}

        def loss(parameters: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(model, parameters, (x.unsqueeze(0),))
            return nn.functional.cross_entropy(logits, label.unsqueeze(0))

        return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, labels)

    both(run, torch.randn(4, 2, 5), torch.randint(2, (4,)))


def test_ensembles() -> None:
    models = [nn.Linear(3, 2).to("bp") for _ in range(4)]
    parameters, buffers = stack_module_state(models)
    x = torch.randn(5, 3, device="bp")
    result = vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(result, torch.stack([model(x) for model in models]))


def test_forward_mode() -> None:
    def run(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, tangent)
            result = forward_ad.unpack_dual((dual.sin() @ dual.T).softmax(-1)[:, 1:] * 2)
            return result.primal, result.tangent

    both(run, torch.randn(3, 4), torch.randn(3, 4))


def test_forward_over_reverse() -> None:
    def run(x: Tensor, tangent: Tensor) -> Tensor:
        return jvp(grad(lambda t: nn.functional.gelu(t).pow(2).sum()), (x,), (tangent,))[1]

    both(run, torch.randn(4), torch.randn(4))


def test_zero_tensors_as_tangents() -> None:
    """Forward mode fills missing tangents with zero tensors, which have sizes but no storage."""
    zeros = torch._efficientzerotensor((3,), device="bp")
    assert zeros._is_zerotensor()
    x = torch.arange(3.0, device="bp")
    assert (x + zeros).tolist() == [0, 1, 2]
    assert (x * zeros).tolist() == [0, 0, 0]
    assert zeros.clone().tolist() == [0, 0, 0]
    assert zeros.to("cpu").tolist() == [0, 0, 0]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(3, device="bp"))
        assert forward_ad.unpack_dual(torch.stack([dual, x * 2])).tangent.tolist() == [[1, 1, 1], [0, 0, 0]]


def test_functionalize() -> None:
    both(torch.func.functionalize(lambda x: x.clone().view(-1).add_(1).sin_()), torch.randn(2, 3))


ON_ZEROS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "dot": lambda z, x: (torch.dot(z, x), torch.dot(x, z), torch.dot(z, z)),
    "vdot": lambda z, x: (torch.vdot(z, x), torch.vdot(z, z)),
    "dot, out=": lambda z, x: torch.dot(z, x, out=torch.empty((), device=x.device)),
    "arithmetic": lambda z, x: (z + x, x - z, z * x, z / x, z * 2, z + 1, -z),
    "in place": lambda z, x: (x.clone().add_(z), x.clone().mul_(z), x.clone().copy_(z)),
    "matrix products": lambda z, x: (z[None] @ x[:, None], torch.outer(z, x), torch.mv(x.repeat(3, 1), z)),
    "reductions": lambda z, x: (z.sum(), z.max(), z.norm(), z.isnan().any()),
    "lists": lambda z, x: (torch.cat([z, x]), torch.stack([z, z]), torch._foreach_add([z, x], [x, z])),
    "copies": lambda z, x: (z.clone(), z.cpu(), z.half(), z.to(x.device), z.contiguous()),
    "views": lambda z, x: (z.view(3, 1), z[1:], z.unsqueeze(0).expand(2, 3)),
    "functions": lambda z, x: (z.sin(), z.exp(), torch.where(z > 0, z, x), torch.nn.functional.relu(z)),
    "item": lambda z, x: z[0].item(),
}


@pytest.mark.parametrize("name", ON_ZEROS)
def test_zero_tensors_as_operands(name: str) -> None:
    function = ON_ZEROS[name]
    found, expected = (
        function(torch._efficientzerotensor((3,), device=device), torch.arange(1.0, 4.0, device=device))
        for device in ("bp", "cpu")
    )
    found, expected = (tree_map_only(Tensor, lambda one: one.cpu().clone(), each) for each in (found, expected))
    torch.testing.assert_close(found, expected)


def test_dot_of_zero_gradients() -> None:
    x = torch.tensor([1.0, -2.0], device="bp", requires_grad=True)
    (slope,) = torch.autograd.grad(x.abs().sum(), x, create_graph=True)
    (none,) = torch.autograd.grad(slope.square().sum(), x)
    assert torch.dot(none, none).item() == 0
