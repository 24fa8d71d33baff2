"""Less common forms of batch norm, masked softmax, weight norm, and RMS norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import DEVICE, agrees, need, on_device, plans_from_the_start, refused_alike

from torch_backplane import plans

aten, F = torch.ops.aten, torch.nn.functional
SHAPES = [(4, 6, 5, 5), (30, 6), (2, 6, 1), (3, 6, 4, 2, 2)]
MIXED = [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "kept"), MIXED, ids=str)
def test_batch_norm_with_update(shape: tuple[int, ...], dtype: torch.dtype, kept: torch.dtype) -> None:
    x, weight, bias = numbers(*shape, dtype=dtype), numbers(6, dtype=kept), numbers(6, dtype=kept) + 1
    mean, var = numbers(6, dtype=kept), numbers(6, dtype=kept).abs()
    agrees(lambda *tensors: aten._batch_norm_with_update(*tensors, 0.1, 1e-5), x, weight, bias, mean, var)
    agrees(lambda x, *tensors: aten._batch_norm_with_update(x, None, None, *tensors, 0.3, 1e-3), x, mean, var)
    agrees(
        lambda x, *tensors: aten._batch_norm_with_update(x.transpose(0, -1), None, None, *tensors, 0.3, 1e-3),
        numbers(5, 6, 4, dtype=dtype),
        mean,
        var,
    )
    outs = torch.empty_like(x), *(torch.empty(6, dtype=kept) for _ in range(2)), torch.empty(0, dtype=torch.uint8)
    agrees(
        lambda x, mean, var, out, a, b, c: aten._batch_norm_with_update.out(
            x, None, None, mean, var, 0.1, 1e-5, out=out, save_mean=a, save_invstd=b, reserve=c
        ),
        x,
        mean,
        var,
        *outs,
    )


@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False], [False, True, True]], ids=str)
@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize(("dtype", "kept"), MIXED, ids=str)
def test_batch_norm_backward(dtype: torch.dtype, kept: torch.dtype, update: bool, mask: list[bool]) -> None:
    x, grad, weight = numbers(4, 6, 5, 5, dtype=dtype), numbers(4, 6, 5, 5, dtype=dtype) * 2, numbers(6, dtype=kept)
    mean, var = numbers(6, dtype=kept), numbers(6, dtype=kept).abs() + 0.5

    def backward(grad: torch.Tensor, x: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
        reserve = x.new_empty(0, dtype=torch.uint8)
        results = aten.batch_norm_backward(grad, x, *given, update, 1e-3, mask, reserve)
        return [result for result in results if result is not None]

    agrees(backward, grad, x, weight, mean, var, mean / 2, 1 / var)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "kept"), [*MIXED, (torch.bfloat16, torch.bfloat16)], ids=str)
def test_batch_norm_update_stats(shape: tuple[int, ...], dtype: torch.dtype, kept: torch.dtype) -> None:
    # Positive, because PyTorch's bfloat16 means are less accurate under cancellation.
    x, mean, var = numbers(*shape).abs().to(dtype), numbers(6, dtype=kept).abs(), numbers(6, dtype=kept).abs()
    agrees(lambda *tensors: aten.batch_norm_update_stats(*tensors, 0.1), x, mean, var)
    agrees(lambda x: aten.batch_norm_update_stats(x, None, None, 0.1), x)
    agrees(lambda x, mean: aten.batch_norm_update_stats(x, mean, None, 0.1), x, mean)
    agrees(lambda x, var: aten.batch_norm_update_stats(x, None, var, 0.1), x, var)
    agrees(lambda x, mean: aten.batch_norm_update_stats(x, mean[::2], None, 0.1), x, numbers(12, dtype=kept).abs())
    agrees(
        lambda x, a, b: aten.batch_norm_update_stats.out(x, None, None, 0.1, out0=a, out1=b),
        x,
        torch.empty(6, dtype=dtype),
        torch.empty(0, dtype=dtype),
    )


def gradients(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad((result * result.detach()).sum(), leaves)]


def test_gradients_with_transposed_weight() -> None:
    x, weight = numbers(3, 4, 5), numbers(5, 4).t()
    agrees(lambda *t: gradients(lambda x, w: F.layer_norm(x, (4, 5), w), *t), x, weight)
    agrees(lambda *t: gradients(lambda x, w: F.rms_norm(x, (4, 5), w), *t), x, weight)


@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_rms_norm(dtype: torch.dtype, eps: float | None) -> None:
    # Half-precision results and gradients are rounded once. The CPU's composition rounds them more often.
    wide = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}
    x, weight = numbers(4, 6, 40, dtype=dtype), numbers(40, dtype=dtype)
    agrees(lambda *t: gradients(lambda x: F.rms_norm(x, (40,), eps=eps), *t), x, **wide)
    agrees(lambda *t: gradients(lambda x, w: F.rms_norm(x, (40,), w, eps), *t), x, weight, **wide)
    agrees(
        lambda *t: gradients(lambda x, w: F.rms_norm(x.transpose(0, 2), (6, 4), w, eps), *t),
        x,
        weight.new_ones(6, 4),
        **wide,
    )
    agrees(lambda *t: gradients(lambda x, w: F.rms_norm(x, (40,), w, eps), *t), x[0, 0], weight, **wide)
    agrees(lambda x, w: F.rms_norm(x.requires_grad_(), (40,), w, eps).detach(), x, weight, **wide)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_results_and_gradients_have_the_cpus_strides(norm: str) -> None:
    """They are contiguous for any layout of the input."""
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 1, 2)):
        found = []
        for device in ("cpu", DEVICE):
            x = numbers(6, 7, 8).to(device).permute(order).requires_grad_()
            out = getattr(F, norm)(x, x.shape[2:])
            (gradient,) = torch.autograd.grad(out.square().sum(), x)
            found.append((out, gradient))
        for expected, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours.cpu(), expected)
            assert ours.stride() == expected.stride()


def test_rms_norm_of_empty_tensors() -> None:
    agrees(lambda *t: gradients(lambda x, w: F.rms_norm(x, (5,), w), *t), torch.zeros(0, 5), torch.ones(5))
    agrees(lambda *t: gradients(lambda x, w: F.rms_norm(x, (0,), w), *t), torch.zeros(3, 0), torch.ones(0))


def test_rms_norm_of_unsupported_dtypes_is_composed() -> None:
    agrees(lambda x: F.rms_norm(x, (5,)), torch.randn(3, 5, dtype=torch.complex64))
    agrees(lambda x, w: F.rms_norm(x, (5,), w), numbers(3, 5, dtype=torch.bfloat16), numbers(5))


def test_rms_norm_is_one_launch_and_backward_is_two() -> None:
    x, rstd, weight = (tensor.to(DEVICE) for tensor in (numbers(4, 40), numbers(4, 1), numbers(40)))
    for wanted, function in (
        (1, lambda: F.rms_norm(x, (40,), weight)),
        (2, lambda: aten._fused_rms_norm_backward(x, x, [40], rstd, weight, [True, True])),
    ):
        with plans_from_the_start():
            plan_text = str(plans.explain(function))
        assert plan_text.count("→ launch") == wanted, plan_text


def test_rms_norm_supports_jvp_hessian_and_vmap() -> None:
    need(torch.float64)
    x, weight = numbers(3, 5, dtype=torch.float64), numbers(5, dtype=torch.float64)

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (5,), w)

    agrees(lambda x, w: torch.func.jvp(norm, (x, w), (x * 2, w - 1)), x, weight)
    agrees(lambda x, w: torch.func.hessian(lambda x: norm(x, w).pow(3).sum())(x), x, weight)
    agrees(lambda x, w: torch.func.vmap(norm, (0, None))(x, w), x, weight)


def test_batch_norm_update_stats_of_one_row() -> None:
    agrees(lambda *tensors: aten.batch_norm_update_stats(*tensors, 0.1), numbers(1, 3), torch.zeros(3), torch.ones(3))


def test_batch_norm_has_the_cpus_strides() -> None:
    channels_last = torch.randn(2, 4, 3, 6).contiguous(memory_format=torch.channels_last)
    transposed, expanded = torch.randn(5, 2, 4).permute(1, 2, 0), torch.randn(1, 4, 3).expand(2, 4, 3)
    for x in (transposed, expanded, torch.randn(4, 3).t(), channels_last, channels_last[..., ::2]):
        for training in (True, False):
            statistics = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
            expected = torch.nn.functional.batch_norm(x, *statistics, training=training)
            found = torch.nn.functional.batch_norm(on_device(x), *on_device(statistics), training=training)
            assert found.stride() == expected.stride()
            torch.testing.assert_close(found.cpu(), expected)


def test_batch_norm_no_update() -> None:
    x, weight, mean, var = numbers(4, 6, 5), numbers(6), numbers(6), numbers(6).abs()
    agrees(lambda x, w, *tensors: aten._batch_norm_no_update(x, w, None, *tensors, 0.1, 1e-5), x, weight, mean, var)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_weight_norm(dtype: torch.dtype) -> None:
    for shape, lengths, dim in (
        ((3, 4, 5), (3, 1, 1), 0),
        ((3, 4, 5), (1, 1, 5), 2),
        ((3, 70), (3, 1), 0),
        ((7,), (7,), 0),
    ):
        v, g, grad = numbers(*shape, dtype=dtype), numbers(*lengths, dtype=dtype), numbers(*shape, dtype=dtype) + 1
        agrees(lambda v, g: aten._weight_norm_interface(v, g, dim), v, g)  # noqa: B023
        norms = aten._weight_norm_interface(v, g, dim)[1]
        agrees(lambda *t: aten._weight_norm_interface_backward(*t, dim), grad, v, g, norms)  # noqa: B023


def test_weight_norm_of_a_transposed_tensor() -> None:
    """PyTorch's CPU kernels require contiguous tensors: forward does not check, and backward raises."""
    v, g, grad = numbers(3, 4, 5), numbers(5, 1, 1), numbers(5, 4, 3)
    expected = aten._weight_norm_interface(v.transpose(0, 2).contiguous(), g, 0)
    found = aten._weight_norm_interface(v.to(DEVICE).transpose(0, 2), g.to(DEVICE), 0)
    torch.testing.assert_close([one.cpu() for one in found], list(expected))
    norms = expected[1]
    refused_alike(lambda *t: aten._weight_norm_interface_backward(*t, 0), grad, v.transpose(0, 2), g, norms)


