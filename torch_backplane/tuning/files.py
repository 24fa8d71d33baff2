"""Files of results and of what is to be tuned, as those of torch.cuda.tunable: lines of comma-separated fields.

A file of results begins with lines `Validator,NAME,VALUE`: what it holds for. Then follow lines
`OPERATOR,PARAMETERS,CANDIDATE,MILLISECONDS`. Files only grow, by whole lines, so that several processes may write one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch_backplane.tuning.problems import Problem

Validators = Mapping[str, str]


class Result(NamedTuple):
    candidate: str
    milliseconds: float


class BadFile(ValueError):
    """A file that cannot be used; the message names the line, what is wrong with it and what is accepted."""


def read_results(path: Path, validators: Validators) -> dict[Problem, Result]:
    """Of several lines of one problem the last.

    Raises:
        BadFile: it is of another device or version, or a line is no result.
        OSError: it cannot be read.
    """
    results: dict[Problem, Result] = {}
    met = set()
    for number, fields in _lines(path):
        if fields[0] == "Validator":
            if len(fields) != 3:
                raise BadFile(f"{path}:{number}: a validator has a name and a value, and this has {fields[1:]}")
            name, value = fields[1:]
            if validators.get(name) != value:
                here = f"here it is {validators[name]}" if name in validators else f"known are {', '.join(validators)}"
                raise BadFile(f"{path}:{number}: it is for {name} {value}, and {here}")
            met.add(name)
        elif missing := [name for name in validators if name not in met]:
            raise BadFile(f"{path}:{number}: a result before the validators {', '.join(missing)}")
        else:
            problem, result = _result(path, number, fields)
            results[problem] = result
    return results


def _result(path: Path, number: int, fields: list[str]) -> tuple[Problem, Result]:
    try:
        if len(fields) not in (3, 4) or not fields[2]:
            raise ValueError(f"a result has operator, parameters, candidate and milliseconds, and this has {fields}")
        milliseconds = float(fields[3]) if len(fields) == 4 else 0.0
        if not 0 <= milliseconds < float("inf"):
            raise ValueError(f"{fields[3]} milliseconds")
        return Problem.parse(*fields[:2]), Result(fields[2], milliseconds)
    except ValueError as error:
        raise BadFile(f"{path}:{number}: {error}") from None


def read_problems(path: Path) -> list[Problem]:
    """What a file says is to be tuned, each once: of one of results, too, whatever it is for.

    Raises:
        BadFile: a line is no problem.
        OSError: it cannot be read.
    """
    found: dict[Problem, None] = {}
    for number, fields in _lines(path):
        if fields[0] == "Validator":
            continue
        try:
            if len(fields) < 2:
                raise ValueError(f"a problem has operator and parameters, and this has {fields}")
            found[Problem.parse(*fields[:2])] = None
        except ValueError as error:
            raise BadFile(f"{path}:{number}: {error}") from None
    return list(found)


def add_result(path: Path, validators: Validators, problem: Problem, result: Result) -> None:
    """Adds a line to the file, which is made where there is none.

    Raises:
        OSError: it cannot be written.
    """
    _make(path, (f"Validator,{name},{value}" for name, value in validators.items()))
    _append(path, f"{problem.name},{problem.parameters},{result.candidate},{result.milliseconds:.6g}")


def add_problem(path: Path, problem: Problem) -> None:
    """Likewise, of what is to be tuned."""
    _append(path, f"{problem.name},{problem.parameters}")


def write_results(path: Path, validators: Validators, results: Mapping[Problem, Result]) -> None:
    """The whole file anew.

    Raises:
        OSError: it cannot be written.
    """
    lines = [f"Validator,{name},{value}" for name, value in validators.items()]
    lines += [
        f"{one.name},{one.parameters},{result.candidate},{result.milliseconds:.6g}" for one, result in results.items()
    ]
    os.replace(_written_beside(path, lines), path)


def _lines(path: Path) -> Iterable[tuple[int, list[str]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadFile(f"{path}:1: this is no text") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield number, [field.strip() for field in line.split(",")]


def _make(path: Path, lines: Iterable[str]) -> None:
    if path.exists():
        return
    made = _written_beside(path, lines)
    try:
        os.link(made, path)  # whole, or not at all
    except FileExistsError:
        pass  # another process was first
    finally:
        made.unlink()


def _written_beside(path: Path, lines: Iterable[str]) -> Path:
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return made


def _append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())  # one write: lines of several processes do not mix
    finally:
        os.close(descriptor)
