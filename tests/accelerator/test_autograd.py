"""Autograd on bp: gradients, double backward, hooks, checkpointing, custom functions, anomaly mode, several devices."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def same(on_bp: Tensor, on_cpu: Tensor) -> None:
    assert on_bp.device.type == "bp"
    torch.testing.assert_close(on_bp.cpu(), on_cpu)


def test_gradients_match_cpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    twin = copy.deepcopy(model).to("bp")
    inputs, labels = torch.randn(5, 6), torch.randint(3, (5,))
    nn.functional.cross_entropy(model(inputs), labels).backward()
    nn.functional.cross_entropy(twin(inputs.to("bp")), labels.to("bp")).backward()
    for on_bp, on_cpu in zip(twin.parameters(), model.parameters(), strict=True):
        assert on_bp.grad is not None
        assert on_cpu.grad is not None
        same(on_bp.grad, on_cpu.grad)


def test_gradients_accumulate() -> None:
    weight = torch.ones(3, device="bp", requires_grad=True)
    for _ in range(3):
        (weight * 2).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [6, 6, 6]


def test_double_backward() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4, 3, dtype=torch.float64)
    results = []
    for device in ("bp", "cpu"):
        x = inputs.to(device).requires_grad_()
        (gradient,) = torch.autograd.grad((x.sin() * x.exp()).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.pow(2).sum(), x)
        results.append(second)
    same(*results)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.tanh(x) @ x.T,
        lambda x: torch.softmax(x, -1).prod(),
        lambda x: torch.nn.functional.conv1d(
            x.unsqueeze(0), x[:2, :2].unsqueeze(0).transpose(0, 1)[:, :1].repeat(1, 4, 1)
        ),
        lambda x: torch.linalg.inv(x @ x.T + torch.eye(4, device=x.device, dtype=x.dtype)),
        lambda x: torch.fft.rfft(x).abs(),
        lambda x: torch.nn.functional.layer_norm(x, (5,)),
    ],
    ids=["matmul", "softmax", "conv1d", "inverse", "fft", "layer_norm"],
)
def test_gradcheck_and_gradgradcheck(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, dtype=torch.float64, device="bp", requires_grad=True)
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_backward_of_non_scalar_requires_a_gradient() -> None:
    x = torch.ones(2, device="bp", requires_grad=True)
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        (x * 2).backward()
    with pytest.raises(RuntimeError, match="expected device bp:0 but got cpu"):
        (x * 2).backward(torch.ones(2))


def test_in_place_changes_of_saved_tensors_are_detected() -> None:
    x = torch.ones(2, device="bp", requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_operations_and_views_in_the_graph() -> None:
    results = []
    for device in ("bp", "cpu"):
        x = torch.arange(6.0, device=device, requires_grad=True)
        y = x.clone().view(2, 3)
        y[0].mul_(3)
        y[:, 1] += y[:, 2]
        y.t()[0].copy_(torch.ones(2, device=device))
        y.pow(2).sum().backward()
        results.append(x.grad)
    same(*results)


def test_tensor_hooks() -> None:
    x = torch.ones(3, device="bp", requires_grad=True)
    seen: list[tuple[str, str]] = []
    x.register_hook(lambda grad: seen.append(("leaf", grad.device.type)) or grad * 10)
    y = x * 2
    y.retain_grad()
    handle = y.register_hook(lambda grad: seen.append(("inner", grad.device.type)))
    y.sum().backward(retain_graph=True)
    assert seen == [("inner", "bp"), ("leaf", "bp")]
    assert x.grad.tolist() == [20, 20, 20]
    assert y.grad.tolist() == [1, 1, 1]
    handle.remove()
    y.sum().backward()
    assert seen[2:] == [("leaf", "bp")]


def test_post_accumulate_grad_hook() -> None:
    """An optimizer step inside backward: the hook sees the accumulated gradient and can drop it."""
    weight = nn.Parameter(torch.ones(3, device="bp"))

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.5)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(step)
    (weight * weight).sum().backward()
    assert weight.grad is None
    assert weight.tolist() == [0, 0, 0]


def test_module_hooks() -> None:
    layer = nn.Linear(2, 2, device="bp")
    seen: list[str] = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(f"pre {args[0].device.type}"))
    layer.register_forward_hook(lambda module, args, output: seen.append(f"forward {output.device.type}"))
    layer.register_full_backward_pre_hook(lambda module, grads: seen.append(f"backward pre {grads[0].device.type}"))
    layer.register_full_backward_hook(
        lambda module, grad_input, grad_output: seen.append(f"backward {grad_input[0].device.type}")
    )
    layer(torch.ones(1, 2, device="bp", requires_grad=True)).sum().backward()
    assert seen == ["pre bp", "forward bp", "backward pre bp", "backward bp"]


def test_saved_tensor_hooks() -> None:
    x = torch.ones(3, device="bp", requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = x.exp() * x
    y.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), torch.full((3,), 2 * torch.e))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.device, t.cpu()), lambda packed: packed[1].to(packed[0])
    ):
        z = x.exp() * x
    x.grad = None
    z.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), torch.full((3,), 2 * torch.e))


def test_save_on_cpu_with_pinned_memory() -> None:
    x = torch.ones(3, device="bp", requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="bp"):
        y = x.exp() * x
    y.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), torch.full((3,), 2 * torch.e))


class DropoutBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.dropout(self.first(x).relu(), 0.5, training=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_repeats_the_dropout_mask(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    block = DropoutBlock().to("bp")
    inputs = torch.randn(8, 16, device="bp")
    gradients = []
    for checkpointed in (False, True):
        x = inputs.clone().requires_grad_()
        torch.manual_seed(1)
        output = checkpoint(block, x, use_reentrant=use_reentrant) if checkpointed else block(x)
        torch.rand(100, device="bp")  # advances the generator, so only a restored state gives the same mask
        output.square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in block.parameters())])
        block.zero_grad()
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_restores_the_generator_state(use_reentrant: bool) -> None:
    block = DropoutBlock().to("bp")
    x = torch.randn(2, 16, device="bp", requires_grad=True)
    output = checkpoint(block, x, use_reentrant=use_reentrant, preserve_rng_state=True)
    before = torch.bp.get_rng_state()
    output.sum().backward()
    assert torch.equal(torch.bp.get_rng_state(), before)


def test_checkpointing_without_preserved_rng_state_draws_a_new_mask() -> None:
    torch.manual_seed(0)
    x = torch.ones(1000, device="bp", requires_grad=True)
    masks = []

    def run(x: Tensor) -> Tensor:
        masks.append(nn.functional.dropout(x, 0.5))
        return masks[-1] * x

    checkpoint(run, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    assert len(masks) == 2
    assert not torch.equal(masks[0], masks[1])


def test_checkpoint_sequential() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]).to("bp")
    x = torch.randn(3, 4, device="bp", requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    (got,) = torch.autograd.grad(checkpoint_sequential(model, 2, x, use_reentrant=False).sum(), x)
    torch.testing.assert_close(got, expected)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class AddOne(torch.autograd.Function):
    """In-place; its backward cannot be differentiated."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        return grad