def test_weight_norm_of_float16_has_float32_norms() -> None:
    v, g = numbers(3, 4).half(), numbers(3, 1).half()
    agrees(lambda v, g: aten._weight_norm_interface(v, g, 0), v, g)


def test_weight_norm_of_empty_tensors_is_an_error() -> None:
    """PyTorch's CPU kernel crashes the process."""
    for shape in ((0,), (3, 0), (0, 3)):
        nothing = torch.zeros(shape, device=DEVICE)
        with pytest.raises(RuntimeError, match="weight norm needs elements, but got a tensor of shape"):
            aten._weight_norm_interface(nothing, nothing, 0)
        with pytest.raises(RuntimeError, match="weight norm needs elements"):
            aten._weight_norm_interface_backward(nothing, nothing, nothing, nothing, 0)


def test_weight_norm_parametrization() -> None:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 4, device=x.device))
        with torch.no_grad():
            layer.bias.copy_(bias)
            layer.weight = weight
        layer(x).pow(2).sum().backward()
        return [layer.weight.detach(), *(parameter.grad for parameter in layer.parameters())]

    agrees(run, numbers(5, 6), numbers(4, 6), numbers(4))


def test_weight_norm_of_mismatched_shapes_raises_the_cpus_errors() -> None:
    for arguments in ((numbers(3, 4, 5), numbers(1, 4, 1), 1), (numbers(3, 4), numbers(3, 1), -1)):
        with pytest.raises(RuntimeError) as expected:
            aten._weight_norm_interface(*arguments)
        with pytest.raises(RuntimeError) as found:
            aten._weight_norm_interface(*(on_device(one) for one in arguments))
        assert str(found.value).split("\n")[0] == str(expected.value).split("\n")[0]


