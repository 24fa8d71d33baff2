"""`torch.bp.tunable`: what torch.cuda.tunable is for CUDA devices, for every operator that has several candidates.

While it is enabled, the first call of such an operator with a dtype, sizes and layout times all candidates that take it
and keeps the quickest, in a file too, from which later processes read it. Products, convolutions with their gradients,
attention, recurrent layers and Fourier transforms have candidates: the host's libraries, on devices
whose memory it sees, and generated kernels. What `torch.backends.bp` prefers is not tuned.

The environment variables are torch.cuda's, and hold whatever a program sets: PYTORCH_TUNABLEOP_ENABLED, _TUNING,
_RECORD_UNTUNED, _FILENAME, _UNTUNED_FILENAME, _MAX_TUNING_DURATION_MS, _MAX_TUNING_ITERATIONS, _NUMERICAL_CHECK,
_ROTATING_BUFFER_SIZE, _VERBOSE.
"""

from __future__ import annotations

import glob
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from torch_backplane.accelerator.devices import current_device, device_count
from torch_backplane.drivers import device as driver_device
from torch_backplane.tuning.choosing import PREFIX, context, validators
from torch_backplane.tuning.files import read_problems, read_results, write_results
from torch_backplane.tuning.problems import Problem
from torch_backplane.tuning.trials import TRIALS, Operands

__all__ = [
    "enable",
    "get_filename",
    "get_max_tuning_duration",
    "get_max_tuning_iterations",
    "get_results",
    "get_rotating_buffer_size",
    "get_validators",
    "is_enabled",
    "mgpu_tune_gemm_in_file",
    "read_file",
    "record_untuned_enable",
    "record_untuned_is_enabled",
    "set_filename",
    "set_max_tuning_duration",
    "set_max_tuning_iterations",
    "set_numerical_check_tolerances",
    "set_rotating_buffer_size",
    "tune_gemm_in_file",
    "tuning_enable",
    "tuning_is_enabled",
]


def enable(val: bool = True) -> None:
    """Whether candidates are chosen by results at all."""
    context.set("enabled", bool(val))


def is_enabled() -> bool:
    return bool(context["enabled"])


def tuning_enable(val: bool = True) -> None:
    """Whether a call without a result is tuned; True unless set otherwise."""
    context.set("tuning", bool(val))


def tuning_is_enabled() -> bool:
    return bool(context["tuning"])


def record_untuned_enable(val: bool = True) -> None:
    """Whether calls without a result are written to a file, from which `tune_gemm_in_file` tunes them. That is where
    tuning is not enabled.
    """
    context.set("record_untuned", bool(val))


def record_untuned_is_enabled() -> bool:
    return bool(context["record_untuned"])


def set_max_tuning_duration(duration: int) -> None:
    """The most milliseconds that a candidate is timed for.

    Raises:
        ValueError: it is negative.
    """
    context.set("max_duration", _not_negative("duration", duration))


def get_max_tuning_duration() -> int:
    return int(context["max_duration"])


def set_max_tuning_iterations(iterations: int) -> None:
    """The most times that a candidate is called; one at least.

    Raises:
        ValueError: it is negative.
    """
    context.set("max_iterations", _not_negative("iterations", iterations))


def get_max_tuning_iterations() -> int:
    return int(context["max_iterations"])


def set_filename(filename: str, insert_device_ordinal: bool = False) -> None:
    """The file of results, and whether the device's number comes at the end of its name. A "%d" in it is the number."""
    if not isinstance(filename, (str, os.PathLike)) or not os.fspath(filename):
        raise ValueError(f"filename is the name of a file, and got {filename!r}")
    context.set_filename(os.fspath(filename), bool(insert_device_ordinal))


def get_filename() -> str:
    """That of the current device."""
    return str(context.path(current_device()))


def get_results() -> tuple[tuple[str, str, str, float], ...]:
    """Of the current device: operator, parameters, candidate and milliseconds."""
    found = context.results(current_device())
    return tuple((one.name, one.parameters, *result) for one, result in found.items())


def get_validators() -> tuple[tuple[str, str], ...]:
    """What results of the current device hold for: the names and values that a file has to have."""
    return tuple(validators(current_device()).items())


def read_file(filename: str | None = None) -> bool:
    """Takes the results of a file for the current device, by default `get_filename()`.

    Returns:
        Whether it did. Of a file with a line that is damaged, or is for another device or version, nothing is taken,
        and a warning names the line.
    """
    return context.read(Path(filename or get_filename()), current_device())


