"""Tests `python -m torch_backplane run`: what the program sees, exit codes, tracebacks, and bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOST = {"TORCH_BACKPLANE_DRIVERS": "host", "TORCH_BACKPLANE_HOST_DEVICES": "1", "NO_COLOR": "1", "COLUMNS": "400"}


def launch(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_backplane", "run", *arguments],
        env=os.environ | HOST | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def plain(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=os.environ | HOST, cwd=folder, capture_output=True, text=True, timeout=120
    )


FACTS = """
import sys
import pickle
import helper

class Local:
    pass

print(sys.argv, __name__, sys.path[0], helper.VALUE)
print(type(pickle.loads(pickle.dumps(Local()))) is Local, sys.modules["__main__"].Local is Local)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of programs, below the current folder."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "helper.py").write_text("VALUE = 7\n")
    (programs / "facts.py").write_text(FACTS)
    (programs / "package").mkdir()
    (programs / "package" / "__init__.py").write_text("")
    (programs / "package" / "__main__.py").write_text("from .part import main\nmain()\n")
    (programs / "package" / "part.py").write_text("import sys\ndef main(): print('part', sys.argv[1:], sys.path[0])\n")
    return tmp_path


def test_script_sees_what_python_shows_it(folder: Path) -> None:
    for arguments in (["programs/facts.py", "--as-cuda", "-m", "x y"], [str(folder / "programs" / "facts.py")]):
        expected, ended = plain(*arguments, folder=folder), launch(*arguments, folder=folder)
        assert expected.returncode == 0, expected.stderr
        assert (ended.stdout, ended.returncode) == (expected.stdout, 0), ended.stderr


def test_module_sees_what_python_shows_it(folder: Path) -> None:
    arguments = ["-m", "package", "--lr", "0.1"]
    expected = plain(*arguments, folder=folder / "programs")
    ended = launch(*arguments, folder=folder / "programs")
    assert expected.returncode == 0, expected.stderr
    assert (ended.stdout, ended.returncode) == (expected.stdout, 0), ended.stderr


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no data')", 1),
        ("raise SystemExit", 0),
        ("def f():\n    return 1 / 0\nf()", 1),
        ("import helper\nhelper.missing", 1),
        ("1 +", 1),
        ("import argparse; p = argparse.ArgumentParser(); p.add_argument('--lr', required=True); p.parse_args()", 2),
        ("import argparse; argparse.ArgumentParser().parse_args(['--help'])", 0),
        ("import click; raise click.ClickException('of the program')", 1),
        ("import sys; sys.excepthook = lambda *error: print('hook', error[0].__name__); raise OSError", 1),
        ("import atexit; atexit.register(lambda: print('at exit'))", 0),
    ],
)
def test_exit_codes_and_tracebacks_are_pythons(folder: Path, code: str, status: int) -> None:
    (folder / "programs" / "script.py").write_text(code + "\n")
    script = str(folder / "programs" / "script.py")
    expected, ended = plain(script, folder=folder), launch(script, folder=folder)
    assert expected.returncode == status
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, expected.stdout, expected.stderr)


def test_chained_exceptions_are_reported_whole(folder: Path) -> None:
    code = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('second') from error\n"
    (folder / "script.py").write_text(code)
    expected, ended = plain("script.py", folder=folder), launch("script.py", folder=folder)
    assert ended.stderr.replace(str(folder) + "/", "") == expected.stderr.replace(str(folder) + "/", "")
    assert "ZeroDivisionError" in ended.stderr


def test_interrupted_program_has_the_exit_code_of_an_interrupt(folder: Path) -> None:
    (folder / "script.py").write_text("raise KeyboardInterrupt\n")
    ended = launch("script.py", folder=folder)
    assert ended.returncode == 130
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("arguments", [["missing.py"], ["-m", "missing_module"], ["-m", "package.missing"]])
def test_unknown_program_is_an_error(folder: Path, arguments: list[str]) -> None:
    ended = launch("--as-cuda", *arguments, folder=folder / "programs")
    assert ended.returncode == 2
    assert f"cannot run {' '.join([*arguments[:-1], repr(arguments[-1])])}: there is no such" in ended.stderr