def test_custom_function() -> None:
    x = torch.randn(4, dtype=torch.float64, device="bp", requires_grad=True)
    assert torch.autograd.gradcheck(Cube.apply, (x,))
    assert torch.autograd.gradgradcheck(Cube.apply, (x,))
    y = x * 2
    assert AddOne.apply(y) is y
    (gradient,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, 4 * (2 * x + 1))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        raise ValueError("this backward fails")


def test_errors_in_backward_propagate_and_the_engine_stays_usable() -> None:
    x = torch.ones(2, device="bp", requires_grad=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="this backward fails"):
            FailsBackward.apply(x).sum().backward()
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_names_the_function_that_returned_nan() -> None:
    x = torch.zeros(2, device="bp", requires_grad=True)
    with (
        pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
        pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values"),
        torch.autograd.detect_anomaly(),
    ):
        (x.sqrt() * 0).sum().backward()


def test_backward_crosses_devices() -> None:
    a = torch.ones(2, device="bp:0", requires_grad=True)
    b = torch.ones(2, device="bp:1", requires_grad=True)
    c = torch.ones(2, requires_grad=True)
    ((a * 2).to("bp:1") * b * c.to("bp:1")).sum().backward()
    assert (a.grad.device, b.grad.device, c.grad.device) == (
        torch.device("bp:0"),
        torch.device("bp:1"),
        torch.device("cpu"),
    )
    assert (a.grad.tolist(), b.grad.tolist(), c.grad.tolist()) == ([2, 2], [2, 2], [2, 2])


def test_backward_keeps_the_current_device() -> None:
    with torch.device("bp:2"):
        x = torch.ones(2, requires_grad=True)
    assert x.device == torch.device("bp:2")
    seen: list[int] = []
    x.register_hook(lambda grad: seen.append(torch.bp.current_device()))
    before = torch.bp.current_device()
    (x * 2).sum().backward()
    assert seen == [2]  # bp:2 is current in the engine's thread of bp:2
    assert torch.bp.current_device() == before


def test_inference_mode_and_no_grad() -> None:
    x = torch.ones(2, device="bp", requires_grad=True)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        y = x * 2
    assert y.is_inference()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        x * y
