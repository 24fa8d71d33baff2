"""Tests what wheels and the source distribution declare, and what pip chooses among wheels; nothing is compiled."""

from __future__ import annotations

import email
import email.message
import json
import os
import runpy
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import paths
import pytest
from packaging.requirements import Requirement

from torch_backplane._release import VERSION

# Enough of torch for setup.py, where it compiles nothing.
TORCH = {
    "__init__.py": "__version__ = {version!r}",
    "utils/__init__.py": "",
    "utils/cpp_extension.py": """
from setuptools import Extension
from setuptools.command.build_ext import build_ext

class BuildExtension(build_ext):
    @classmethod
    def with_options(cls, **options): return cls

class CppExtension(Extension): pass

def include_paths(): return []
""",
}


def setup_py(folder: Path, torch: str, *command: str) -> None:
    """Runs setup.py with a torch of the given version. Its metadata go to `folder`."""
    fake = folder / f"torch-{torch}"
    for name, text in TORCH.items():
        (fake / "torch" / name).parent.mkdir(parents=True, exist_ok=True)
        (fake / "torch" / name).write_text(text.format(version=torch))
    finished = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder), *command],
        cwd=paths.ROOT, env={**os.environ, "PYTHONPATH": str(fake)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr


def wheel_metadata(folder: Path, torch: str) -> email.message.Message:
    """Returns the metadata of a wheel of `make dist` for a torch version."""
    setup_py(folder, torch, "--tag-build", local_version(torch))
    return email.message_from_string((folder / "torch_backplane.egg-info" / "PKG-INFO").read_text(encoding="utf-8"))


def local_version(torch: str) -> str:
    made: str = runpy.run_path(str(paths.ROOT / "tools" / "dist.py"))["local_version"](torch)
    return made


def required(metadata: email.message.Message, name: str) -> list[Requirement]:
    """Returns the requirements of a distribution, without those of its extras."""
    every = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return [one for one in every if one.name == name and "extra" not in str(one.marker)]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> email.message.Message:
    return wheel_metadata(tmp_path_factory.mktemp("metadata"), "2.13.0")


class TestMetadata:
    @pytest.mark.parametrize(
        ("torch", "local", "requirement"),
        [
            ("2.11.0", "torch2.11", "<2.12,>=2.11"),
            ("2.12.1+cpu", "torch2.12", "<2.13,>=2.12"),
            ("2.13.0+cu130", "torch2.13", "<2.14,>=2.13"),
            ("2.15.0a0+git1234", "torch2.15.0a0.git1234", "==2.15.0a0+git1234"),
        ],
    )
    def test_wheel_requires_the_torch_that_it_is_for(
        self, torch: str, local: str, requirement: str, tmp_path: Path
    ) -> None:
        metadata = wheel_metadata(tmp_path, torch)
        assert metadata["Version"] == f"{VERSION}+{local}"
        (found,) = required(metadata, "torch")
        assert str(found.specifier) == requirement
        assert found.specifier.contains(torch, prereleases=True)

    @pytest.mark.parametrize(
        ("platform", "machine", "python", "implementation", "has_wheel"),
        [
            ("linux", "x86_64", "3.10", "CPython", True),
            ("linux", "aarch64", "3.15", "CPython", True),
            ("linux", "riscv64", "3.12", "CPython", False),
            ("linux", "x86_64", "3.16", "CPython", False),
            ("linux", "x86_64", "3.11", "PyPy", False),
            ("darwin", "arm64", "3.13", "CPython", True),
            ("win32", "AMD64", "3.14", "CPython", True),
            ("win32", "ARM64", "3.13", "CPython", False),
        ],
    )
    def test_pyopencl_is_required_where_it_has_wheels(
        self,
        platform: str,
        machine: str,
        python: str,
        implementation: str,
        has_wheel: bool,
        metadata: email.message.Message,
    ) -> None:
        (found,) = required(metadata, "pyopencl")
        assert found.marker is not None
        environment = {
            "sys_platform": platform, "platform_machine": machine, "python_version": python,
            "platform_python_implementation": implementation,
        }  # fmt: skip
        assert found.marker.evaluate(environment) is has_wheel

    def test_pyopencl_is_an_extra_everywhere(self, metadata: email.message.Message) -> None:
        every = metadata.get_all("Requires-Dist", [])
        assert 'pyopencl>=2022.1; extra == "opencl"' in every


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tarfile.TarFile]:
    folder = tmp_path_factory.mktemp("sdist")
    setup_py(folder, "2.12.0", "sdist", "--dist-dir", str(folder))
    with tarfile.open(folder / f"torch_backplane-{VERSION}.tar.gz") as file:
        yield file


