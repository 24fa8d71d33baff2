"""Tests the fallback that copies arguments to the CPU and results back: results must be those of the CPU."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_backplane import _C


def numbers(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the same random numbers for the same sizes, on the CPU."""
    generator = torch.Generator().manual_seed(sum(sizes) + len(sizes))
    if dtype in (torch.float32, torch.complex64):
        return torch.randn(*sizes, generator=generator, dtype=dtype)
    return torch.randint(0, 7, sizes, generator=generator, dtype=dtype)


# --- in-place operators, views and overlap -----------------------------------------------------------------------
# Each case creates tensors on the given device and returns all values to compare.


def in_place(device: str) -> Any:
    x = numbers(4, 5).to(device)
    return x.add_(1).mul_(x), x


def in_place_on_a_view(device: str) -> Any:
    base = numbers(6, 8).to(device)
    base[1:5:2, 2:7].sin_()
    base.t()[3].fill_(9)
    return base


def in_place_on_a_broadcast_of_its_own_row(device: str) -> Any:
    base = numbers(4, 4).to(device)
    base[1:].add_(base[0])
    return base


def in_place_with_overlapping_arguments(device: str) -> Any:
    base = numbers(10).to(device)
    base[:5].add_(base[5:])  # two ranges of one storage
    base[2:8:2].mul_(base[3:9:2])  # interleaved ranges
    return base


def in_place_through_two_views(device: str) -> Any:
    base = numbers(3, 4).to(device)
    torch._foreach_add_([base[0], base[2]], 1.5)
    torch._foreach_mul_([base[:, 1], base[:, 3]], [base[:, 0], base[:, 2]])
    return base


def copies_within_one_storage(device: str) -> Any:
    base = numbers(12).to(device)
    base[6:].copy_(base[:6])
    base.view(3, 4)[:, 0].copy_(base.view(3, 4)[:, 2])
    return base


def transposed_in_place(device: str) -> Any:
    x = numbers(3, 5).to(device)
    x.t_().mul_(2)
    return x, x.is_contiguous(), x.stride()


def swapped_storage(device: str) -> Any:
    x, y = numbers(3, 4).to(device), numbers(7).to(device)
    x.set_(y)
    x.add_(1)
    return x, y, x.data_ptr() == y.data_ptr()


def index_put(device: str) -> Any:
    x = numbers(5, 6).to(device)
    x[numbers(3, dtype=torch.int64).to(device).clamp(max=4)] = 7.0
    x[torch.tensor([0, 2])] += 1  # an index on the CPU
    x[x > 1] = -1
    return x


# --- out= --------------------------------------------------------------------------------------------------------


def out_that_fits(device: str) -> Any:
    x, out = numbers(3, 4).to(device), torch.empty(3, 4, device=device)
    given = torch.add(x, 1, out=out)
    return given, out, given is out


def out_that_is_empty(device: str) -> Any:
    x, out = numbers(3, 4).to(device), torch.empty(0, device=device)
    torch.mul(x, 2, out=out)
    return out


def out_that_is_strided(device: str) -> Any:
    x, base = numbers(3, 4).to(device), torch.zeros(4, 9, device=device)
    torch.exp(x, out=base[:, 2:8:2].t())
    return base


def out_that_grows_a_view(device: str) -> Any:
    base = torch.arange(10.0, device=device)
    view = base[2:5]
    torch.add(numbers(20).to(device), 1, out=view)  # PyTorch warns that this is deprecated, and resizes
    return view, base[:2], base[5:], view.untyped_storage().nbytes(), base.untyped_storage().nbytes()


def out_that_shrinks(device: str) -> Any:
    out = torch.zeros(30, device=device)
    torch.neg(numbers(4).to(device), out=out)
    return out, out.untyped_storage().nbytes()


def out_in_pairs(device: str) -> Any:
    x = numbers(3, 8).to(device)
    values, indices = torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
    torch.sort(x, out=(values, indices))
    return values, indices


def out_that_is_an_input(device: str) -> Any:
    x = numbers(4, 4).to(device)
    torch.add(x, 1, out=x)
    torch.cumsum(x, 0, out=x)
    return x


# --- lists, optional tensors, kinds of results -------------------------------------------------------------------


