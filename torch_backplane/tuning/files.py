"""Files of results and of untuned problems, in the format of torch.cuda.tunable: lines of comma-separated fields.

A file of results begins with lines `Validator,NAME,VALUE`, which say what it is valid for. Lines
`OPERATOR,PARAMETERS,CANDIDATE,MILLISECONDS` follow. Lines are only appended, each with one write, so that several
processes can write the same file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch_backplane.tuning.problems import Problem

Validators = Mapping[str, str]


class Result(NamedTuple):
    """The fastest candidate of a problem, and its time."""

    candidate: str
    milliseconds: float


class BadFile(ValueError):
    """Raised for an invalid file. The message contains the line number, what is wrong, and what is accepted."""


def read_results(path: Path, validators: Validators) -> dict[Problem, Result]:
    """Reads a file of results. If a problem has several lines, the last one counts.

    Args:
        path: the file.
        validators: the expected validators.

    Raises:
        BadFile: the file is for another device or version, or a line is malformed.
        OSError: the file cannot be read.
    """
    results: dict[Problem, Result] = {}
    met = set()
    for number, fields in _lines(path):
        if fields[0] == "Validator":
            if len(fields) != 3:
                raise BadFile(f"{path}:{number}: a validator needs a name and a value, but got {fields[1:]}")
            name, value = fields[1:]
            if validators.get(name) != value:
                here = f"here it is {validators[name]}" if name in validators else f"known are {', '.join(validators)}"
                raise BadFile(f"{path}:{number}: the results are for {name} {value}, but {here}")
            met.add(name)
        elif missing := [name for name in validators if name not in met]:
            raise BadFile(f"{path}:{number}: the validators {', '.join(missing)} must come before the first result")
        else:
            problem, result = _result(path, number, fields)
            results[problem] = result
    return results


def _result(path: Path, number: int, fields: list[str]) -> tuple[Problem, Result]:
    try:
        if len(fields) not in (3, 4) or not fields[2]:
            raise ValueError(f"a result needs operator, parameters, candidate and milliseconds, but got {fields}")
        milliseconds = float(fields[3]) if len(fields) == 4 else 0.0
        if not 0 <= milliseconds < float("inf"):
            raise ValueError(f"milliseconds must be finite and not negative, but got {fields[3]}")
        return Problem.parse(*fields[:2]), Result(fields[2], milliseconds)
    except ValueError as error:
        raise BadFile(f"{path}:{number}: {error}") from None


def read_problems(path: Path) -> list[Problem]:
    """Reads the problems of a file of untuned problems or of results, without duplicates. Ignores validators.

    Raises:
        BadFile: a line is malformed.
        OSError: the file cannot be read.
    """
    found: dict[Problem, None] = {}
    for number, fields in _lines(path):
        if fields[0] == "Validator":
            continue
        try:
            if len(fields) < 2:
                raise ValueError(f"a problem needs operator and parameters, but got {fields}")
            found[Problem.parse(*fields[:2])] = None
        except ValueError as error:
            raise BadFile(f"{path}:{number}: {error}") from None
    return list(found)


def add_result(path: Path, validators: Validators, problem: Problem, result: Result) -> None:
    """Appends a result to a file, which is created with its validators if it does not exist.

    Raises:
        OSError: the file cannot be written.
    """
    _write_new(path, (f"Validator,{name},{value}" for name, value in validators.items()))
    _append(path, f"{problem.name},{problem.parameters},{result.candidate},{result.milliseconds:.6g}")


def add_problem(path: Path, problem: Problem) -> None:
    """Appends a problem to a file of untuned problems, which is created if it does not exist.

    Raises:
        OSError: the file cannot be written.
    """
    _append(path, f"{problem.name},{problem.parameters}")


def write_results(path: Path, validators: Validators, results: Mapping[Problem, Result]) -> None:
    """Replaces a file of results.

    Raises:
        OSError: the file cannot be written.
    """
    lines = [f"Validator,{name},{value}" for name, value in validators.items()]
    lines += [
        f"{one.name},{one.parameters},{result.candidate},{result.milliseconds:.6g}" for one, result in results.items()
    ]
    os.replace(_temporary_file(path, lines), path)


def _lines(path: Path) -> Iterable[tuple[int, list[str]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadFile(f"{path}:1: the file is not UTF-8 text") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield number, [field.strip() for field in line.split(",")]


def _write_new(path: Path, lines: Iterable[str]) -> None:
    if path.exists():
        return
    made = _temporary_file(path, lines)
    try:
        os.link(made, path)  # atomic: the file appears with all its lines
    except FileExistsError:
        pass  # another process was first
    finally:
        made.unlink()


def _temporary_file(path: Path, lines: Iterable[str]) -> Path:
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return made


def _append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())  # one write, so lines of several processes do not mix
    finally:
        os.close(descriptor)