class TestSourceDistribution:
    def test_admits_every_supported_torch(self, archive: tarfile.TarFile) -> None:
        file = archive.extractfile(f"torch_backplane-{VERSION}/PKG-INFO")
        assert file is not None
        metadata = email.message_from_bytes(file.read())
        assert metadata["Version"] == VERSION
        assert [str(one.specifier) for one in required(metadata, "torch")] == ["<2.16,>=2.11"]

    def test_contains_what_build_tests_and_documentation_read(self, archive: tarfile.TarFile) -> None:
        found = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        folders = ("torch_backplane", "csrc", "tests", "tools", "examples", "benchmarks", "docs", "results")
        made = {"torch_backplane/_built_for.py", "csrc/fallback/structured_metas.inc"}
        expected = {
            path.relative_to(paths.ROOT).as_posix()
            for folder in folders
            for path in (paths.ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".so", ".pyc")
        }
        assert expected - found == made & expected
        assert not found & made
        assert {"Makefile", "mkdocs.yml", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= found
        assert not [name for name in found if name.endswith((".so", ".pyc"))]


def write_wheel(folder: Path, name: str, version: str, requires: list[str]) -> Path:
    """Writes a wheel that contains nothing but its metadata."""
    stem = f"{name}-{version}"
    requirements = "".join(f"Requires-Dist: {one}\n" for one in requires)
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirements}"
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for torch in ("2.12.1", "2.13.0"):
        write_wheel(folder, "torch", torch, [])
        metadata = wheel_metadata(tmp_path_factory.mktemp("metadata"), torch)
        write_wheel(folder, "torch_backplane", metadata["Version"], metadata.get_all("Requires-Dist", []))
    write_wheel(folder, "torch", "2.14.0", [])
    for name in ("rich", "typer", "pyopencl"):
        write_wheel(folder, name, "2026.1", [])
    return folder


class TestPipChooses:
    """A folder has wheels for two torch releases, and an environment one torch."""

    def install(self, folder: Path, environment: Path, torch: str, *arguments: str) -> dict[str, str] | None:
        """Returns what pip would install where `torch` is installed, or None if it refuses."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
        (site,) = environment.glob("lib/python*/site-packages")
        with zipfile.ZipFile(folder / f"torch-{torch}-py3-none-any.whl") as wheel:
            wheel.extractall(site)
        pip = ["-m", "pip", "--isolated", "--python", str(environment), "install", "--dry-run", "-q", "--no-index"]
        report = environment / "report.json"
        finished = subprocess.run(
            [sys.executable, *pip, "--find-links", str(folder), "--report", str(report), *arguments],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if finished.returncode != 0:
            assert "ResolutionImpossible" in finished.stderr
            return None
        chosen = [one["metadata"] for one in json.loads(report.read_text())["install"]]
        return {one["name"].replace("_", "-"): one["version"] for one in chosen}

    @pytest.mark.parametrize("torch", ["2.12.1", "2.13.0"])
    def test_wheel_of_the_named_torch(self, torch: str, folder: Path, tmp_path: Path) -> None:
        minor = torch.rsplit(".", 1)[0]
        chosen = self.install(folder, tmp_path / "venv", torch, "torch-backplane", f"torch=={minor}.*")
        assert chosen is not None
        assert chosen["torch-backplane"] == f"{VERSION}+torch{minor}"
        assert "torch" not in chosen  # the installed one stays

    def test_wheel_by_its_version(self, folder: Path, tmp_path: Path) -> None:
        chosen = self.install(folder, tmp_path / "venv", "2.12.1", f"torch-backplane=={VERSION}+torch2.12")
        assert chosen is not None
        assert chosen["torch-backplane"] == f"{VERSION}+torch2.12"
        assert "torch" not in chosen

    def test_torch_without_a_wheel_is_refused(self, folder: Path, tmp_path: Path) -> None:
        assert self.install(folder, tmp_path / "venv", "2.14.0", "torch-backplane", "torch==2.14.*") is None

    def test_wheel_for_another_torch_is_refused(self, folder: Path, tmp_path: Path) -> None:
        (wheel,) = folder.glob("torch_backplane-*torch2.13*")
        assert self.install(folder, tmp_path / "venv", "2.12.1", str(wheel), "torch==2.12.*") is None
