"""Random operators on bp: reproducible, one sequence per device, independent of the CPU's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

DRAWS: dict[str, Callable[[torch.Generator | None], Tensor]] = {
    "rand": lambda g: torch.rand(20, device="bp", generator=g),
    "randn": lambda g: torch.randn(20, device="bp", generator=g),
    "randint": lambda g: torch.randint(1000, (20,), device="bp", generator=g),
    "randperm": lambda g: torch.randperm(20, device="bp", generator=g),
    "normal": lambda g: torch.normal(0.0, 1.0, (20,), device="bp", generator=g),
    "normal of tensors": lambda g: torch.normal(torch.zeros(20, device="bp"), torch.ones(20, device="bp"), generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(50, device="bp"), 20, generator=g),
    "multinomial replaced": lambda g: torch.multinomial(torch.ones(50, device="bp"), 20, True, generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((40,), 0.5, device="bp"), generator=g),
    "poisson": lambda g: torch.poisson(torch.full((20,), 9.0, device="bp"), generator=g),
    "uniform_": lambda g: torch.empty(20, device="bp").uniform_(-1, 1, generator=g),
    "normal_": lambda g: torch.empty(20, device="bp").normal_(generator=g),
    "random_": lambda g: torch.empty(20, device="bp").random_(generator=g),
    "exponential_": lambda g: torch.empty(20, device="bp").exponential_(generator=g),
    "cauchy_": lambda g: torch.empty(20, device="bp").cauchy_(generator=g),
    "geometric_": lambda g: torch.empty(20, device="bp").geometric_(0.1, generator=g),
    "log_normal_": lambda g: torch.empty(20, device="bp").log_normal_(generator=g),
    "bernoulli_": lambda g: torch.empty(40, device="bp").bernoulli_(0.5, generator=g),
    "rrelu": lambda g: torch.ops.aten.rrelu(torch.full((20,), -1.0, device="bp"), 0.1, 0.9, True, g),
}
WITHOUT_GENERATOR: dict[str, Callable[[], Tensor]] = {
    "rand_like": lambda: torch.rand_like(torch.empty(20, device="bp")),
    "randn_like": lambda: torch.randn_like(torch.empty(20, device="bp")),
    "dropout": lambda: nn.functional.dropout(torch.ones(50, device="bp")),
    "dropout2d": lambda: nn.functional.dropout2d(torch.ones(2, 30, 2, 2, device="bp")),
    "alpha_dropout": lambda: nn.functional.alpha_dropout(torch.ones(50, device="bp"), training=True),
    "gumbel_softmax": lambda: nn.functional.gumbel_softmax(torch.ones(20, device="bp")),
    "fractional_max_pool2d": lambda: nn.functional.fractional_max_pool2d(
        torch.arange(8000.0, device="bp").view(2, 10, 20, 20), 2, output_size=13
    ),
    "gamma": lambda: torch.distributions.Gamma(torch.ones(20, device="bp"), 1.0).sample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(20, device="bp")).sample(),
    "binomial": lambda: torch.distributions.Binomial(100, torch.full((20,), 0.5, device="bp")).sample(),
    "kaiming": lambda: nn.init.kaiming_uniform_(torch.empty(5, 4, device="bp")),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(20, device="bp")),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(4, 4, device="bp")),
    "module": lambda: nn.Linear(4, 4, device="bp").weight.detach(),
    "rnn dropout": lambda: nn.LSTM(4, 4, 2, dropout=0.5, device="bp")(torch.ones(3, 2, 4, device="bp"))[0].detach(),
    "attention dropout": lambda: nn.functional.scaled_dot_product_attention(
        *(torch.ones(1, 2, 8, 4, device="bp") for _ in range(3)), dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", [*DRAWS, *WITHOUT_GENERATOR])
def test_manual_seed_makes_results_reproducible(name: str) -> None:
    draw = WITHOUT_GENERATOR.get(name) or (lambda: DRAWS[name](None))
    torch.manual_seed(7)
    cpu_state = torch.get_rng_state()
    first, second = draw(), draw()
    assert torch.equal(torch.get_rng_state(), cpu_state), "the CPU's generator was used"
    torch.manual_seed(7)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    assert not torch.equal(first, second)
    torch.manual_seed(8)
    assert not torch.equal(draw(), first)
    assert first.device.type == "bp"


@pytest.mark.parametrize("name", DRAWS)
def test_an_explicit_generator(name: str) -> None:
    state = torch.bp.get_rng_state()
    generator = torch.Generator(device="bp").manual_seed(5)
    first, second = DRAWS[name](generator), DRAWS[name](generator)
    assert not torch.equal(first, second)
    assert torch.equal(DRAWS[name](generator.manual_seed(5)), first)
    assert torch.equal(torch.bp.get_rng_state(), state), "the default generator was used"


@pytest.mark.parametrize("name", DRAWS)
def test_a_cpu_generator_raises_pytorchs_error(name: str) -> None:
    with pytest.raises(RuntimeError, match="Expected a 'bp' device type for generator but found 'cpu'"):
        DRAWS[name](torch.Generator())


def test_a_bp_generator_on_the_cpu_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'bp'"):
        torch.rand(3, generator=torch.Generator(device="bp"))
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'bp'"):
        torch.ones(()).bernoulli_(0.5, generator=torch.Generator(device="bp"))


def test_generators() -> None:
    generator = torch.Generator(device="bp:1")
    assert generator.device == torch.device("bp:1")
    generator.manual_seed(3)
    assert generator.initial_seed() == 3
    first = torch.rand(4, device="bp:1", generator=generator)
    state = generator.get_state()
    second = torch.rand(4, device="bp:1", generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.rand(4, device="bp:1", generator=generator), second)
    clone = generator.clone_state()
    assert torch.equal(torch.rand(4, device="bp:1", generator=clone), torch.rand(4, device="bp:1", generator=generator))
    assert generator.seed() != 3
    assert not torch.equal(first, second)
    with pytest.raises(RuntimeError, match=r"RNG state is wrong size|wrong size"):
        generator.set_state(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(TypeError, match="ByteTensor"):
        generator.set_state(torch.zeros(16))


def test_manual_seed_seeds_every_device_alike() -> None:
    torch.manual_seed(11)
    drawn = [torch.rand(4, device=f"bp:{index}").cpu() for index in range(4)]
    assert all(torch.equal(values, drawn[0]) for values in drawn)


def test_the_cpu_sequence_does_not_depend_on_bp() -> None:
    torch.manual_seed(1)
    alone = torch.rand(4)
    torch.manual_seed(1)
    torch.rand(100, device="bp")
    torch.bp.manual_seed_all(99)
    assert torch.equal(torch.rand(4), alone)


def test_the_bp_sequence_does_not_depend_on_the_cpu() -> None:
    torch.manual_seed(1)
    alone = torch.rand(4, device="bp")
    torch.manual_seed(1)
    torch.rand(100)
    assert torch.equal(torch.rand(4, device="bp"), alone)


def test_fork_rng() -> None:
    torch.manual_seed(1)
    state = torch.bp.get_rng_state(1)
    with torch.random.fork_rng(devices=[0, 1], device_type="bp"):
        torch.manual_seed(2)
        torch.rand(10, device="bp:1")
    assert torch.equal(torch.bp.get_rng_state(1), state)
    with torch.random.fork_rng(device_type="bp", devices=[]):
        torch.rand(10, device="bp:1")
    assert not torch.equal(torch.bp.get_rng_state(1), state)


def test_random_numbers_have_the_expected_distribution() -> None:
    torch.manual_seed(0)
    count = 20_000
    uniform, normal = torch.rand(count, device="bp"), torch.randn(count, device="bp")
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.02)
    assert uniform.var().item() == pytest.approx(1 / 12, abs=0.005)
    assert normal.mean().item() == pytest.approx(0, abs=0.04)
    assert normal.std().item() == pytest.approx(1, abs=0.03)
    kept = nn.functional.dropout(torch.ones(count, device="bp"), 0.3) != 0
    assert kept.float().mean().item() == pytest.approx(0.7, abs=0.02)
    assert torch.randperm(100, device="bp").sort().values.tolist() == list(range(100))
    weights = torch.tensor([1.0, 0.0, 3.0], device="bp")
    drawn = torch.multinomial(weights, count, replacement=True).bincount(minlength=3) / count
    assert drawn.tolist() == pytest.approx([0.25, 0, 0.75], abs=0.02)
    one_by_one = torch.stack([torch.rand((), device="bp") for _ in range(2000)])
    assert one_by_one.mean().item() == pytest.approx(0.5, abs=0.03)
    assert len(set(one_by_one.tolist())) > 1990


def test_64_bit_and_negative_seeds() -> None:
    first = torch.rand(4, device="bp", generator=torch.Generator("bp").manual_seed(1))
    assert not torch.equal(
        torch.rand(4, device="bp", generator=torch.Generator("bp").manual_seed(1 + (1 << 40))), first
    )
    torch.manual_seed(-1)
    assert torch.bp.initial_seed() == 2**64 - 1
