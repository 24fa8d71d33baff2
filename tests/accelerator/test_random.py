"""Generators of torch.bp: seeds, states, and calls that are deferred until the first use of a device."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import torch

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def draw(device: str = "bp") -> list[float]:
    return torch.rand(4, device=device).tolist()


def test_torch_manual_seed_seeds_every_device() -> None:
    torch.manual_seed(11)
    first = [draw(f"bp:{index}") for index in range(torch.bp.device_count())]
    torch.manual_seed(11)
    assert [draw(f"bp:{index}") for index in range(torch.bp.device_count())] == first
    torch.manual_seed(12)
    assert draw() != first[0]


def test_manual_seed_seeds_the_current_device_only() -> None:
    torch.bp.manual_seed_all(1)
    with torch.bp.device(1):
        torch.bp.manual_seed(2)
        assert torch.bp.initial_seed() == 2
    assert torch.bp.initial_seed() == 1
    assert [generator.initial_seed() for generator in torch.bp.default_generators[:3]] == [1, 2, 1]


def test_seed_is_random_and_seed_all_seeds_all_devices_alike() -> None:
    torch.bp.seed()
    before = torch.bp.initial_seed()
    torch.bp.seed()
    assert torch.bp.initial_seed() != before
    torch.bp.seed_all()
    assert len({generator.initial_seed() for generator in torch.bp.default_generators}) == 1


def test_states_are_saved_and_restored() -> None:
    torch.bp.manual_seed_all(5)
    draw()
    state = torch.bp.get_rng_state()
    assert (state.dtype, state.numel(), state.device.type) == (torch.uint8, 16, "cpu")
    expected = draw()
    assert draw() != expected
    torch.bp.set_rng_state(state)
    assert draw() == expected
    for device in (1, "bp:1", torch.device("bp", 1)):
        torch.bp.set_rng_state(state, device)
        assert torch.equal(torch.bp.get_rng_state(device), state)
    states = torch.bp.get_rng_state_all()
    assert len(states) == torch.bp.device_count()
    draws = [draw(f"bp:{index}") for index in range(len(states))]
    torch.bp.set_rng_state_all(states)
    assert [draw(f"bp:{index}") for index in range(len(states))] == draws


def test_an_invalid_state_raises() -> None:
    with pytest.raises(RuntimeError, match="RNG state is wrong size: expected 16 bytes, but got 7"):
        torch.bp.set_rng_state(torch.zeros(7, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"expected a torch.ByteTensor|RNG state must be a torch.ByteTensor"):
        torch.bp.set_rng_state(torch.zeros(16))


def test_offsets_count_the_drawn_numbers() -> None:
    torch.bp.manual_seed(3)
    assert torch.bp._get_rng_state_offset() == 0
    draw()
    offset = torch.bp._get_rng_state_offset()
    assert offset > 0
    assert offset % 4 == 0
    expected = draw()
    torch.bp._set_rng_state_offset(offset)
    assert draw() == expected


def test_fork_rng_restores_every_device() -> None:
    devices = range(torch.bp.device_count())
    torch.manual_seed(4)
    states = torch.bp.get_rng_state_all()
    with torch.random.fork_rng(devices=devices, device_type="bp"):
        for index in devices:
            draw(f"bp:{index}")
    assert all(torch.equal(a, b) for a, b in zip(states, torch.bp.get_rng_state_all(), strict=True))


def test_an_explicit_generator() -> None:
    generator = torch.Generator("bp:1").manual_seed(9)
    assert generator.device == torch.device("bp:1")
    first = torch.rand(4, device="bp:1", generator=generator)
    generator.manual_seed(9)
    assert torch.equal(torch.rand(4, device="bp:1", generator=generator), first)


def test_seeding_does_not_discover_devices(run_forked: Run) -> None:
    done = run_forked(
        "import torch; from torch_backplane import _C\n"
        "torch.manual_seed(1); torch.bp.manual_seed(2); torch.bp.seed_all(); torch.bp.manual_seed_all(3)\n"
        "print(_C.is_discovered(), torch.bp.is_initialized(), torch.bp.default_generators)\n"
        "print(len(torch.bp.initialization._deferred))"
    )
    assert done.stdout == "False False ()\n1\n", done.stderr


def test_seeds_before_the_first_use_take_effect(run_forked: Run) -> None:
    program = "import torch; {}; print(torch.rand(3, device='bp:1').tolist(), torch.bp.is_initialized())"
    late = run_forked(program.format("torch.zeros(1, device='bp'); torch.manual_seed(7)"))
    for put_off in (
        "torch.manual_seed(7)",
        "torch.bp.manual_seed(5); torch.bp.manual_seed_all(7)",
        "torch.manual_seed(7); torch.bp.manual_seed(5)",  # bp:0 only
        "torch.bp.manual_seed_all(7); torch.bp.device_count()",  # counting devices does not initialize them
    ):
        early = run_forked(program.format(put_off))
        assert early.stdout == late.stdout != "", early.stderr


def test_states_before_the_first_use_take_effect(run_forked: Run) -> None:
    torch.bp.manual_seed(21)
    state = torch.bp.get_rng_state()
    expected = draw()
    done = run_forked(
        f"import torch; state = torch.tensor({state.tolist()}, dtype=torch.uint8)\n"
        "torch.bp.set_rng_state(state); state.zero_(); print(torch.bp.is_initialized())\n"
        "print(torch.rand(4, device='bp').tolist())"
    )
    assert done.stdout == f"False\n{expected}\n", done.stderr


def test_errors_of_deferred_calls_name_the_call_site(run_forked: Run) -> None:
    done = run_forked(
        "import torch\n"
        "def careless():\n"
        "    torch.bp.set_rng_state(torch.zeros(3, dtype=torch.uint8))\n"
        "careless()\n"
        "try:\n"
        "    torch.zeros(1, device='bp')\n"
        "except torch.bp.DeferredBpCallError as error:\n"
        "    print('careless' in str(error), 'wrong size' in str(error))\n"
        "print(torch.zeros(1, device='bp').item())"
    )
    assert done.stdout == "True True\n0.0\n", done.stderr


def test_deferred_calls_run_in_order(run_forked: Run) -> None:
    done = run_forked(
        "import torch; seen = []\n"
        "for name in 'abc': torch.bp._lazy_call(lambda name=name: seen.append(name))\n"
        "print(seen); torch.bp.init(); print(seen)\n"
        "torch.bp._lazy_call(lambda: seen.append('now')); print(seen[-1])"
    )
    assert done.stdout == "[]\n['a', 'b', 'c']\nnow\n", done.stderr
