"""Settings and results of tuning, and the choice of the candidate for a call."""

from __future__ import annotations

import os
import statistics
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from torch_backplane import _C, preferences
from torch_backplane._release import VERSION
from torch_backplane.tuning.files import BadFile, Result, add_problem, add_result, read_results
from torch_backplane.tuning.problems import Problem
from torch_backplane.tuning.trials import ROUNDS, Clock, quickest

DEFAULT = "Default"  # in results: the candidate that runs untuned calls
TF32 = "tf32=1"  # the last parameter of a problem: libraries may compute float32 in TF32
PREFIX = "PYTORCH_TUNABLEOP_"


class _Thread(threading.local):
    forced: tuple[str, str] | None = None  # in a trial: family and candidate


_thread = _Thread()
_one_at_a_time = threading.Lock()  # held by trials, which would slow each other down


@contextmanager
def forcing(family: str, candidate: str) -> Iterator[None]:
    """Context manager in which this thread's calls of a family run `candidate`, if it accepts them."""
    before, _thread.forced = _thread.forced, (family, candidate)
    _C.advance_configuration_epoch()  # invalidates plans that use another candidate
    try:
        yield
    finally:
        _thread.forced = before
        _C.advance_configuration_epoch()


def forced(family: str) -> str | None:
    """The candidate of the family that this thread is timing in a trial; None outside of trials."""
    return _thread.forced[1] if _thread.forced is not None and _thread.forced[0] == family else None


def is_trial() -> bool:
    """Whether this thread is timing a candidate."""
    return _thread.forced is not None


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a non-negative integer")
    return int(text)


def _any_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("an integer") from None


def _tolerances(text: str) -> tuple[float, float] | None:
    if text in ("0", "1"):
        return (1e-5, 1e-5) if text == "1" else None
    try:
        atol, rtol = (float(one) for one in text.split("_"))
    except ValueError:
        raise ValueError("0, 1 or ATOL_RTOL, such as 1e-5_1e-5") from None
    return atol, rtol


# For each setting, its environment variable (those of torch.cuda.tunable, without the prefix) and its parser.
VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "enabled": ("ENABLED", _flag),
    "tuning": ("TUNING", _flag),
    "record_untuned": ("RECORD_UNTUNED", _flag),
    "filename": ("FILENAME", str),
    "untuned_filename": ("UNTUNED_FILENAME", str),
    "max_duration": ("MAX_TUNING_DURATION_MS", _whole),
    "max_iterations": ("MAX_TUNING_ITERATIONS", _whole),
    "tolerances": ("NUMERICAL_CHECK", _tolerances),
    "rotating": ("ROTATING_BUFFER_SIZE", _any_whole),
    "verbose": ("VERBOSE", _whole),
}


