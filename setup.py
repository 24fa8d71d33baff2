"""Builds the extension module `torch_backplane._C` against the installed PyTorch."""

import os
import pathlib
import re
import runpy
import sys

from setuptools import setup
from setuptools.command.sdist import sdist

ROOT = pathlib.Path(__file__).resolve().parent
# The supported torch releases: the first, and the first that is not supported.
FIRST, END = (2, 11), (2, 16)
# PyPI has wheels of PyOpenCL for these. Elsewhere it must be compiled, and is the extra `opencl`.
HAS_PYOPENCL_WHEEL = (
    "platform_python_implementation == 'CPython' and python_version < '3.16' and ("
    "(sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')) or "
    "sys_platform == 'darwin' or (sys_platform == 'win32' and platform_machine == 'AMD64'))"
)


def check_torch() -> str:
    """Return the version of the installed torch. Exits with an error if torch is missing or not supported."""
    supported = f"{FIRST[0]}.{FIRST[1]} to {END[0]}.{END[1] - 1}"
    try:
        import torch
    except ImportError as error:
        sys.exit(
            f"torch-backplane needs an installed PyTorch ({supported}) to build against.\n"
            f"`import torch` failed: {error}\n"
            "Install torch first, then run\n"
            "    pip install --no-build-isolation ."
        )
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    if not FIRST <= release < END:
        sys.exit(f"torch-backplane supports torch {supported}, and torch {torch.__version__} is installed")
    return torch.__version__


def dependencies(torch_version: str | None) -> list[str]:
    """Return the run-time dependencies of what is compiled for a torch version, or of the source distribution."""
    if torch_version is None:
        torch = f"torch>={FIRST[0]}.{FIRST[1]},<{END[0]}.{END[1]}"
    else:
        release = runpy.run_path(str(ROOT / "torch_backplane" / "_release.py"))["release"](torch_version)
        if len(release) == 2:
            torch = f"torch>={release[0]}.{release[1]},<{release[0]}.{int(release[1]) + 1}"
        else:  # a development version fits only itself
            torch = f"torch=={torch_version}"
    return [torch, "rich>=13", "typer>=0.12", f"pyopencl>=2022.1; {HAS_PYOPENCL_WHEEL}"]


# The build needs no backends, and must not load an earlier build of this one.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
# torch calls an installed ccache itself, and fails if CC or CXX already has it as a prefix.
for variable in ("CC", "CXX"):
    wrapper, _, compiler = os.environ.get(variable, "").partition(" ")
    if compiler and os.path.basename(wrapper) in ("ccache", "sccache"):
        os.environ[variable] = compiler
TORCH_VERSION = check_torch()

# TORCH_BACKPLANE_SANITIZE=address or thread is for `make asan` and `make tsan`; see tools/sanitize.sh.
# -fno-sanitize=vptr: PyTorch's libraries do not export the type information that this check needs.
SANITIZERS = {
    "": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize=vptr"],
    "thread": ["-fsanitize=thread"],
}
SANITIZER = os.environ.get("TORCH_BACKPLANE_SANITIZE", "")
if SANITIZER not in SANITIZERS:
    sys.exit(f"TORCH_BACKPLANE_SANITIZE={SANITIZER!r} is not valid: use address or thread")
# -O1 compiles in two thirds of the time of -O2, and keeps more calls in stack traces. -g1 includes line numbers.
OPTIMIZE = ["-O1", "-g1", "-fno-omit-frame-pointer", *SANITIZERS[SANITIZER]] if SANITIZER else ["-O2", "-g0"]

from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths  # noqa: E402

sys.path.insert(0, str(ROOT / "tools"))
from structured_metas import write_table  # noqa: E402


class Build(BuildExtension.with_options(use_ninja=True)):  # type: ignore[misc]
    """Keeps object files in one folder per Python and torch version, so that all kinds of install build incrementally.

    setuptools would use a new temporary folder for each editable install.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        suffix = f"-{SANITIZER}" if SANITIZER else ""
        self.build_temp = str(ROOT / "build" / f"objects-{sys.implementation.cache_tag}-torch-{TORCH_VERSION}{suffix}")

    def run(self) -> None:
        headers = next(path for one in include_paths() if (path := pathlib.Path(one, "ATen", "ops")).exists())
        write_table(headers, ROOT / "csrc" / "fallback" / "structured_metas.inc")
        super().run()
        # Read before the extension module is loaded (torch_backplane/_release.py).
        folder = ROOT if self.inplace else pathlib.Path(self.build_lib)
        marker = folder / "torch_backplane" / "_built_for.py"
        marker.write_text(
            f'"""Written by setup.py."""\n\nTORCH = "{TORCH_VERSION}"\nVERSION = "{self.distribution.get_version()}"\n',
            encoding="utf-8",
        )


class SourceDistribution(sdist):
    """Contains nothing compiled, so its metadata admits every supported torch."""

    def run(self) -> None:
        self.distribution.install_requires = self.distribution.metadata.install_requires = dependencies(None)
        super().run()


def compiler_options() -> dict[str, list[str]]:
    """Return the options of the compiler and the linker for this platform."""
    if sys.platform == "win32":
        return {"extra_compile_args": ["/std:c++20", "/Zc:__cplusplus", "/permissive-", "/O2"], "extra_link_args": []}
    warnings = ["-Wall", "-Wextra", "-Wno-unused-parameter"]
    return {
        "extra_compile_args": ["-std=c++20", *OPTIMIZE, "-fvisibility=hidden", *warnings],
        # -s leaves out the symbol table, which only debuggers read. Apple's linker does not have the option.
        "extra_link_args": SANITIZERS[SANITIZER] or ([] if sys.platform == "darwin" else ["-s"]),
    }


def sources() -> list[str]:
    """The files to compile, relative to ROOT: one for each folder of csrc, which includes the folder's files.

    PyTorch's headers take most of the time to compile a file, so this takes a third of the time. With
    TORCH_BACKPLANE_UNITY=0, and with sanitizers, each file is compiled by itself: rebuilds after small changes are
    faster, and missing includes are found.
    """
    files = sorted(path.relative_to(ROOT) for path in ROOT.glob("csrc/**/*.cpp"))
    if SANITIZER or os.environ.get("TORCH_BACKPLANE_UNITY") == "0":
        return [str(path) for path in files]
    folders: dict[pathlib.Path, list[pathlib.Path]] = {}
    for path in files:
        folders.setdefault(path.parent, []).append(path)
    unity = ROOT / "build" / "unity"
    unity.mkdir(parents=True, exist_ok=True)
    made = []
    for folder, members in folders.items():
        made.append(unity / ("_".join(folder.parts) + ".cpp"))
        text = "".join(f'#include "{path.relative_to("csrc").as_posix()}"\n' for path in members)
        if not made[-1].exists() or made[-1].read_text(encoding="utf-8") != text:  # keep its time: ninja compares them
            made[-1].write_text(text, encoding="utf-8")
    return [str(path.relative_to(ROOT)) for path in made]


setup(
    ext_modules=[
        CppExtension(
            "torch_backplane._C",
            sources(),
            # PyTorch's profiler header includes Kineto's headers without their folder.
            include_dirs=[
                str(ROOT / "csrc"),
                *(str(path) for one in include_paths() for path in pathlib.Path(one).glob("kineto")),
            ],
            **compiler_options(),
        )
    ],
    install_requires=dependencies(TORCH_VERSION),
    cmdclass={"build_ext": Build, "sdist": SourceDistribution},
)
