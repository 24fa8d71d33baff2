"""put_, index_reduce, repeat_interleave, unfold's gradient, patches of images, isin, randperm, bincount."""

from __future__ import annotations

import pytest
import torch
from agreement import DEVICE, agrees, refused_alike
from torch.nn import functional as F

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8]


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(3)
    x = torch.randn(shape) * 9
    return torch.complex(x, x.flip(0)).to(dtype) if dtype.is_complex else x.to(dtype)


# repeat_interleave


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("repeats", [[3], [0], [1, 2, 3], [0, 0, 5, 0, 1], [0, 0], [], [2] * 3000, [0] * 3000])
def test_repeat_interleave(repeats: list[int], dtype: torch.dtype) -> None:
    given = torch.tensor(repeats, dtype=dtype)
    agrees(lambda r: torch.repeat_interleave(r), given)
    agrees(lambda r: torch.repeat_interleave(r, output_size=int(sum(repeats))), given)
    agrees(lambda x, r: x.repeat_interleave(r, 0), numbers((len(repeats), 3)), given)
    agrees(lambda r: torch.repeat_interleave(r[::2]), given)


def test_repeat_interleave_of_all_and_gradients() -> None:
    agrees(lambda x: x.repeat_interleave(3, 1), numbers((4, 5)))

    def gradient(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x.repeat_interleave(r, 1) ** 2).sum(), x)[0]

    agrees(gradient, numbers((4, 3)), torch.tensor([2, 0, 3]))


def test_repeat_interleave_refuses_negative_counts() -> None:
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        torch.repeat_interleave(torch.tensor([1, -1, 3], device=DEVICE))


def test_repeat_interleave_of_another_size_or_negative_numbers() -> None:
    torch.repeat_interleave(torch.tensor([3, -1, 1], device=DEVICE), output_size=3)
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        torch.accelerator.synchronize(DEVICE)
    repeats = torch.tensor([1, 2], device=DEVICE)
    for size in (2, 4):
        torch.repeat_interleave(repeats, output_size=size)
        with pytest.raises(RuntimeError, match="allocated size does not match required size"):
            torch.accelerator.synchronize(DEVICE)


# put_


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_put(dtype: torch.dtype, accumulate: bool) -> None:
    x, source = numbers((4, 5), dtype), numbers((2, 3), dtype)
    index = torch.tensor([[1, -1, 7], [0, 19, 3]])
    agrees(lambda x, i, s: x.put_(i, s, accumulate), x, index, source)
    agrees(lambda x, i, s: x.put(i, s, accumulate), x, index, source)
    agrees(lambda x, i, s: x.t().put_(i, s, accumulate), x, index, source)
    agrees(lambda x, i, s: x[:, ::2].put_(i % 8, s.t(), accumulate), x, index.abs(), source)
    agrees(lambda x, i, s: x.put_(i[:, :0], s[:, :0], accumulate), x, index, source)
    agrees(lambda x, i, s: x[0, 0].put_(i[0, 0] * 0, s[0, 0], accumulate), x, index, source)


def test_put_adds_what_meets() -> None:
    agrees(lambda x, i, s: x.put_(i, s, accumulate=True), numbers((9,)), torch.arange(60) % 4, numbers((60,)))


def test_put_refuses() -> None:
    x = torch.zeros(3, device=DEVICE)
    with pytest.raises(IndexError, match="same number of elements"):
        x.put_(torch.tensor([1], device=DEVICE), torch.ones(2, device=DEVICE))
    x.put_(torch.tensor([3], device=DEVICE), torch.ones(1, device=DEVICE))
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        torch.accelerator.synchronize(DEVICE)


