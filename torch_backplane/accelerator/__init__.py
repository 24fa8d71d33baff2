"""`torch.bp`: what torch.cuda is for CUDA devices, for devices of every driver."""

from __future__ import annotations

from torch_backplane import _C


def is_available() -> bool:
    return _C.device_count() > 0


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def _is_in_bad_fork() -> bool:
    return _C.in_bad_fork()


def manual_seed_all(seed: int) -> None:
    for index in range(_C.device_count()):
        _C.default_generator(index).manual_seed(seed)


def get_rng_state(device: int = -1):
    return _C.default_generator(device).get_state()


def set_rng_state(state, device: int = -1) -> None:
    _C.default_generator(device).set_state(state)


def get_amp_supported_dtype() -> list:
    import torch

    return [torch.float16, torch.bfloat16]