class Context:
    """The settings of this process, and the results for each device.

    As in torch.cuda.tunable, settings from the environment take precedence over those that a program makes.
    """

    def __init__(self) -> None:
        self._set: dict[str, Any] = {
            "enabled": False,
            "tuning": True,
            "record_untuned": False,
            "filename": "tunableop_results.csv",
            "untuned_filename": "tunableop_untuned.csv",
            "max_duration": 30,
            "max_iterations": 100,
            "tolerances": None,
            "rotating": -1,
            "verbose": 0,
            "benchmarked": frozenset(),  # families tuned for this process only, even if "enabled" is False
        }
        self._by_environment: set[str] = set()
        self.inserts_ordinal = True
        self._lock = threading.RLock()
        self._results: dict[int, dict[Problem, Result]] = {}
        self._benchmarked: dict[int, dict[Problem, Result]] = {}
        self._recorded: set[tuple[int, Problem]] = set()  # recorded in the file of untuned problems
        self._unwritable: set[Path] = set()
        for name, (suffix, read) in VARIABLES.items():
            text = os.environ.get(PREFIX + suffix)
            if text is None:
                continue
            try:
                self._set[name] = read(text.strip())
                self._by_environment.add(name)
            except ValueError as error:
                warnings.warn(f"{PREFIX}{suffix}={text!r} is ignored: it must be {error}", stacklevel=2)

    def __getitem__(self, name: str) -> Any:
        return self._set[name]

    def set(self, name: str, value: Any) -> None:
        if name in self._by_environment:
            return
        with self._lock:
            if self._set[name] != value:
                self._set[name] = value
                _C.advance_configuration_epoch()

    def set_filename(self, filename: str, inserts_ordinal: bool) -> None:
        if "filename" not in self._by_environment:
            self._set["filename"], self.inserts_ordinal = filename, inserts_ordinal

    def path(self, device: int, setting: str = "filename") -> Path:
        """The path of a setting's file for a device: with the index in place of %d, or at the end of the stem."""
        name = Path(self[setting])
        if "%d" in name.name:
            return name.with_name(name.name.replace("%d", str(device)))
        if setting == "filename" and not self.inserts_ordinal:
            return name
        return name.with_name(f"{name.stem}{device}{name.suffix}")

    def benchmark(self, family: str, wanted: bool) -> None:
        """Switches tuning of a family for this process on or off. Its results are not written to a file."""
        self.set("benchmarked", self["benchmarked"] | {family} if wanted else self["benchmarked"] - {family})

    def benchmarks(self, family: str) -> bool:
        return family in self["benchmarked"]

    def tunes(self, family: str) -> bool:
        """Whether results of tuning choose the candidate for calls of a family."""
        return self["enabled"] or self.benchmarks(family)

    # Results

    def results(self, device: int) -> dict[Problem, Result]:
        """The results for a device. The first call reads its file, if it exists."""
        with self._lock:
            if device not in self._results:
                self._results[device] = {}
                if self.path(device).exists():
                    self.read(self.path(device), device)
            return self._results[device]

    def benchmarked(self, device: int) -> dict[Problem, Result]:
        """The results for a device that are not written to a file."""
        return self._benchmarked.setdefault(device, {})

    def read(self, path: Path, device: int) -> bool:
        """Reads a file of results for a device, and returns whether it is valid.

        If a line is malformed or for another device or version, nothing is taken and a warning is given.
        """
        try:
            found = read_results(path, validators(device))
        except (BadFile, OSError) as error:
            warnings.warn(f"tuning results were not read: {error}", stacklevel=3)
            self._unwritable.add(path)
            return False
        with self._lock:
            self._results.setdefault(device, {}).update(found)
            self._unwritable.discard(path)
        _C.advance_configuration_epoch()
        return True

    def add(self, device: int, problem: Problem, result: Result) -> None:
        path = self.path(device)
        with self._lock:
            self.results(device)[problem] = result
            if path in self._unwritable:
                return  # a warning was given; another device's or version's file stays as it is
            try:
                add_result(path, validators(device), problem, result)
            except OSError as error:
                self._unwritable.add(path)
                warnings.warn(f"tuning results were not written: {error}", stacklevel=3)

    def record_untuned(self, device: int, problem: Problem) -> None:
        path = self.path(device, "untuned_filename")
        with self._lock:
            if (device, problem) in self._recorded or path in self._unwritable:
                return
            self._recorded.add((device, problem))
            try:
                add_problem(path, problem)
            except OSError as error:
                self._unwritable.add(path)
                warnings.warn(f"untuned problems were not recorded: {error}", stacklevel=3)


context = Context()


def validators(device: int) -> dict[str, str]:
    """The versions and the device for which results are valid, as in a file of results."""

    said = torch.get_device_module("bp").get_device_properties(device)
    version = f"{said.driver} {said.major}.{said.minor}"
    found = {"PT_VERSION": torch.__version__, "BACKPLANE_VERSION": VERSION, "DRIVER": version, "DEVICE": said.name}
    return {name: value.replace(",", ";").strip() for name, value in found.items()}