def lists(device: str) -> Any:
    parts = [numbers(2, n).to(device) for n in (1, 3, 2)]
    return torch.cat(parts, 1), torch.stack([parts[0], parts[0]]), torch.block_diag(*parts)


def one_tensor_twice_in_a_list(device: str) -> Any:
    x = numbers(3).to(device)
    return torch.cat([x, x, x[1:]])


def optional_tensors(device: str) -> Any:
    x = numbers(2, 3, 4).to(device)
    weight = numbers(4).to(device)
    return (
        torch.nn.functional.layer_norm(x, (4,), weight, None),
        torch.nn.functional.layer_norm(x, (4,)),
        torch.bucketize(x, weight.sort().values),
        x[:, torch.tensor([0, 2], device=device)],
    )


def results_that_are_views(device: str) -> Any:
    x = numbers(4, 6).to(device)
    parts = x.split(2, 1)
    parts[1].zero_()
    x.chunk(2)[0].add_(1)
    x.unfold(0, 2, 1)[0].mul_(2)
    x.expand(2, 4, 6)[1, 2, 3].fill_(5)
    x.diagonal().neg_()
    return x, parts[0], x.real is x


def results_that_share_memory(device: str) -> Any:
    x = numbers(5, 5).to(device)
    lu, pivots = torch.linalg.lu_factor(x)
    _, s, _ = torch.linalg.svd(x @ x.t() + torch.eye(5, device=device))
    return lu, pivots, s, torch.linalg.qr(x)[1].abs(), torch.unique(x.round(), return_counts=True)


def empty_tensors(device: str) -> Any:
    x = torch.empty(0, 3, device=device)
    return x + 1, x.sum(), x.sum(0), torch.cat([x, x]), x.t().contiguous(), x.clone(), x.mul_(2), x.to("cpu").to(device)


def strided_inputs(device: str) -> Any:
    x = numbers(4, 6, 3).to(device)
    return x.permute(2, 0, 1) + x.permute(2, 0, 1), x[::2, 1::3].exp(), x.transpose(0, 2).contiguous(), x.sum((0, 2))


def channels_last(device: str) -> Any:
    x = numbers(2, 3, 4, 4).to(device).to(memory_format=torch.channels_last)
    w = numbers(5, 3, 3, 3).to(device)
    y = torch.nn.functional.conv2d(x, w, padding=1)
    return y, y.stride(), x.relu().stride()


def conjugate_and_negative_views(device: str) -> Any:
    x = numbers(3, 4, dtype=torch.complex64).to(device)
    y = x.conj()
    z = x.clone()
    z.conj().add_(1j)
    z.imag.neg_()
    w = torch.zeros_like(x)
    w.copy_(y)
    v = torch.zeros(3, 4, device=device)
    v.copy_(y.imag)
    return y.is_conj(), y * 2, y.resolve_conj(), y @ x.t(), y.imag.is_neg(), y.imag + 1, z, w, v, torch.view_as_real(x)


def fourier(device: str) -> Any:
    x = numbers(4, 8).to(device)
    return torch.fft.irfft(torch.fft.rfft(x)), torch.fft.fft2(x), torch.fft.ifft(torch.fft.fft(x).conj())


def scalars(device: str) -> Any:
    x = numbers(3).to(device)
    return x + torch.tensor(2.0), torch.tensor(2) * x, x.sum().item(), x.max().item(), bool((x == x).all()), x.tolist()


def dtype_promotion(device: str) -> Any:
    x, i = numbers(3).to(device), numbers(3, dtype=torch.int32).to(device)
    return x + i, i / 2, i * 2.5, x.half() + x, i > 2, (x + 1j), x.to(torch.bfloat16) @ x.to(torch.bfloat16)


def factories(device: str) -> Any:
    return (
        torch.arange(5, device=device), torch.linspace(0, 1, 5, device=device), torch.eye(3, device=device),
        torch.full((2, 2), 7, device=device), torch.tril_indices(3, 3, device=device),
        torch.ones(2, 3, device=device).new_zeros(4), torch.tensor([[1, 2], [3, 4]], device=device),
    )