MASKS = {0: (4, 4), 1: (2, 4), 2: (2, 3, 4, 4)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_masked_softmax(kind: int, dtype: torch.dtype) -> None:
    x, mask = numbers(2, 3, 4, 4, dtype=dtype), numbers(*MASKS[kind]) > 0
    mask.view(-1, 4)[0], mask.view(-1, 4)[1] = True, False
    for dim in (3, -1, None, 1, 2) if kind == 2 else (3, 2):
        agrees(lambda x, mask: aten._masked_softmax(x, mask, dim, kind), x, mask)  # noqa: B023
    agrees(lambda x, mask, out: aten._masked_softmax.out(x, mask, 3, kind, out=out), x, mask, torch.empty_like(x))


def test_masked_softmax_of_special_numbers() -> None:
    x = torch.tensor([[1.0, torch.nan, 2.0], [torch.nan, 1.0, 2.0], [-torch.inf, -torch.inf, 1.0]])
    for mask in ([False, True, False], [True, False, True], [False, False, True], [False, False, False]):
        agrees(lambda x, mask: aten._masked_softmax(x, mask, 1, 2), x, torch.tensor([mask] * 3))


def test_masked_softmax_of_zero_dimensional_and_empty_tensors() -> None:
    for mask in (True, False):
        agrees(lambda x, mask: aten._masked_softmax(x, mask, 0, 2), torch.tensor(3.0), torch.tensor(mask))
    for shape in ((0, 3), (3, 0), (0,)):  # these crash the process on the CPU
        found = aten._masked_softmax(torch.zeros(shape, device=DEVICE), torch.zeros(shape, device=DEVICE) > 0, 0, 2)
        assert found.shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [None, 0, 1, -1])