def winner(family: str, problem: Problem, device: torch.device, candidates: Sequence[str], cache_bytes: int) -> str:
    """Chooses the candidate for a call.

    A problem without a result is tuned or recorded, depending on the settings, but not in a trial and not during the
    capture of a graph.

    Args:
        family: the family of operators.
        problem: describes the call.
        device: the call's device, with an index.
        candidates: names of candidates; the first one runs untuned calls.
        cache_bytes: size of the device's cache.
    """
    assert device.index is not None
    lasting = context["enabled"]
    known = context.results(device.index) if lasting else context.benchmarked(device.index)
    found = known.get(problem)
    # Calls within a trial are not tuned themselves, and nothing can be timed during the capture of a graph.
    if found is None and _thread.forced is None and not _C.capture_of(device.index):
        if lasting and context["tuning"]:
            found = tune(family, problem, device, candidates, cache_bytes)
            context.add(device.index, problem, found)
        elif context.benchmarks(family):
            found = known[problem] = tune(family, problem, device, candidates, cache_bytes)
        elif context["record_untuned"]:
            context.record_untuned(device.index, problem)
    return found.candidate if found is not None and found.candidate in candidates else candidates[0]


def tune(family: str, problem: Problem, device: torch.device, candidates: Sequence[str], cache_bytes: int) -> Result:
    """Times the candidates of a problem and returns the fastest. Leaves out candidates that fail, with a warning.

    Raises:
        ValueError: the parameters of the problem are not valid for its operator.
    """
    done: list[Result | BaseException] = []
    rotating = cache_bytes if context["rotating"] < 0 else context["rotating"] << 20

    def work() -> None:
        try:
            with torch.no_grad(), _one_at_a_time, _precision_of(family, problem):
                done.append(_times(family, problem, device, candidates, rotating))
        except BaseException as error:  # raised in the calling thread
            done.append(error)

    # In a new thread, which runs no planner, has no dispatch modes, and uses the default stream.
    thread = threading.Thread(target=work, name="backplane-tuning")
    thread.start()
    thread.join()
    (found,) = done
    if isinstance(found, BaseException):
        raise found
    return found


def _precision_of(family: str, problem: Problem) -> AbstractContextManager[None]:
    """Context manager in which libraries may compute float32 as the problem says."""
    if not preferences.has_float32_precision(family):
        return nullcontext()
    wanted = "tf32" if problem.parameters.endswith(TF32) else "ieee"
    changes = wanted != preferences.float32_precision(family)
    return preferences.computing_float32_in(family, wanted if changes else None)


def _times(family: str, problem: Problem, device: torch.device, candidates: Sequence[str], rotating: int) -> Result:
    torch.accelerator.set_device_index(device.index)
    try:
        clock = Clock(problem, device, context["max_duration"], context["max_iterations"], rotating)
    except RuntimeError as error:
        warnings.warn(f"{problem.name} {problem.parameters} is not tuned: {_first_line(error)}", stacklevel=2)
        return Result(DEFAULT, 0.0)
    expected: list[torch.Tensor] = []

    def take_turns(chosen: Sequence[str]) -> dict[str, list[float]]:
        """Times the candidates in turns; returns the milliseconds of those that do not fail."""
        times: dict[str, list[float]] = {one: [] for one in chosen}
        for number in range(ROUNDS):
            for candidate in [*times]:
                try:
                    with forcing(family, candidate):
                        if number == 0 and context["tolerances"] is not None:
                            found = clock.result()
                            expected[:] = expected or found
                            _compare(found, expected)
                        times[candidate].append(clock.milliseconds())
                except (RuntimeError, AssertionError) as error:
                    del times[candidate]
                    said = f"{candidate} is left out for {problem.name} {problem.parameters}"
                    warnings.warn(f"{said}: {_first_line(error)}", stacklevel=3)
        return times

    times = take_turns(candidates)
    if not times:
        return Result(DEFAULT, 0.0)
    first, name = next(iter(times)), quickest(times)
    if name != first:  # time these two again: among many candidates, one may have been fast by chance
        again = take_turns([first, name])
        if not again:
            return Result(DEFAULT, 0.0)
        name = quickest(again)
        times |= again
    if context["verbose"]:
        tried = ", ".join(f"{one} {statistics.median(each):.4g} ms" for one, each in times.items())
        print(f"tuned {problem.name} {problem.parameters}: {name} ({tried})", flush=True)
    return Result(name, statistics.median(times[name]))


def _compare(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    atol, rtol = context["tolerances"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol, equal_nan=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