def running_statistics(device: str) -> Any:
    norm = torch.nn.BatchNorm2d(3).to(device)
    y = norm(numbers(2, 3, 4, 4).to(device))
    frozen = torch.nn.BatchNorm1d(4, momentum=None).to(device)
    frozen(numbers(5, 4).to(device))
    frozen(numbers(6, 4).to(device))
    instance = torch.nn.InstanceNorm1d(3, track_running_stats=True).to(device)
    instance(numbers(2, 3, 7).to(device))
    return y, norm.running_mean, norm.running_var, norm.num_batches_tracked, frozen.running_mean, frozen.running_var, \
        instance.running_mean


def recurrent(device: str) -> Any:
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(4, 5, num_layers=2, bidirectional=True)
    gru = torch.nn.GRU(4, 5)
    x = numbers(3, 2, 4).to(device)
    return lstm.to(device)(x), gru.to(device)(x)


def attention(device: str) -> Any:
    q, k, v = (numbers(2, 3, n, 8).to(device) for n in (5, 6, 6))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


CASES = [
    in_place, in_place_on_a_view, in_place_on_a_broadcast_of_its_own_row, in_place_with_overlapping_arguments,
    in_place_through_two_views, copies_within_one_storage, transposed_in_place, swapped_storage, index_put,
    out_that_fits, out_that_is_empty, out_that_is_strided, out_that_grows_a_view, out_that_shrinks, out_in_pairs,
    out_that_is_an_input, lists, one_tensor_twice_in_a_list, optional_tensors, results_that_are_views,
    results_that_share_memory, empty_tensors, strided_inputs, channels_last, conjugate_and_negative_views, fourier,
    scalars, dtype_promotion, factories, running_statistics, recurrent, attention,
]  # fmt: skip


def to_cpu(value: Any, device: str) -> Any:
    """Replaces each tensor, which must be on `device`, by (its copy on the CPU, its strides)."""
    if isinstance(value, Tensor):
        assert value.device == torch.device(device), f"a result is on {value.device}"
        return value.detach().cpu(), value.stride() if value.numel() else None
    if isinstance(value, (list, tuple)):
        return [to_cpu(item, device) for item in value]
    return value


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        torch.testing.assert_close(other, one)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_same(first, second)
    else:
        assert one == other, f"{one!r} on the CPU, {other!r} on bp"


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
@pytest.mark.parametrize("device", ["bp:0", "bp:1"])
def test_fallback_matches_the_cpu(case: str, device: str) -> None:
    run: Callable[[str], Any] = globals()[case]
    torch.accelerator.set_device_index(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(to_cpu(run("cpu"), "cpu"), to_cpu(run(device), device))


# --- training ----------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.5},
    "NAdam": {},
    "Adadelta": {},
}
FLAGS = [{}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize("flags", FLAGS, ids=["plain", "foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_losses_match_the_cpu(name: str, flags: dict[str, bool]) -> None:
    if flags.get("fused") and name not in ("SGD", "Adam", "AdamW", "Adagrad"):
        with pytest.raises(TypeError, match="unexpected keyword argument 'fused'"):
            getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(1, device="bp"))], fused=True)
        return

    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Flatten(), torch.nn.Linear(36, 5),
        ).to(device)  # fmt: skip
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05, **OPTIMIZERS[name], **flags)
        x, y = numbers(16, 1, 8, 8).to(device), numbers(16, dtype=torch.int64).clamp(max=4).to(device)
        history = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            history.append(loss.item())
        assert all(p.device == torch.device(device) for p in model.parameters())
        return history

    on_cpu, on_bp = losses("cpu"), losses("bp:0")
    assert on_cpu[-1] < on_cpu[0]
    assert on_bp == pytest.approx(on_cpu, rel=1e-3)


