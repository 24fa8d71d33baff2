"""Builds the extension module `torch_backplane._C` against the installed PyTorch."""

import os
import pathlib
import re
import sys

from setuptools import setup

ROOT = pathlib.Path(__file__).resolve().parent


def supported_releases() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first and last supported torch release, as declared in pyproject.toml."""
    match = re.search(r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if match is None:
        sys.exit('pyproject.toml must declare the supported torch as "torch>=A.B,<C.D" in its dependencies')
    first_major, first_minor, end_major, end_minor = map(int, match.groups())
    return (first_major, first_minor), (end_major, end_minor - 1)


def check_torch() -> str:
    """Return the version of the installed torch. Exits with an error if torch is missing or not supported."""
    first, last = supported_releases()
    supported = "{}.{} to {}.{}".format(*first, *last)
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
    if not first <= release <= last:
        sys.exit(f"torch-backplane supports torch {supported}, and torch {torch.__version__} is installed")
    return torch.__version__


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
        marker.write_text(f'"""Written by setup.py."""\n\nTORCH = "{TORCH_VERSION}"\n', encoding="utf-8")




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
            extra_compile_args=[
                "-std=c++20", *OPTIMIZE, "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter",
            ],
            extra_link_args=SANITIZERS[SANITIZER] or ["-s"],
        )
    ],
    cmdclass={"build_ext": Build},
)  # fmt: skip