def test_masked_softmax_backward(dim: int | None, dtype: torch.dtype) -> None:
    x, grad, mask = numbers(5, 6, 7, dtype=dtype), numbers(5, 6, 7, dtype=dtype) + 1, numbers(5, 6, 7) > 0.5
    agrees(lambda *t: aten._masked_softmax_backward(*t, dim), grad, x.softmax(-1), mask)
    output = aten._masked_softmax(x, mask, dim, 2)
    agrees(lambda *t: aten._masked_softmax_backward(*t, dim), grad, output, mask)


def test_masked_softmax_of_bfloat16_is_rounded_once() -> None:
    """The reference is in float64, because PyTorch's CPU kernels accumulate in bfloat16."""
    x, grad, mask = numbers(5, 70).bfloat16(), numbers(5, 70).bfloat16() + 1, numbers(5, 70) > 0.5
    expected = aten._masked_softmax(x.double(), mask, 1, 2)
    found = aten._masked_softmax(x.to(DEVICE), mask.to(DEVICE), 1, 2)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=2**-8, atol=0)
    backward = aten._masked_softmax_backward(grad.to(DEVICE), found, mask.to(DEVICE), 1)
    expected = aten._masked_softmax_backward(grad.double(), found.cpu().double(), mask, 1)
    torch.testing.assert_close(backward.cpu().double(), expected, rtol=2**-8, atol=1e-6)


def test_invalid_masks_raise_the_cpus_errors() -> None:
    x = numbers(2, 3, 4, 4)
    for mask, kind in (
        (numbers(2, 3, 4, 4), 2),
        (numbers(3, 4) > 0, 2),
        (numbers(2, 3) > 0, 1),
        (numbers(2, 4) > 0, 0),
    ):
        with pytest.raises(RuntimeError) as expected:
            aten._masked_softmax(x, mask, 3, kind)
        with pytest.raises(RuntimeError) as found:
            aten._masked_softmax(on_device(x), on_device(mask), 3, kind)
        assert str(found.value).split("\n")[0] == str(expected.value).split("\n")[0]


