"""Functions that run right after a module is imported (`compile/imports.py`)."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_backplane.compile import imports
from torch_backplane.compile.imports import when_imported

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path. What is imported from it, and waits for its modules, is forgotten afterwards."""
    monkeypatch.setattr(imports, "_waiting", {})  # the finder of other registrations stays, and finds nothing
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    had_finder = imports._finder in sys.meta_path
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("bp_test_"):
            del sys.modules[name]
    if imports._finder in sys.meta_path:
        sys.meta_path.remove(imports._finder)
    if had_finder:
        sys.meta_path.insert(0, imports._finder)


def test_the_function_runs_after_the_module_and_before_its_importer(folder: Path) -> None:
    (folder / "bp_test_one.py").write_text("events = ['module']\nspec_loader = __spec__.loader\n")
    when_imported("bp_test_one", lambda module: module.events.append("first"))
    when_imported("bp_test_one", lambda module: module.events.append("second"))
    assert "bp_test_one" not in sys.modules
    module = importlib.import_module("bp_test_one")
    assert module.events == ["module", "first", "second"]
    assert type(module.spec_loader) is type(importlib.import_module("json").__spec__.loader)
    assert module.__loader__ is module.__spec__.loader is module.spec_loader


def test_an_imported_module_is_passed_immediately(folder: Path) -> None:
    found: list[types.ModuleType] = []
    when_imported("json", found.append)
    assert found == [sys.modules["json"]]
    assert imports._waiting == {}


def test_the_finder_leaves_when_nothing_waits(folder: Path) -> None:
    for name in ("bp_test_one", "bp_test_two"):
        (folder / f"{name}.py").write_text("")
        when_imported(name, lambda module: None)
    assert sys.meta_path.count(imports._finder) == 1
    importlib.import_module("bp_test_one")
    assert sys.meta_path.count(imports._finder) == 1
    importlib.import_module("bp_test_two")
    assert imports._finder not in sys.meta_path


def test_submodules_and_other_modules(folder: Path) -> None:
    """The name is the full name: a package and its other modules do not run the function."""
    (folder / "bp_test_package").mkdir()
    for name in ("__init__", "one", "two"):
        (folder / "bp_test_package" / f"{name}.py").write_text("")
    found: list[str] = []
    when_imported("bp_test_package.two", lambda module: found.append(module.__name__))
    importlib.import_module("bp_test_package.one")
    assert found == []
    importlib.import_module("bp_test_package.two")
    assert found == ["bp_test_package.two"]


def test_a_failed_import_can_be_repeated(folder: Path) -> None:
    (folder / "bp_test_one.py").write_text("raise ValueError('the module')")
    found: list[types.ModuleType] = []
    when_imported("bp_test_one", found.append)
    with pytest.raises(ValueError, match="the module"):
        importlib.import_module("bp_test_one")
    assert found == []
    (folder / "bp_test_one.py").write_text("repaired = True  # a different size, so that no bytecode is reused")
    importlib.invalidate_caches()
    assert importlib.import_module("bp_test_one").repaired
    assert len(found) == 1


def test_an_error_of_the_function_is_raised_by_the_import(folder: Path) -> None:
    (folder / "bp_test_one.py").write_text("")

    def fail(module: types.ModuleType) -> None:
        raise ValueError("the function")

    when_imported("bp_test_one", fail)
    with pytest.raises(ValueError, match="the function"):
        importlib.import_module("bp_test_one")
    assert "bp_test_one" not in sys.modules


def test_a_module_that_does_not_exist(folder: Path) -> None:
    when_imported("bp_test_missing", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'bp_test_missing'"):
        importlib.import_module("bp_test_missing")


def test_a_registration_while_this_thread_imports_the_module_is_refused(folder: Path) -> None:
    (folder / "bp_test_one.py").write_text(
        "from torch_backplane.compile.imports import when_imported\nwhen_imported(__name__, print)\n"
    )
    with pytest.raises(RuntimeError, match="while this thread imports bp_test_one"):
        importlib.import_module("bp_test_one")


def test_a_registration_while_another_thread_imports_the_module_waits(folder: Path) -> None:
    (folder / "bp_test_started.py").write_text(
        "import threading\nreached, go_on = threading.Event(), threading.Event()\n"
    )
    (folder / "bp_test_one.py").write_text(
        "import bp_test_started\nbp_test_started.reached.set()\nassert bp_test_started.go_on.wait(60)\ndone = True\n"
    )
    started = importlib.import_module("bp_test_started")
    importer = threading.Thread(target=importlib.import_module, args=("bp_test_one",))
    importer.start()
    assert started.reached.wait(60)
    found: list[bool] = []
    register = threading.Thread(target=when_imported, args=("bp_test_one", lambda module: found.append(module.done)))
    register.start()
    register.join(0.2)
    assert register.is_alive()
    assert found == []
    started.go_on.set()
    register.join(60)
    importer.join(60)
    assert found == [True]


def test_registrations_in_many_threads_run_once_each(folder: Path) -> None:
    (folder / "bp_test_one.py").write_text("")
    found: list[int] = []
    start = threading.Barrier(9)

    def register(number: int) -> None:
        start.wait()
        for one in range(50):
            when_imported("bp_test_one", lambda module, one=one: found.append(number * 50 + one))

    threads = [threading.Thread(target=register, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    start.wait()
    importlib.import_module("bp_test_one")
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(400))


def test_a_module_that_runs_as_a_program(folder: Path) -> None:
    """runpy asks the loader for the module's code."""
    (folder / "bp_test_one.py").write_text("name = __name__")
    when_imported("bp_test_one", lambda module: None)
    assert runpy.run_module("bp_test_one")["name"] == "bp_test_one"


def test_importing_torch_imports_no_compiler(run_forked: Run) -> None:
    found = run_forked(
        """
import sys
import torch
import torch_backplane

print(sorted(name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))))
print(sorted(name for name in sys.modules if name.startswith("torch_backplane.compile")))
"""
    )
    assert found.stderr == ""
    # PyTorch imports its associative_scan and its fake tensors itself.
    expected = ["", ".associative_scan", ".fake_tensors", ".imports"]
    assert found.stdout.splitlines() == ["[]", str([f"torch_backplane.compile{name}" for name in expected])]


def test_importing_inductor_imports_no_planners(run_forked: Run) -> None:
    found = run_forked(
        """
import sys, torch
import torch._inductor.compile_fx, torch._inductor.scheduler, torch_backplane
print([name for name in sys.modules if name.startswith(("torch_backplane.planning", "torch_backplane.operators"))])
"""
    )
    assert found.stdout == "[]\n", found.stderr


def test_every_hook_works_on_this_release(run_python: Run) -> None:
    """A name that a release of torch does not have would only be a warning, and leave hooks out."""
    done = run_python(
        """
import importlib, importlib.util, warnings
import torch
from torch_backplane.compile import HOOKS

without = () if importlib.util.find_spec("triton") else ("triton",)  # Triton is optional

with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    for name in HOOKS:
        if name.partition(".")[0] not in without:
            importlib.import_module(name)
print([str(one.message) for one in found if "bp" in str(one.message)])
"""
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
    assert "does not know bp devices" not in done.stderr
