"""Builds OpenCL implementations (ICDs) that misbehave when the OpenCL loader loads or lists them."""

from __future__ import annotations

import subprocess
from pathlib import Path

# What an implementation does when it is loaded.
FAULTS = {
    "crashes": "__builtin_trap();",
    "aborts": "std::abort();",
    "exits": "std::_Exit(3);",
    "hangs": "pause();",
    "is killed": "raise(SIGKILL);",
    "crashes as the second": 'if (std::getenv("LOADED")) std::abort(); setenv("LOADED", "1", 1);',
    "is empty": "",
}


def build(folder: Path, name: str, fault: str) -> Path:
    """Builds the library and its .icd file in `folder`. Returns the .icd file."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"lib{name}.so"
    source = f"""
#include <csignal>
#include <cstdlib>
#include <unistd.h>
__attribute__((constructor)) static void load() {{ {FAULTS[fault]} }}
extern "C" void* clGetExtensionFunctionAddress(const char*) {{ return nullptr; }}
"""
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-o", str(library), "-x", "c++", "-"],
        input=source, text=True, capture_output=True, check=True,
    )  # fmt: skip
    return icd(folder, name, str(library))


def icd(folder: Path, name: str, library: str) -> Path:
    """Writes the .icd file of a library."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.icd"
    file.write_text(f"{library}\n")
    return file