@pytest.mark.parametrize("which", ["weight", "bias", "running_mean", "running_var"])
@pytest.mark.parametrize("count", [0, 1, 6, 13])
def test_batch_norm_rejects_mismatched_channel_counts(which: str, count: int) -> None:
    """Calls the operator below F.batch_norm, which checks the counts. PyTorch's CPU kernel would read out of bounds."""
    sizes = {name: count if name == which else 5 for name in ("weight", "bias", "running_mean", "running_var")}
    given = [torch.ones(size, device=DEVICE) for size in sizes.values()]
    x = torch.rand(3, 5, 4, device=DEVICE)
    for training in (True, False):
        torch.ops.aten.native_batch_norm(x, *(torch.ones(5, device=DEVICE) for _ in given), training, 0.1, 1e-5)
        with pytest.raises(RuntimeError, match=f"{which} should contain 5 elements not {count}"):
            torch.ops.aten.native_batch_norm(x, *given, training, 0.1, 1e-5)


GROUP_NORM_LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "spaced": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "spaced channels last": lambda x: torch.cat((x, x), 1).contiguous(memory_format=torch.channels_last)[:, :4],
    "permuted": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("layout", GROUP_NORM_LAYOUTS)
def test_group_norm_has_the_cpus_strides(layout: str) -> None:
    x, weight = GROUP_NORM_LAYOUTS[layout](numbers(2, 4, 5, 7)), numbers(4)
    agrees(lambda *given: gradients(lambda x, w: F.group_norm(x, 2, w, w), *given), x, weight)
    forward, backward = torch.ops.aten.native_group_norm, torch.ops.aten.native_group_norm_backward
    sizes = 2, 4, 35, 2
    if torch.__version__ < "2.14":  # PyTorch's kernels refuse most layouts, and read out of bounds in the gradient
        if layout != "channels last":
            refused_alike(lambda x, w: forward(x, w, w, *sizes, 1e-5), x, weight)
        return
    _, mean, rstd = forward(x, weight, weight, *sizes, 1e-5)
    agrees(lambda x, w: forward(x, w, w, *sizes, 1e-5), x, weight)
    agrees(lambda *given: backward(*given, *sizes, [True] * 3), x + 1, x, mean, rstd, weight)


def test_group_norm_rejects_mismatched_sizes() -> None:
    x = torch.rand(2, 6, 3, device=DEVICE)
    good = (2, 6, 3, 2)
    for weight, numbers in [(1, good), (5, good), (6, (2, 6, 4, 2)), (6, (3, 6, 3, 2)), (6, (2, 6, 3, 4))]:
        torch.ops.aten.native_group_norm(x, torch.ones(6, device=DEVICE), None, *good, 1e-5)
        with pytest.raises(RuntimeError):
            torch.ops.aten.native_group_norm(x, torch.ones(weight, device=DEVICE), None, *numbers, 1e-5)


def test_batch_norm_requires_a_channel_dimension() -> None:
    batch_norm, backward = torch.ops.aten.native_batch_norm, torch.ops.aten.native_batch_norm_backward
    refused_alike(lambda x: batch_norm(x, None, None, None, None, True, 0.1, 1e-5), torch.ones(3))
    x, one = torch.ones(3, device=DEVICE), torch.ones((), device=DEVICE)
    with pytest.raises(ValueError, match="SmallVector"):  # PyTorch's message
        batch_norm(one, None, None, None, None, True, 0.1, 1e-5)
    with pytest.raises(RuntimeError, match=r"expected an input with channels, but got shape \[3\]"):
        backward(x, x, one, one, one, one, one, True, 1e-5, [True] * 3)
