"""Tests that OpenCL implementations which crash when they are listed are left out, and that the others work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bad_implementations
import forked
import on_opencl
import pytest

cl = pytest.importorskip("pyopencl")

from torch_backplane.drivers.opencl import driver, implementations  # noqa: E402

LOADER = cl._cl.__file__
LIST = """
import os
before = dict(os.environ)
import torch
from torch_backplane import _C
print(*(_C.device_properties(i).driver for i in range(torch.accelerator.device_count())))
import pyopencl
assert {**before, "PYOPENCL_HOME": os.environ.get("PYOPENCL_HOME")} == dict(os.environ)  # PyOpenCL sets it
print((torch.ones(3, device="bp") + 1).tolist())
"""


@pytest.fixture(autouse=True, scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Starts the server of forked.run, which keeps the environment of this moment, before a test changes it."""
    forked.run("", tmp_path_factory.mktemp("site"))


@pytest.fixture
def vendors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which the loader looks for implementations, and an empty kernel cache."""
    folder = tmp_path / "vendors"
    folder.mkdir()
    monkeypatch.setenv("OCL_ICD_VENDORS", str(folder))
    monkeypatch.setenv("TORCH_BACKPLANE_CACHE_DIR", str(tmp_path / "cache"))
    implementations.unusable.cache_clear()
    yield folder
    implementations.unusable.cache_clear()


def unusable() -> dict[str, str]:
    implementations.unusable.cache_clear()  # as in a new process
    return {one.file.name: how for one, how in implementations.unusable(LOADER).items()}


def add_pocl(vendors: Path) -> str:
    """Adds the PoCL that is installed. Skips the test if there is none."""
    installed = next(Path(implementations.FOLDER).glob("pocl*.icd"), None)
    if installed is None:
        on_opencl.missing("needs PoCL")
    library = installed.read_text().strip()
    bad_implementations.icd(vendors, "pocl", library)
    return library


def run(vendors: Path, drivers: str | None = None) -> tuple[list[str], str]:
    result = forked.run(
        LIST, vendors, OCL_ICD_VENDORS=str(vendors), TORCH_BACKPLANE_DRIVERS=drivers, TORCH_BACKPLANE_HOST_DEVICES="1"
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines(), result.stderr


@pytest.mark.parametrize(
    ("fault", "how"), [("crashes", "SIGILL"), ("aborts", "SIGABRT"), ("exits", "exit code 3")]
)
def test_an_implementation_that_ends_the_process_is_left_out(vendors: Path, fault: str, how: str) -> None:
    bad_implementations.build(vendors, "bad", fault)
    lines, warned = run(vendors)
    assert lines == ["host", "[2.0, 2.0, 2.0]"]
    assert warned.count("OpenCL implementation bad.icd is skipped") == 1
    assert f"{vendors}/libbad.so: it ends the process with {how} when its devices are listed" in warned


def test_the_other_implementations_work(vendors: Path, platform: None) -> None:
    add_pocl(vendors)
    bad_implementations.build(vendors, "a_bad", "crashes")
    bad_implementations.build(vendors, "z_bad", "aborts")
    lines, warned = run(vendors)
    assert lines[0].split()[0] == "opencl"
    assert lines[0].split()[-1] == "host"
    assert lines[1] == "[2.0, 2.0, 2.0]"
    assert "a_bad.icd" in warned
    assert "z_bad.icd" in warned
    assert "pocl.icd" not in warned
    for name in ("a_bad", "z_bad"):
        (vendors / f"{name}.icd").unlink()
    lines, warned = run(vendors)
    assert (lines[0].split()[0], warned) == ("opencl", "")


def test_implementations_that_crash_together(vendors: Path) -> None:
    first = bad_implementations.build(vendors, "first", "crashes as the second")
    bad_implementations.build(vendors, "second", "crashes as the second")
    assert unusable() == {"second.icd": "it ends the process with SIGABRT"}
    first.unlink()
    assert unusable() == {}


def test_an_implementation_that_hangs(vendors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "LONGEST", 2)
    bad_implementations.build(vendors, "slow", "hangs")
    assert unusable() == {"slow.icd": "it does not return within 2 s"}


def test_a_killed_listing_is_no_crash_and_is_not_remembered(vendors: Path) -> None:
    bad_implementations.build(vendors, "victim", "is killed")
    assert unusable() == {}
    bad_implementations.build(vendors, "victim", "crashes")
    assert unusable() == {"victim.icd": "it ends the process with SIGILL"}


def test_a_good_listing_is_remembered_until_an_implementation_changes(
    vendors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = []
    list_apart = implementations.list_apart

    def counting(*arguments: object) -> implementations.Listing:
        listed.append(arguments)
        return list_apart(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(implementations, "list_apart", counting)
    bad_implementations.build(vendors, "one", "is empty")
    assert (unusable(), len(listed)) == ({}, 1)
    assert (unusable(), len(listed)) == ({}, 1)
    bad_implementations.build(vendors, "one", "crashes")  # as an update of its package does
    assert unusable() == {"one.icd": "it ends the process with SIGILL"}
    tried = len(listed)
    assert unusable()  # crashes are not remembered: the next process tries again
    assert len(listed) > tried
    monkeypatch.setenv("TORCH_BACKPLANE_CACHE_DIR", "")
    bad_implementations.build(vendors, "one", "is empty")
    assert (unusable(), unusable()) == ({}, {})


def test_nothing_is_listed_without_implementations_or_in_a_frozen_program(
    vendors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementations, "list_apart", None)
    assert unusable() == {}
    bad_implementations.build(vendors, "bad", "crashes")
    monkeypatch.setattr("sys.frozen", True, raising=False)
    assert unusable() == {}


def test_installed_reads_folders_files_and_libraries(vendors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(implementations.SHIPPED, raising=False)
    one = bad_implementations.icd(vendors, "one", "libone.so")
    two = bad_implementations.icd(vendors, "two", "/opt/libtwo.so")
    (vendors / "readme.txt").write_text("no implementation\n")
    (vendors / "folder.icd").mkdir()
    found = [(item.file, item.library) for item in implementations.installed()]
    assert found == [(one, "libone.so"), (two, "/opt/libtwo.so")]
    monkeypatch.setenv("OCL_ICD_VENDORS", str(two))
    assert [item.library for item in implementations.installed()] == ["/opt/libtwo.so"]
    monkeypatch.setenv("OCL_ICD_VENDORS", "libthree.so")
    assert [item.library for item in implementations.installed()] == ["libthree.so"]
    shipped = bad_implementations.icd(vendors / ".libs", "four", "libfour.so")
    monkeypatch.setenv(implementations.SHIPPED, str(vendors))
    assert shipped in [item.file for item in implementations.installed()]


def test_findings_name_what_is_wrong_and_the_remedy(vendors: Path) -> None:
    (found,) = driver.implementation_findings(LOADER)
    assert (found.ok, found.found, found.remedy) == (False, f"no .icd file in {vendors}", "unset OCL_ICD_VENDORS")
    bad_implementations.icd(vendors, "gone", "libgone.so.7")
    bad_implementations.build(vendors, "empty", "is empty")
    by_name = {found.what: found for found in driver.implementation_findings(LOADER)}
    gone = by_name["OpenCL implementation gone.icd"]
    assert not gone.ok
    assert gone.found.startswith("libgone.so.7: cannot open shared object file")
    empty = by_name["OpenCL implementation empty.icd"]
    assert (empty.ok, empty.found) == (False, f"no platform, 0 devices ({vendors}/libempty.so)")


def test_findings_of_a_working_implementation(vendors: Path, platform: None) -> None:
    library = add_pocl(vendors)
    (found,) = driver.implementation_findings(LOADER)
    assert found.ok
    assert found.found.startswith("Portable Computing Language, ")
    assert library in found.found
    (unlisted,) = driver.implementation_findings("")  # PyOpenCL is not installed
    assert (unlisted.ok, unlisted.found) == (True, library)