def set_rotating_buffer_size(buffer_size: int) -> None:
    """The MiB of operands that a trial uses by turns, so that they are in no cache; below 0, as
    it is unless set otherwise: as many as the device's cache has; 0: the same operands every time.
    """
    context.set("rotating", int(buffer_size))


def get_rotating_buffer_size() -> int:
    """In KiB."""
    size = int(context["rotating"])
    target = driver_device(current_device()).properties.target
    return size << 10 if size >= 0 else target.cache_bytes >> 10 if target is not None else 0


def set_numerical_check_tolerances(enable: bool, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    """Whether candidates are left out whose results differ from those of the first one by more."""
    context.set("tolerances", (float(atol), float(rtol)) if enable else None)


def tune_gemm_in_file(filename: str) -> None:
    """Tunes for the current device what a file of untuned calls has, or one of results, of every operator.

    Raises:
        AssertionError: tuning is not enabled.
        ValueError: a line is damaged; nothing was tuned then.
        OSError: the file cannot be read.
    """
    _check_enabled()
    tune_all(read_problems(Path(filename)), current_device())


def tune_all(
    problems: Sequence[Problem], device: int, progress: Callable[[Problem], None] = lambda problem: None
) -> None:
    """Tunes those without a result for a device; each is passed to `progress` before.

    Raises:
        ValueError: one is of no operator that there is, or has other parameters than it.
    """
    torch.get_device_module("bp").init()  # which declares operators, where a device runs kernels
    unknown = next((one for one in problems if one.operator not in TRIALS), None)
    if unknown is not None:
        known = ", ".join(sorted(TRIALS)) or "none, as no device runs kernels"
        raise ValueError(f"there is no operator {unknown.name}: known are {known}")
    for one in problems:
        progress(one)
        if one not in context.results(device):
            with torch.get_device_module("bp").device(device), torch.no_grad():
                TRIALS[one.operator](
                    Operands(one, torch.device("bp", device))
                )()  # a call like any other, which is tuned


def mgpu_tune_gemm_in_file(filename_pattern: str, num_gpus: int) -> None:
    """Tunes what files of untuned calls have, on several devices at once, each in a process of its own, and writes all
    results into a file for each device whose name ends in `_full` and its number.

    Args:
        filename_pattern: such as "tunableop_untuned?.csv".
        num_gpus: 1 to the number of devices. They must be alike, as results of one are taken for all.

    Raises:
        AssertionError: tuning is not enabled, or there are not so many devices.
        ValueError: a line is damaged, or the devices are not alike.
    """
    _check_enabled()
    count = device_count()
    if not 1 <= num_gpus <= count:
        raise AssertionError(f"num_gpus must be between 1 and {count}, got {num_gpus}")
    known = validators(0)
    for device in range(1, num_gpus):
        if validators(device) != known:
            raise ValueError(f"bp:{device} is another device than bp:0: {validators(device)} and not {known}")
    files = sorted(glob.glob(filename_pattern))
    if not files:
        raise ValueError(f"no file is named {filename_pattern}")
    problems = list(dict.fromkeys(one for file in files for one in read_problems(Path(file))))
    settings = {name: context[name] for name in ("max_duration", "max_iterations", "rotating", "tolerances")}
    paths = [context.path(device) for device in range(num_gpus)]
    with ProcessPoolExecutor(num_gpus, mp_context=multiprocessing.get_context("spawn")) as pool:
        done = [
            pool.submit(_tune_in_process, problems[device::num_gpus], device, paths[device], settings)
            for device in range(num_gpus)
        ]
        for one in done:
            one.result()
    found = {}
    for path in dict.fromkeys(paths):
        if path.exists():
            found.update(read_results(path, known))
    base = context.path(0)
    stem = base.stem.removesuffix("0") if context.inserts_ordinal else base.stem
    for device in range(num_gpus):
        write_results(base.with_name(f"{stem}_full{device}{base.suffix}"), known, found)


def _tune_in_process(problems: list[Problem], device: int, path: Path, settings: dict[str, object]) -> None:
    for name in (PREFIX + "FILENAME", PREFIX + "ENABLED", PREFIX + "TUNING"):
        os.environ.pop(name, None)
    for name, value in settings.items():
        context.set(name, value)
    context.set_filename(str(path), False)
    enable()
    tuning_enable()
    tune_all(problems, device)


def _check_enabled() -> None:
    if not is_enabled():
        raise AssertionError("TunableOp is not enabled: torch.bp.tunable.enable()")
    if not tuning_is_enabled():
        raise AssertionError("Tuning is not enabled: torch.bp.tunable.tuning_enable()")


def _not_negative(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is a whole number that is not negative, and got {value!r}")
    return value
