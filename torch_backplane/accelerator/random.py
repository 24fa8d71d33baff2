"""Random number generators of bp devices. Seeds and states set before the first use of a device take effect then."""

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
    """The default generators of all devices; empty before torch.bp is initialized."""
    return tuple(_C.default_generator(index) for index in range(device_count())) if is_initialized() else ()


def _get_generator(device: torch.device) -> torch.Generator:
    return _C.default_generator(current_device() if device.index is None else device.index)


def get_rng_state(device: int | str | torch.device = "bp") -> torch.Tensor:
    """Return the state of a device's generator as a ByteTensor.

    The state is 16 bytes: the seed and the offset of a Philox generator, both 64-bit little-endian.

    Args:
        device: the device; the current one by default.
    """
    _lazy_init()
    return _get_generator(_get_device(device)).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of the generators of all devices."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device: int | str | torch.device = "bp") -> None:
    """Set the state of a device's generator.

    Args:
        new_state: a state that `get_rng_state` returned.
        device: the device; the current one by default.
    """
    if not is_initialized():
        # The call is deferred, and the caller may change the tensor meanwhile.
        with torch._C._DisableFuncTorch():
            new_state = new_state.clone(memory_format=torch.contiguous_format)
    place = _get_device(device)
    _lazy_call(lambda: _get_generator(place).set_state(new_state))


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of the generators of all devices.

    Args:
        new_states: a state for each device.
    """
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Set the seed of the current device's generator.

    Args:
        seed: the seed, an integer.
    """
    seed = int(seed)
    _lazy_call(lambda: _C.default_generator(current_device()).manual_seed(seed), seed=True)


def manual_seed_all(seed: int) -> None:
    """Set the seed of the generators of all devices. torch.manual_seed calls this function.

    Args:
        seed: the seed, an integer.
    """
    seed = int(seed)

    def seed_generators() -> None:
        for index in range(device_count()):
            _C.default_generator(index).manual_seed(seed)

    _lazy_call(seed_generators, seed_all=True)


def seed() -> None:
    """Set the seed of the current device's generator to a random number."""
    _lazy_call(lambda: _C.default_generator(current_device()).seed(), seed=True)


def seed_all() -> None:
    """Set the seed of the generators of all devices to the same random number."""

    def seed_generators() -> None:
        number = _C.default_generator(0).seed()
        for index in range(1, device_count()):
            _C.default_generator(index).manual_seed(number)

    _lazy_call(seed_generators, seed_all=True)


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    _lazy_init()
    return _C.default_generator(current_device()).initial_seed()


def _get_rng_state_offset(device: int | str | torch.device = "bp") -> int:
    """Return the number of 32-bit random numbers that a device's generator has consumed since it was seeded."""
    _lazy_init()
    return _get_generator(_get_device(device)).get_offset()


def _set_rng_state_offset(offset: int, device: int | str | torch.device = "bp") -> None:
    """Set the offset of a device's generator, which must be a multiple of 4."""
    place = _get_device(device)
    _lazy_call(lambda: _get_generator(place).set_offset(offset))