def test_gradients_of_put() -> None:
    def gradients(x: torch.Tensor, s: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, s = x.detach().requires_grad_(), s.detach().requires_grad_()
        result = x.put(i, s) * x.detach() + x.put(i, s, accumulate=True)
        return torch.autograd.grad((result * result).sum(), (x, s))

    agrees(gradients, numbers((3, 4)), numbers((2, 2)), torch.tensor([[0, 5], [11, 7]]))


# index_reduce


@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32], ids=str)
def test_index_reduce(reduce: str, include_self: bool, dtype: torch.dtype) -> None:
    x, index = numbers((5, 6), dtype), torch.tensor([3, 0, 3, 1, 0, 3, 3])
    options = {"include_self": include_self}
    for dim, source in ((0, numbers((7, 6), dtype)), (1, numbers((5, 7), dtype)), (-1, numbers((7, 5), dtype).t())):
        agrees(lambda x, i, s, dim=dim: x.index_reduce(dim, i, s, reduce, **options), x, index, source)
        agrees(lambda x, i, s, dim=dim: x.index_reduce(dim, i.int(), s, reduce, **options), x, index, source)
        agrees(lambda x, i, s, dim=dim: x.index_reduce_(dim, i, s, reduce, **options), x, index, source)
    agrees(lambda x, i, s: x.index_reduce(0, i[:0], s[:0], reduce, **options), x, index, numbers((7, 6), dtype))


# The gradient of unfold


