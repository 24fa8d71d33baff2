"""`torch.bp.tunable`: tuning of operators with several candidates, with the API of `torch.cuda.tunable`.

While TunableOp is enabled, the first call of such an operator for a dtype, sizes and layout times all candidates. The
fastest one runs this and later calls, and is written to a file that later processes read. Matrix products,
convolutions and their gradients, attention, recurrent layers and Fourier transforms have candidates: the host's
libraries (if the host can access the device's memory), a driver's libraries, and generated kernels. Families for which
`torch.backends.bp` prefers a library are not tuned.

The environment variables are those of torch.cuda.tunable. They take precedence over the functions of this module:
PYTORCH_TUNABLEOP_ENABLED, _TUNING, _RECORD_UNTUNED, _FILENAME, _UNTUNED_FILENAME, _MAX_TUNING_DURATION_MS,
_MAX_TUNING_ITERATIONS, _NUMERICAL_CHECK, _ROTATING_BUFFER_SIZE, _VERBOSE.
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
    """Enable or disable TunableOp: the choice of candidates by tuning results.

    Args:
        val: whether to enable it. Disabled by default.
    """
    context.set("enabled", bool(val))


def is_enabled() -> bool:
    """Return whether TunableOp is enabled."""
    return bool(context["enabled"])


def tuning_enable(val: bool = True) -> None:
    """Enable or disable tuning of calls without a result. Existing results are used in either case.

    Args:
        val: whether to enable tuning. Enabled by default.
    """
    context.set("tuning", bool(val))


def tuning_is_enabled() -> bool:
    """Return whether calls without a result are tuned."""
    return bool(context["tuning"])


def record_untuned_enable(val: bool = True) -> None:
    """Enable or disable recording of untuned calls in a file, for `tune_gemm_in_file`.

    Calls are recorded only while tuning is disabled.

    Args:
        val: whether to record. Disabled by default.
    """
    context.set("record_untuned", bool(val))


def record_untuned_is_enabled() -> bool:
    """Return whether untuned calls are recorded in a file."""
    return bool(context["record_untuned"])


def set_max_tuning_duration(duration: int) -> None:
    """Set the maximum time for timing a candidate.

    Args:
        duration: milliseconds; 30 by default.

    Raises:
        ValueError: `duration` is negative or not an int.
    """
    context.set("max_duration", _not_negative("duration", duration))


def get_max_tuning_duration() -> int:
    """Return the maximum time for timing a candidate, in milliseconds."""
    return int(context["max_duration"])


def set_max_tuning_iterations(iterations: int) -> None:
    """Set the maximum number of timed calls for a candidate.

    Args:
        iterations: number of calls; 100 by default. Each of the five rounds has at least one call.

    Raises:
        ValueError: `iterations` is negative or not an int.
    """
    context.set("max_iterations", _not_negative("iterations", iterations))


def get_max_tuning_iterations() -> int:
    """Return the maximum number of timed calls for a candidate."""
    return int(context["max_iterations"])


def set_filename(filename: str, insert_device_ordinal: bool = False) -> None:
    """Set the name of the file of results.

    Args:
        filename: the name. A "%d" in it is replaced by the device index. Before the first call of this function it is
            "tunableop_results.csv" with the device index inserted.
        insert_device_ordinal: whether to insert the device index before the suffix of the name.

    Raises:
        ValueError: `filename` is empty or not a path.
    """
    if not isinstance(filename, (str, os.PathLike)) or not os.fspath(filename):
        raise ValueError(f"filename must be a file name, but got {filename!r}")
    context.set_filename(os.fspath(filename), bool(insert_device_ordinal))


def get_filename() -> str:
    """Return the name of the file of results of the current device."""
    return str(context.path(current_device()))


def get_results() -> tuple[tuple[str, str, str, float], ...]:
    """Return the results for the current device as (operator, parameters, candidate, milliseconds)."""
    found = context.results(current_device())
    return tuple((one.name, one.parameters, *result) for one, result in found.items())


def get_validators() -> tuple[tuple[str, str], ...]:
    """Return the names and values of the validators that a file of results for the current device must have.

    They say what results are valid for: versions of PyTorch, Backplane and the driver, and the device's name.
    """
    return tuple(validators(current_device()).items())


def read_file(filename: str | None = None) -> bool:
    """Read results for the current device from a file.

    Args:
        filename: the file; `get_filename()` by default.

    Returns:
        Whether the file was read. If a line is malformed or for another device or version, a warning names the line,
        and no results are taken.
    """
    return context.read(Path(filename or get_filename()), current_device())


def set_rotating_buffer_size(buffer_size: int) -> None:
    """Set the total size of the operands that are used in turns during timing, so that they are not in the cache.

    Args:
        buffer_size: MiB. 0 uses the same operands for each call. A negative number, the default, means the size of the
            device's cache.
    """
    context.set("rotating", int(buffer_size))


def get_rotating_buffer_size() -> int:
    """Return the rotating buffer size in KiB."""
    size = int(context["rotating"])
    target = driver_device(current_device()).properties.target
    return size << 10 if size >= 0 else target.cache_bytes >> 10 if target is not None else 0


def set_numerical_check_tolerances(enable: bool, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    """Enable or disable a numerical check of candidates during tuning.

    If it is enabled, candidates whose results differ from those of the first candidate are left out with a warning.

    Args:
        enable: whether to check. Disabled by default.
        atol: absolute tolerance.
        rtol: relative tolerance.
    """
    context.set("tolerances", (float(atol), float(rtol)) if enable else None)


def tune_gemm_in_file(filename: str) -> None:
    """Tune all calls in a file for the current device, unless they have a result. The calls are of any operator.

    Args:
        filename: a file of untuned calls, or of results.

    Raises:
        AssertionError: TunableOp or tuning is not enabled.
        ValueError: a line cannot be parsed (nothing is tuned then), or its operator or parameters are unknown.
        OSError: the file cannot be read.
    """
    _check_enabled()
    tune_all(read_problems(Path(filename)), current_device())


def tune_all(
    problems: Sequence[Problem], device: int, progress: Callable[[Problem], None] = lambda problem: None
) -> None:
    """Tune problems for a device, unless they have a result.

    Args:
        problems: the problems.
        device: the device index.
        progress: called with each problem before it is tuned.

    Raises:
        ValueError: the operator of a problem is unknown, or its parameters are wrong.
    """
    torch.get_device_module("bp").init()  # declares the operators if a device runs kernels
    unknown = next((one for one in problems if one.operator not in TRIALS), None)
    if unknown is not None:
        known = ", ".join(sorted(TRIALS)) or "none, as no device runs kernels"
        raise ValueError(f"unknown operator {unknown.name}: known are {known}")
    for one in problems:
        progress(one)
        if one not in context.results(device):
            with torch.get_device_module("bp").device(device), torch.no_grad():
                TRIALS[one.operator](
                    Operands(one, torch.device("bp", device))
                )()  # an ordinary call, which gets tuned


def mgpu_tune_gemm_in_file(filename_pattern: str, num_gpus: int) -> None:
    """Tune the calls in several files of untuned calls on several devices in parallel, with a process for each device.

    All results are written to a file for each device, whose name ends in `_full` and the device index.

    Args:
        filename_pattern: a glob pattern, such as "tunableop_untuned?.csv".
        num_gpus: number of devices to use, from 1 to `device_count()`. The devices must be alike, as each call is tuned
            on one of them.

    Raises:
        AssertionError: TunableOp or tuning is not enabled, or there are fewer devices.
        ValueError: no file matches, a line is malformed, or the devices are not alike.
    """
    _check_enabled()
    count = device_count()
    if not 1 <= num_gpus <= count:
        raise AssertionError(f"num_gpus must be between 1 and {count}, got {num_gpus}")
    known = validators(0)
    for device in range(1, num_gpus):
        if validators(device) != known:
            raise ValueError(f"bp:{device} must be like bp:0, but has the validators {validators(device)}, not {known}")
    files = sorted(glob.glob(filename_pattern))
    if not files:
        raise ValueError(f"no file matches {filename_pattern}")
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
        raise AssertionError("TunableOp is not enabled: call torch.bp.tunable.enable()")
    if not tuning_is_enabled():
        raise AssertionError("Tuning is not enabled: call torch.bp.tunable.tuning_enable()")


def _not_negative(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a non-negative integer, but got {value!r}")
    return value