def test_missing_program_is_an_error(folder: Path) -> None:
    assert launch(folder=folder).returncode == 2
    assert launch("--as-cpu", "programs/facts.py", folder=folder).returncode == 2


def test_without_devices_nothing_runs(folder: Path) -> None:
    (folder / "script.py").write_text("print('it runs')\n")
    for environment, reason in (
        ({"TORCH_BACKPLANE_HOST_DEVICES": "0"}, "no bp device is available"),
        ({"TORCH_BACKPLANE_HOST_DEVICES": "many"}, "TORCH_BACKPLANE_HOST_DEVICES='many'"),
        ({"TORCH_BACKPLANE_DRIVERS": "hots"}, "hots"),
    ):
        ended = launch("--as-cuda", "script.py", folder=folder, **environment)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "Error: --as-cuda:" in ended.stderr
        assert reason in ended.stderr
    ended = launch("script.py", folder=folder, TORCH_BACKPLANE_HOST_DEVICES="0")
    assert (ended.returncode, ended.stdout) == (0, "it runs\n")
    ended = launch("--as-cuda", "script.py", folder=folder)
    assert (ended.returncode, ended.stdout) == (0, "it runs\n")


FINDERS = """
import sys, torch
print(torch.cuda.is_available(), torch.device('cuda').type, torch.device('bp').type)
print(sum(type(one).__module__ == "torch_backplane.integrations" for one in sys.meta_path))
"""


def test_cuda_is_an_option_and_integrations_are_not(folder: Path) -> None:
    (folder / "script.py").write_text(FINDERS)
    assert plain("script.py", folder=folder).stdout == "False cuda bp\n0\n"
    assert launch("script.py", folder=folder).stdout == "False cuda bp\n1\n"
    assert launch("--as-cuda", "script.py", folder=folder).stdout == "True cuda cuda\n1\n"


def test_cuda_visible_devices_is_not_ignored_silently(folder: Path) -> None:
    (folder / "script.py").write_text("pass\n")
    ended = launch("--as-cuda", "script.py", folder=folder, CUDA_VISIBLE_DEVICES="0")
    assert ended.returncode == 0
    assert "use TORCH_BACKPLANE_VISIBLE_DEVICES" in ended.stderr


CHILDREN = """
import multiprocessing, subprocess, sys, torch

def work(number):
    return str(torch.ones(number, device="cuda").sum().cuda().device)

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.map(work, [1, 2]))
    code = "import torch; print(torch.cuda.is_available())"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_child_processes_see_cuda_too(folder: Path, method: str) -> None:
    (folder / "script.py").write_text(CHILDREN)
    ended = launch("--as-cuda", "script.py", method, folder=folder)
    assert ended.stdout == "['cuda:0', 'cuda:0']\nTrue\n", ended.stderr


INTEGRATED = """
import sys
import torch_backplane.integrations as integrations
integrations.__path__.append(sys.argv[1])
integrations.enable()
if sys.argv[2] == "before":
    import mylib
    integrations.enable()
import importlib.util
assert importlib.util.find_spec("mylib") is not None
import mylib
print(mylib.calls, type(mylib.__loader__).__name__, type(mylib.__spec__.loader).__name__)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_integration_is_enabled_when_its_library_is_imported(folder: Path, when: str) -> None:
    files = folder / "more"
    files.mkdir()
    (files / "mylib.py").write_text("import mylib\ndef enable():\n    mylib.calls = ['enabled']\n")
    (files / "other.py").write_text("raise AssertionError('its library is not imported')\n")
    (folder / "mylib.py").write_text("calls = []\n")
    (folder / "script.py").write_text(INTEGRATED)
    ended = plain("script.py", str(files), when, folder=folder)
    assert ended.stdout == "['enabled'] SourceFileLoader SourceFileLoader\n", ended.stderr