@pytest.mark.parametrize(("dim", "size", "step"), [(0, 3, 1), (1, 2, 3), (-1, 3, 2), (1, 7, 1), (0, 1, 1), (1, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_unfold_backward(dtype: torch.dtype, dim: int, size: int, step: int) -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        result = x.unfold(dim, size, step)
        weights = torch.arange(result.numel(), device=x.device).view(result.shape).remainder(7)
        return torch.autograd.grad((result * weights).sum().abs(), x)[0]

    agrees(gradient, numbers((5, 7, 4), dtype))
    agrees(gradient, numbers((5, 7, 4), dtype).transpose(0, 1).contiguous().transpose(0, 1))


def test_unfold_backward_of_no_dimensions() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.unfold(0, 1, 1).sum() * 3, x)[0]

    agrees(gradient, torch.tensor(2.0))


# Patches of images

PATCHES = [
    {"kernel_size": 3},
    {"kernel_size": (2, 3), "dilation": (2, 1), "padding": (1, 2), "stride": (2, 1)},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": (4, 5), "padding": 3, "stride": 4},
]


@pytest.mark.parametrize("options", PATCHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64], ids=str)
def test_patches(options: dict[str, int], dtype: torch.dtype) -> None:
    for shape in ((2, 3, 8, 9), (3, 8, 9)):
        x = numbers(shape, dtype)
        agrees(lambda x: F.unfold(x, **options), x)
        agrees(lambda x: F.unfold(x.transpose(-1, -2), **options), x)
        tolerances = {"rtol": 4e-3, "atol": 4e-2} if dtype == torch.float16 else {}
        agrees(lambda x: F.fold(F.unfold(x, **options), (8, 9), **options), x, **tolerances)
        agrees(lambda y: F.fold(y.mT.contiguous().mT, (8, 9), **options), F.unfold(x, **options), **tolerances)
    agrees(lambda x: F.unfold(x, **options), numbers((0, 3, 8, 9), dtype))
    agrees(lambda x: F.unfold(x, **options), numbers((2, 3, 8, 9)) > 0)


def test_gradients_of_patches() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        columns = F.unfold(x, 3, padding=1, stride=2)
        folded = F.fold(columns.square(), (8, 9), 3, padding=1, stride=2)
        return torch.autograd.grad((folded * folded.detach()).sum() + columns.sum(), x)[0]

    agrees(gradient, numbers((2, 3, 8, 9)))


def test_patches_refuse() -> None:
    x = torch.zeros(2, 3, 4, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match="array of sliding blocks"):
        F.unfold(x, 9)
    with pytest.raises(RuntimeError, match="divisible by the product of kernel_size"):
        F.fold(torch.zeros(1, 7, 9, device=DEVICE), (4, 4), 2)


# isin


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("invert", [False, True])
def test_isin(dtype: torch.dtype, invert: bool) -> None:
    x, few, many = numbers((7, 9), dtype), numbers((5,), dtype), numbers((20, 30), dtype)
    for tests in (few, many, few[:0], few[0]):
        agrees(lambda x, t: torch.isin(x, t, invert=invert), x, tests)
        agrees(lambda x, t: torch.isin(x.t()[::2], t, invert=invert), x, tests)
        agrees(lambda x, t: torch.isin(x[0, 0], t, invert=invert), x, tests)
        agrees(lambda x, t: torch.isin(3, t, invert=invert), x, tests)
    agrees(lambda x: torch.isin(x, 3, invert=invert), x)
    unique = torch.arange(700).to(dtype).unique()
    agrees(lambda x, t: torch.isin(x, t, assume_unique=True, invert=invert), unique[::2].clone(), unique[:300])


def test_isin_of_nan() -> None:
    nan = float("nan")
    x = torch.tensor([nan, 1.0, 2.0, -0.0])
    for tests in (torch.tensor([nan, 2.0, 0.0]), torch.tensor([nan, 2.0, 0.0] * 100)):
        agrees(lambda x, t: torch.isin(x, t), x, tests)


def test_isin_of_two_dtypes() -> None:
    agrees(lambda x, t: torch.isin(x, t), torch.arange(9), torch.tensor([1.0, 2.5, 3.0]))
    agrees(lambda x, t: torch.isin(x, t), torch.arange(9.0), torch.tensor([1, 300]).repeat(300))


def test_isin_refuses_bools() -> None:
    for size in (0, 3):
        bools = torch.zeros(size, dtype=torch.bool)
        for elements in (2, True, 0.5, torch.ones(2), torch.ones(2, dtype=torch.int64), bools):
            refused_alike(torch.isin, elements, bools)
        refused_alike(torch.isin, bools, torch.ones(2, dtype=torch.int64))


# randperm


@pytest.mark.parametrize("n", [0, 1, 2, 7, 100, 5000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_every_permutation_has_each_number_once(n: int, dtype: torch.dtype) -> None:
    for _ in range(3):
        found = torch.randperm(n, dtype=dtype, device=DEVICE)
        assert found.dtype == dtype
        assert torch.equal(found.cpu().sort()[0], torch.arange(n).to(dtype))


def test_permutations_follow_the_seed() -> None:
    def drawn(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [torch.randperm(1000, device=DEVICE).cpu() for _ in range(3)]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
    generator = torch.Generator(DEVICE).manual_seed(4)
    a = torch.randperm(50, generator=generator, device=DEVICE)
    assert torch.equal(a, torch.randperm(50, generator=generator.manual_seed(4), device=DEVICE))


def test_permutations_are_equally_likely() -> None:
    torch.manual_seed(0)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(1200):
        found = tuple(torch.randperm(3, device=DEVICE).tolist())
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 6
    # 200 of each are expected, with a standard deviation of 13.
    assert all(130 < count < 270 for count in counts.values()), counts


def test_permutations_refuse() -> None:
    with pytest.raises(RuntimeError, match="negative"):
        torch.randperm(-1, device=DEVICE)
    with pytest.raises(RuntimeError, match="n cannot be greater than 2049"):
        torch.randperm(40000, dtype=torch.float16, device=DEVICE)


# bincount


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("weights", [None, torch.float32, torch.float64, torch.int64, torch.float16], ids=str)
@pytest.mark.parametrize("minlength", [0, 3, 200])
def test_bincount(dtype: torch.dtype, weights: torch.dtype | None, minlength: int) -> None:
    torch.manual_seed(1)
    x = torch.randint(100, (500,)).to(dtype)
    given = [] if weights is None else [numbers((500,)).round().to(weights)]
    agrees(lambda x, *w: torch.bincount(x, *w, minlength=minlength), x, *given)
    agrees(lambda x, *w: torch.bincount(x[:0], *(one[:0] for one in w), minlength=minlength), x, *given)
    agrees(lambda x, *w: torch.bincount(x[::2], *(one[::2] for one in w), minlength=minlength), x, *given)


def test_bincount_refuses() -> None:
    for x in (torch.tensor([1, -1]), torch.ones(2, 2, dtype=torch.int64), torch.ones(2)):
        with pytest.raises(RuntimeError) as expected:
            torch.bincount(x)
        with pytest.raises(RuntimeError) as found:
            torch.bincount(x.to(DEVICE))
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


# embedding's gradient


@pytest.mark.parametrize("by_frequency", [False, True])
def test_embedding_of_a_column_of_indices(by_frequency: bool) -> None:
    def gradient(w: torch.Tensor, x: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        w = w.detach().requires_grad_()
        found = F.embedding(x[:, 0], w, padding_idx=2, scale_grad_by_freq=by_frequency)
        return torch.autograd.grad(found, w, cotangent)[0]

    agrees(gradient, numbers((5, 3)), torch.tensor([[1, 4], [0, 3], [1, 2], [2, 0]]), numbers((3, 4)).t())
