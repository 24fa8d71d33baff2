"""The random generators of bp devices. What sets one before any device is used takes effect at the first use."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_backplane import _C
from torch_backplane.accelerator.devices import _get_device, current_device, device_count
from torch_backplane.accelerator.initialization import _lazy_call, _lazy_init, is_initialized

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def _generators() -> tuple[torch.Generator, ...]:
    """The default generators of all devices; none before the first use of a device."""
    return tuple(_C.default_generator(index) for index in range(device_count())) if is_initialized() else ()


def _get_generator(device: torch.device) -> torch.Generator:
    return _C.default_generator(current_device() if device.index is None else device.index)


def get_rng_state(device: int | str | torch.device = "bp") -> torch.Tensor:
    """The state of the device's generator: 16 bytes, its seed and its offset, both 64-bit little-endian."""
    _lazy_init()
    return _get_generator(_get_device(device)).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices' generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device: int | str | torch.device = "bp") -> None:
    """Set the state of the device's generator to one that `get_rng_state` gave."""
    if not is_initialized():
        # It is read later, when the caller may have changed it.
        with torch._C._DisableFuncTorch():
            new_state = new_state.clone(memory_format=torch.contiguous_format)
    place = _get_device(device)
    _lazy_call(lambda: _get_generator(place).set_state(new_state))


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of all devices' generators."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    seed = int(seed)
    _lazy_call(lambda: _C.default_generator(current_device()).manual_seed(seed), seed=True)


def manual_seed_all(seed: int) -> None:
    """Seed every device's generator; torch.manual_seed calls it."""
    seed = int(seed)

    def seed_generators() -> None:
        for index in range(device_count()):
            _C.default_generator(index).manual_seed(seed)

    _lazy_call(seed_generators, seed_all=True)


def seed() -> None:
    """Seed the current device's generator with a random number."""
    _lazy_call(lambda: _C.default_generator(current_device()).seed(), seed=True)


def seed_all() -> None:
    """Seed every device's generator with one random number, the same for all."""

    def seed_generators() -> None:
        number = _C.default_generator(0).seed()
        for index in range(1, device_count()):
            _C.default_generator(index).manual_seed(number)

    _lazy_call(seed_generators, seed_all=True)


def initial_seed() -> int:
    """The seed of the current device's generator."""
    _lazy_init()
    return _C.default_generator(current_device()).initial_seed()


def _get_rng_state_offset(device: int | str | torch.device = "bp") -> int:
    """How many 32-bit numbers the device's generator has given since it was seeded."""
    _lazy_init()
    return _get_generator(_get_device(device)).get_offset()


def _set_rng_state_offset(offset: int, device: int | str | torch.device = "bp") -> None:
    """Set what `_get_rng_state_offset` gives; a multiple of 4."""
    place = _get_device(device)
    _lazy_call(lambda: _get_generator(place).set_offset(offset))