def test_gradients_of_gradients() -> None:
    def second(device: str) -> Tensor:
        x = numbers(4, 4).to(device).requires_grad_()
        (grad,) = torch.autograd.grad((x @ x.t()).tanh().pow(3).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return x.grad

    torch.testing.assert_close(second("bp:1").cpu(), second("cpu"))


def test_backward_through_casts_with_a_cpu_grad_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = numbers(4, 4).to("bp").requires_grad_()
    scaler.scale(x.half().float().sum().cpu()).backward()
    assert x.grad.device == torch.device("bp:0")
    assert x.grad.unique().cpu().tolist() == [1024.0]


# --- random numbers ----------------------------------------------------------------------------------------------


def test_random_numbers_repeat_only_with_the_same_seed() -> None:
    def draw() -> list[Tensor]:
        x = torch.empty(100, device="bp:1")
        return [
            torch.randn(100, device="bp:1"), x.uniform_().clone(), torch.randperm(50, device="bp:1"),
            torch.bernoulli(torch.full((100,), 0.5, device="bp:1")), torch.randint(9, (50,), device="bp:1"),
            torch.nn.functional.dropout(torch.ones(100, device="bp:1")), torch.multinomial(x.abs(), 10),
        ]  # fmt: skip

    torch.manual_seed(3)
    first = draw()
    other = draw()
    torch.manual_seed(3)
    again = draw()
    for one, two, three in zip(first, again, other, strict=True):
        assert one.device == torch.device("bp:1")
        assert torch.equal(one.cpu(), two.cpu())
        assert not torch.equal(one.cpu(), three.cpu())


# --- errors ------------------------------------------------------------------------------------------------------


def test_device_is_usable_after_a_kernel_error() -> None:
    x = torch.ones(3, 4, device="bp")
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        x.add_(torch.ones(5, device="bp"))
    assert x.sum().item() == 12


def test_sparse_results_are_rejected() -> None:
    with pytest.raises(NotImplementedError, match="parse"):
        torch.eye(3, device="bp").to_sparse()


TOO_WIDE: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: torch.zeros(2, dtype=torch.float64, device="bp:1"),
    "tensor": lambda: torch.tensor([1.0], dtype=torch.float64, device="bp:1"),
    "linspace": lambda: torch.linspace(0, 1, 3, dtype=torch.float64, device="bp:1"),
    "double": lambda: torch.ones(2, device="bp:1").double(),
    "to": lambda: torch.ones(2).double().to("bp:1"),
    "to, from another device": lambda: torch.ones(2, device="bp:2", dtype=torch.float64).to("bp:1"),
    "a kernel's result": lambda: torch.ones(2, device="bp:1").cumsum(0, dtype=torch.float64),
    "a view": lambda: torch.ones(4, dtype=torch.int64, device="bp:1").view(torch.float64),
    "zero tensor": lambda: torch._efficientzerotensor(3, dtype=torch.float64, device="bp:1"),
}


@pytest.mark.parametrize("way", TOO_WIDE)
def test_unsupported_dtypes_are_rejected(way: str) -> None:
    with pytest.raises(TypeError, match=r"bp:1 \(Toy accelerator 1\) does not support Double"):
        TOO_WIDE[way]()


def test_copies_convert_from_unsupported_dtypes() -> None:
    x = torch.tensor([1.5, 2.5], dtype=torch.float64)
    on_toy = torch.zeros(2, device="bp:1")
    on_toy.copy_(x)
    on_toy += x.to("bp:2").to("bp:1", torch.float32)
    on_toy.add_(torch.tensor(0.25, dtype=torch.float64))
    assert on_toy.tolist() == [3.25, 5.25]
    assert x.to("bp:2").copy_(on_toy).cpu().equal(torch.tensor([3.25, 5.25], dtype=torch.float64))


def test_fallback_policy_warns_and_raises() -> None:
    x = torch.ones(3, device="bp:1")
    try:
        _C.set_fallback_policy(_C.FallbackPolicy.warn)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.special.bessel_j0(x)
            torch.special.bessel_j0(x)
        (warning,) = [w for w in caught if "bessel_j0" in str(w.message)]
        assert "bessel_j0 has no kernel for bp:1 (Toy accelerator 1) and runs on the CPU" in str(warning.message)
        _C.set_fallback_policy(_C.FallbackPolicy.error)
        with pytest.raises(NotImplementedError, match=r"bessel_j1 has no kernel for bp:1 \(Toy accelerator 1\)"):
            torch.special.bessel_j1(x)
        torch.special.bessel_j1(torch.ones(3, device="bp:2"))  # host-accessible: no copies, so no error
    finally:
        _C.set_fallback_policy(_C.FallbackPolicy.silent)


def test_allocator_counts_and_frees_results() -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated(0)
    x = torch.ones(1000, device="bp:0")
    y = x.sort()
    assert torch.accelerator.memory_allocated(0) - before == 2 * 4096 + 8192
    del x, y
    assert torch.accelerator.memory_allocated(0) == before
