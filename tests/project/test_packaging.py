"""Tests building and installing: supported torch releases, contents of the wheel, and autoloading by PyTorch."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import paths
import pytest
import torch

SUPPORTED = "2.11 to 2.15"


def python(*arguments: str, cwd: pathlib.Path = paths.ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a new interpreter."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )


def evaluate(program: str, cwd: pathlib.Path = paths.ROOT, **environment: str) -> str:
    """Runs a program, which must succeed, and returns its stripped stdout."""
    finished = python("-c", program, cwd=cwd, **environment)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


class TestTorchIsChecked:
    def setup_py(self, folder: pathlib.Path, fake_torch: str) -> subprocess.CompletedProcess[str]:
        """Runs setup.py with the module `torch` replaced by the source `fake_torch`."""
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text(fake_torch)
        return python("setup.py", "--name", PYTHONPATH=str(folder))

    @pytest.mark.parametrize("version", ["1.13.1", "2.10.0", "2.10.2+cu128", "2.16.0", "3.0.0", "unknown"])
    def test_other_releases_are_rejected(self, version: str, tmp_path: pathlib.Path) -> None:
        finished = self.setup_py(tmp_path, f"__version__ = {version!r}")
        assert finished.returncode != 0
        assert f"supports torch {SUPPORTED}, and torch {version} is installed" in finished.stderr
        assert "Traceback" not in finished.stderr

    @pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.3", "2.15.0a0+git1234"])
    def test_supported_releases_pass(self, version: str, tmp_path: pathlib.Path) -> None:
        finished = self.setup_py(tmp_path, f"__version__ = {version!r}")
        assert "No module named 'torch.utils'" in finished.stderr  # fails after the check, as the fake torch is empty

    def test_missing_torch_is_named(self, tmp_path: pathlib.Path) -> None:
        finished = self.setup_py(tmp_path, "raise ModuleNotFoundError(\"No module named 'torch'\")")
        assert finished.returncode != 0
        assert f"needs an installed PyTorch ({SUPPORTED})" in finished.stderr
        assert "No module named 'torch'" in finished.stderr
        assert "pip install --no-build-isolation ." in finished.stderr
        assert "Traceback" not in finished.stderr



class TestReadme:
    readme = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    install = (paths.ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    environment = (paths.ROOT / "docs" / "environment.md").read_text(encoding="utf-8")

    def test_readme_names_the_supported_torch(self) -> None:
        assert f"PyTorch {SUPPORTED}" in self.readme
        assert f"| PyTorch | {SUPPORTED};" in self.install

    def test_install_page_names_the_torch_that_make_installs(self) -> None:
        (release,) = re.findall(r"^TORCH \?= torch==(\d+\.\d+)", (paths.ROOT / "Makefile").read_text(), re.MULTILINE)
        assert f"installs PyTorch {release} and" in " ".join(self.install.split())

    def test_every_environment_variable_is_listed(self) -> None:
        files = [*paths.ROOT.glob("torch_backplane/**/*.py"), *paths.ROOT.glob("csrc/**/*.*")]
        text = "".join(path.read_text(encoding="utf-8") for path in files)
        used = set(re.findall(r"TORCH_BACKPLANE_[A-Z_]+", text))
        listed = set(re.findall(r"^\| `(TORCH_BACKPLANE_[A-Z_]+)`", self.environment, re.MULTILINE))
        assert listed == used

    def test_first_program_runs(self, tmp_path: pathlib.Path) -> None:
        (program,) = re.findall(r"```python\n(.*?)```", self.readme, re.DOTALL)
        printed = evaluate(program, cwd=tmp_path)
        assert float(printed.splitlines()[0]) < 0.5
        assert (tmp_path / "model.pt").exists()


class TestAutoload:
    def test_import_torch_registers_bp(self) -> None:
        assert evaluate("import torch; print(torch.zeros(2, device='bp').device.type)") == "bp"

    def test_autoload_can_be_disabled(self) -> None:
        program = "import torch; print(hasattr(torch, 'bp'))"
        assert evaluate(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False"

    def test_import_registers_bp_without_autoload(self) -> None:
        program = "import torch, torch_backplane; print(torch.zeros(2, device='bp').device.type)"
        assert evaluate(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "bp"

    def test_import_loads_no_heavy_modules(self) -> None:
        program = "import sys, torch; old = set(sys.modules); import torch_backplane; print(*set(sys.modules) - old)"
        added = {name.split(".")[0] for name in evaluate(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split()}
        assert "torch_backplane" in added
        assert not added & {"rich", "typer", "click", "numpy", "matplotlib", "sympy", "setuptools"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Builds a wheel of this checkout and installs it (not editable) in a folder."""
    for leftover in (paths.ROOT / "build").glob("lib*"):  # otherwise the wheel contains files of earlier builds
        shutil.rmtree(leftover)
    folder = tmp_path_factory.mktemp("wheel")
    pip = ["-m", "pip", "--disable-pip-version-check"]
    built = python(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), ".")
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("torch_backplane-*.whl")
    target = folder / "site"
    done = python(*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.timeout(1500)  # compiles everything if the object files of the last build cannot be reused
class TestWheel:
    def test_wheel_contains_every_module_and_the_extension(self, installed: pathlib.Path) -> None:
        package = paths.ROOT / "torch_backplane"
        kinds = (".py", ".json", ".md", ".cpp")
        sources = {path.relative_to(package) for path in package.rglob("*") if path.suffix in kinds}
        place = installed / package.name
        found = {path.relative_to(place) for path in place.rglob("*") if path.suffix in kinds}
        assert found == sources
        assert list((installed / package.name).glob("_C*.so"))

    def test_works_without_the_checkout(self, installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
        program = """
import torch
print((torch.ones(3, device="bp") * 2).sum().item())
import torch_backplane
print(torch_backplane.__file__)
"""
        result, path = evaluate(program, cwd=tmp_path, PYTHONPATH=str(installed)).splitlines()
        assert result == "6.0"
        assert pathlib.Path(path).is_relative_to(installed)

    def test_entry_points(self, installed: pathlib.Path) -> None:
        (metadata,) = installed.glob("torch_backplane-*.dist-info")
        text = (metadata / "entry_points.txt").read_text()
        groups = dict(re.findall(r"\[([^]]+)]\n([^[]*)", text))
        assert "torch_backplane:_autoload" in groups["torch.backends"]
        assert "host = " in groups["torch_backplane.drivers"]
        assert "backplane = " in groups["console_scripts"]

    def test_licence_is_included(self, installed: pathlib.Path) -> None:
        (licence,) = installed.glob("torch_backplane-*.dist-info/licenses/LICENSE")
        assert "The Backplane authors" in licence.read_text()


class TestSetupScript:
    """Tests tools/setup.sh with a PATH of a few tools, and a `.venv` whose Python only records its arguments."""

    @pytest.fixture
    def machine(self, tmp_path: pathlib.Path) -> pathlib.Path:
        """Creates programs for a user who cannot install packages; there is no C++ compiler."""
        tools = tmp_path / "bin"
        tools.mkdir()
        for name in ("bash", "dirname", "tr", "env", "cat"):
            (tools / name).symlink_to(str(shutil.which(name)))
        self.program(tools / "id", "echo 1000")
        self.program(tools / "python3", f'exec {sys.executable} "$@"')
        self.program(tmp_path / "venv/bin/python", f'echo "$@" >> {tmp_path}/notes')
        return tmp_path

    def program(self, path: pathlib.Path, script: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)

    def setup(self, machine: pathlib.Path, wanted: str = "", *last: str) -> subprocess.CompletedProcess[str]:
        script = [str(shutil.which("bash")), str(paths.ROOT / "tools/setup.sh")]
        return subprocess.run(
            [*script, "python3", str(machine / "venv"), wanted, "torch==0.default", *last],
            env={"PATH": str(machine / "bin")},
            capture_output=True,
            text=True,
        )

    def test_setup_names_missing_programs(self, machine: pathlib.Path) -> None:
        finished = self.setup(machine)
        assert finished.returncode == 1
        assert "missing: g++" in finished.stderr
        assert "apt-get install g++" in finished.stderr
        assert not (machine / "notes").exists()

    def test_setup_as_root_installs_missing_programs(self, machine: pathlib.Path) -> None:
        self.program(machine / "bin/id", "echo 0")
        install = f'[ "$1" = update ] || exec {shutil.which("ln")} -s {shutil.which("true")} {machine}/bin/g++'
        self.program(machine / "bin/apt-get", f'echo "apt-get $@" >> {machine}/notes; {install}')
        finished = self.setup(machine)
        assert finished.returncode == 0, finished.stderr
        notes = (machine / "notes").read_text()
        assert "apt-get install -q -y --no-install-recommends g++" in notes
        assert "--no-build-isolation -e .[test]" in notes

    def test_setup_keeps_a_supported_torch(self, machine: pathlib.Path) -> None:
        self.program(machine / "bin/g++", "")
        assert self.setup(machine).returncode == 0
        assert "torch==0.default" not in (machine / "notes").read_text()

    def test_setup_replaces_an_unsupported_torch(self, machine: pathlib.Path) -> None:
        self.program(machine / "bin/g++", "")
        self.program(machine / "venv/bin/python", f'echo "$@" >> {machine}/notes; [ "$1" != setup.py ]')
        assert self.setup(machine).returncode == 0
        assert "install torch==0.default" in (machine / "notes").read_text()

    def test_setup_installs_the_requested_torch(self, machine: pathlib.Path) -> None:
        self.program(machine / "bin/g++", "")
        assert self.setup(machine, wanted="torch==0.mine").returncode == 0
        notes = (machine / "notes").read_text()
        assert "install torch==0.mine" in notes
        assert "torch==0.default" not in notes

    def test_setup_for_wheels_builds_nothing(self, machine: pathlib.Path) -> None:
        self.program(machine / "bin/g++", "")
        assert self.setup(machine, "torch==0.mine", "torch").returncode == 0
        notes = (machine / "notes").read_text()
        assert "install torch==0.mine" in notes
        assert "-e .[test]" not in notes


class TestAnotherTorchThanCompiledFor:
    """`torch_backplane._built_for`, which the build writes, is checked before the extension module is loaded."""

    def run(
        self, folder: pathlib.Path, program: str, version: str = "0.1.0", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        (folder / "sitecustomize.py").write_text(
            "import sys, types\n"
            f"sys.modules['torch_backplane._built_for'] = types.SimpleNamespace(TORCH='2.10.0', VERSION={version!r})\n"
        )
        path = os.pathsep.join(map(str, (folder, paths.ROOT)))
        return python("-c", program, cwd=folder, PYTHONPATH=path, **environment)

    def test_import_error_names_the_reinstall_command(self, tmp_path: pathlib.Path) -> None:
        for program in ("import torch_backplane", "import torch; import torch_backplane"):
            finished = self.run(tmp_path, program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
            assert finished.returncode == 1
            assert "ImportError: torch_backplane was compiled for torch 2.10.0, and torch 2." in finished.stderr
            assert "pip install --no-build-isolation --force-reinstall --no-deps ." in finished.stderr

    def test_import_error_of_a_wheel_names_the_wheel_to_install(self, tmp_path: pathlib.Path) -> None:
        finished = self.run(tmp_path, "import torch_backplane", "0.1.0+torch2.10", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert finished.returncode == 1
        minor = ".".join(torch.__version__.split(".")[:2])
        assert "ImportError: torch_backplane was compiled for torch 2.10.0, and torch 2." in finished.stderr
        assert f'pip install --no-deps "torch-backplane==0.1.0+torch{minor}" --find-links FOLDER' in finished.stderr
        assert "torch_backplane-0.1.0.tar.gz" in finished.stderr
        assert "source folder" not in finished.stderr

    def test_development_versions_have_no_wheels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch_backplane import _release

        built_for = types.SimpleNamespace(TORCH="2.10.0", VERSION="0.1.0+torch2.10")
        monkeypatch.setitem(sys.modules, "torch_backplane._built_for", built_for)
        reason = _release.misfit("2.15.0a0+git1234567")
        assert reason is not None
        assert "torch_backplane-0.1.0.tar.gz" in reason
        assert "--find-links" not in reason

    def test_extension_module_is_not_loaded(self, tmp_path: pathlib.Path) -> None:
        program = (
            "import sys, torch\n"
            "try: import torch_backplane\n"
            "except ImportError: pass\n"
            "assert 'torch_backplane._C' not in sys.modules\n"
            "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'"
        )
        for autoload in ("0", "1"):
            assert self.run(tmp_path, program, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload).returncode == 0

    def test_torch_warns_once_and_still_works(self, tmp_path: pathlib.Path) -> None:
        program = "import torch; assert (torch.ones(2) + 1).sum() == 4; assert not hasattr(torch, 'bp')"
        finished = self.run(tmp_path, program)
        assert finished.returncode == 0, finished.stderr
        assert finished.stderr.count("compiled for torch 2.10.0") == 1
        again = self.run(tmp_path, "import torch; import torch_backplane")
        assert again.returncode == 1
        assert "ImportError: torch_backplane was compiled for torch 2.10.0" in again.stderr

    def test_other_patch_releases_are_compatible(self) -> None:
        from torch_backplane._release import release

        assert release("2.13.0+cpu") == release("2.13.1") == release("2.13.0+cu128")
        assert release("2.13.0") != release("2.14.0")
        assert release("2.15.0a0+git1234567") != release("2.15.0a0+git7654321") != release("2.15.0")
