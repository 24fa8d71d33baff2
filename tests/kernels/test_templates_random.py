"""Tests random fills: known vectors of Philox, moments, bounds, and that the first values do not depend on the size."""

from __future__ import annotations

import math

import pytest
import torch
from template_runners import check_cuda, dialect, processors, run

from torch_backplane.kernels.templates.random import DISTRIBUTIONS, fill, fill_integers, shuffle_equal

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def philox(counter, key):
    """Philox4x32-10 in Python."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_reference_philox_matches_published_vectors():
    # Known answers from Random123 (kat_vectors).
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = [0xFFFFFFFF] * 4
    assert philox(ones, ones[:2]) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@processors
def test_integer_fill_matches_philox(processor):
    out, seed, offset = torch.empty(10, dtype=torch.int64), 0x123456789ABCDEF, 0x900000004
    run(fill_integers(dialect(processor), out, 0, 2**32, (seed, offset)))
    key, call = [seed & 0xFFFFFFFF, seed >> 32], [offset // 4 & 0xFFFFFFFF, offset // 4 >> 32]
    expected = [word for block in range(3) for word in philox([block, 0, *call], key)]
    assert out.tolist() == expected[:10]
    run(fill_integers(dialect(processor), out, -(2**63), 2**64, (seed, offset)))
    words = expected + philox([3, 0, *call], key) + philox([4, 0, *call], key)
    assert out.tolist() == [(words[2 * i] << 32 | words[2 * i + 1]) - 2**63 for i in range(10)]


@processors
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_moments_and_bounds(processor, dtype):
    target, count = dialect(processor), 100_000

    def drawn(name, *arguments):
        out = torch.empty(count, dtype=dtype)
        run(fill(target, out, name, (42, 8), arguments))
        short = torch.empty(37, dtype=dtype)
        run(fill(target, short, name, (42, 8), arguments))
        assert torch.equal(out[:37], short)
        return out.double()

    uniform = drawn("uniform", -1, 3)
    assert -1 <= uniform.min() < -0.99
    assert 2.98 < uniform.max() < 3 or dtype.itemsize == 2
    assert abs(uniform.mean() - 1) < 0.02
    assert abs(uniform.var() - 16 / 12) < 0.02
    normal = drawn("normal", 2, 3)
    assert abs(normal.mean() - 2) < 0.05
    assert abs(normal.std() - 3) < 0.05
    centred = (normal - 2) / 3
    assert abs((centred**3).mean()) < 0.05
    assert abs((centred**4).mean() - 3) < 0.1
    assert abs((centred[::2] * centred[1::2]).mean()) < 0.02
    assert abs(drawn("exponential", 2).mean() - 0.5) < 0.01
    assert abs(drawn("bernoulli", 0.3).mean() - 0.3) < 0.01
    assert abs(drawn("geometric", 0.25).mean() - 4) < 0.1
    assert abs(drawn("cauchy", 1, 2).median() - 1) < 0.05
    assert abs(drawn("log_normal", 0, 0.5).log().std() - 0.5) < 0.01


@processors
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32], ids=str)
def test_integers_are_uniform(processor, dtype):
    out = torch.empty(60_000, dtype=dtype)
    run(fill_integers(dialect(processor), out, 3, 6, (1, 4)))
    counts = out.long().bincount(minlength=9)
    assert not counts[:3].any()
    assert counts.shape == (9,)
    assert ((counts[3:] - 10_000).abs() < 5 * math.sqrt(10_000)).all()


@processors
def test_bernoulli_with_a_probability_per_element(processor):
    chance, out = torch.tensor([0.0, 1.0, 0.5]).repeat(1000), torch.empty(3000, dtype=torch.bool)
    run(fill(dialect(processor), out, "bernoulli_each", (5, 0), chance=chance))
    kept = out.view(-1, 3).sum(0)
    assert kept[0] == 0
    assert kept[1] == 1000
    assert 400 < kept[2] < 600


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool], ids=str)
def test_cuda_compiles(dtype):
    out = torch.empty(9, dtype=dtype)
    for name in DISTRIBUTIONS:
        chance = torch.empty(9) if name == "bernoulli_each" else None
        check_cuda(fill, out, name, (1, 0), (1, 1), chance)
    check_cuda(fill_integers, out, 0, 9, (1, 0))
    check_cuda(fill_integers, out, 0, 2**40, (1, 0))
    if dtype == torch.int64:
        check_cuda(shuffle_equal, out, out.int(), (1, 0))


@processors
@pytest.mark.parametrize("long", [2, 3, 4])
def test_equal_keys_are_shuffled_uniformly(processor, long):
    """All orders are equally likely. Elements with unique keys do not move."""
    count = 6000
    keys = torch.arange(count, dtype=torch.int32).repeat_interleave(long)
    out = torch.arange(count * long)
    run(shuffle_equal(dialect(processor), out, keys, (42, 8)))
    places = out.view(count, long) - torch.arange(0, count * long, long)[:, None]
    assert torch.equal(places.sort(1).values, torch.arange(long).expand(count, long))
    times = places.unique(dim=0, return_counts=True)[1].double()
    assert len(times) == math.factorial(long)
    expected = count / len(times)
    assert ((times - expected).square() / expected).sum() < 3 * len(times) + 12  # chi-squared, p below 1e-4
    alone = torch.arange(500)
    run(shuffle_equal(dialect(processor), alone, torch.arange(500, dtype=torch.int32), (42, 8)))
    assert torch.equal(alone, torch.arange(500))
