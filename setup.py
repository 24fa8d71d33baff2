"""Builds the compiled part, `torch_backplane._C`, against the PyTorch that is installed."""

import os
import pathlib
import re
import sys

from setuptools import setup

# `import torch` below must not load the torch_backplane that is about to be built again.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

TORCH_RANGE = ((2, 11), (2, 15))  # first and last supported release
ROOT = pathlib.Path(__file__).parent


def check_torch() -> None:
    """Refuse to build, by name and with the supported range, where torch is missing or of another release."""
    supported = " to ".join(f"{major}.{minor}" for major, minor in TORCH_RANGE)
    try:
        import torch
    except ImportError:
        sys.exit(
            f"torch-backplane needs an installed PyTorch ({supported}) to build against: install torch first, then run\n"
            "    pip install --no-build-isolation ."
        )
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    if not TORCH_RANGE[0] <= release <= TORCH_RANGE[1]:
        sys.exit(f"torch-backplane supports torch {supported}, and torch {torch.__version__} is installed")


check_torch()
from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: E402

setup(
    ext_modules=[
        CppExtension(
            "torch_backplane._C",
            sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.cpp")),
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args=["-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"],
            extra_link_args=["-s"],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
)
