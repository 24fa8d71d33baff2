"""Which machine instructions a kernel has, and which its text means it to have."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from torch_backplane.ptxas.nvrtc import find

LOADS, STORES, PRODUCTS = "vector loads", "vector stores", "matrix instructions"
FRAGMENTS = "matrix loads"

# An access to device memory of 8 bytes or more, a product of matrices, or a load of factors from shared memory.
_FOUND = {
    LOADS: re.compile(r"\bLD(?:G|GSTS)?\.E(?:\.\w+)*\.(?:64|128|256)\b"),
    STORES: re.compile(r"\bSTG?\.E(?:\.\w+)*\.(?:64|128|256)\b"),
    PRODUCTS: re.compile(r"\b(?:[HIDBQ]MMA|[HIQ]GMMA|UTC\w*MMA)\b"),
    FRAGMENTS: re.compile(r"\bLDSM\b"),
}
# Without any of these, the compiler has found that the access is not needed.
_ANY = {LOADS: re.compile(r"\bLD(?:G|GSTS)?\.E\b"), STORES: re.compile(r"\bSTG?\.E\b")}
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(.*?) *;")
# Text of CudaCpp.load_lanes and store_lanes, and of instructions in asm.
_LOAD = re.compile(r"\(\(const Lanes<([\w ]+), (\d+)>\*\)\w+\)\[")
_STORE = re.compile(r"\(\(Lanes<([\w ]+), (\d+)>\*\)\w+\)\[[^;]*\] = ")
_PRODUCT, _FRAGMENT = re.compile(r"\bw?mma(?:_sync|\.sync)"), re.compile(r"\bldmatrix\.sync")
_COPY = re.compile(r"\bcopy_16_bytes\(&")  # a call
_BYTES = {
    **dict.fromkeys(("bool", "signed char", "unsigned char"), 1),
    **dict.fromkeys(("short", "ushort", "unsigned short"), 2),
    **dict.fromkeys(("int", "uint", "unsigned int", "float"), 4),
    **dict.fromkeys(("long long", "unsigned long long", "double", "float2"), 8),
    "double2": 16,
}


def meant(text: str) -> set[str]:
    """Return which of LOADS, STORES, PRODUCTS and FRAGMENTS a kernel's text means."""
    patterns = {LOADS: _COPY, PRODUCTS: _PRODUCT, FRAGMENTS: _FRAGMENT}
    found = {kind for kind, pattern in patterns.items() if pattern.search(text)}
    for kind, pattern in ((LOADS, _LOAD), (STORES, _STORE)):
        if any(_BYTES[type_name] * int(width) >= 8 for type_name, width in pattern.findall(text)):
            found.add(kind)
    return found


def machine_code(cubin: bytes, entry: str) -> bytes:
    """Return the section of a cubin, a 64-bit ELF file, that has the instructions of a kernel.

    Raises:
        ValueError: it has no such kernel.
    """
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<II4Q", cubin, start + number * size) for number in range(count)]
    for name, _, _, _, offset, length in sections:
        at = sections[names][4] + name
        if cubin[at : cubin.index(b"\0", at)] == f".text.{entry}".encode():
            return cubin[offset : offset + length]
    raise ValueError(f"the cubin has no kernel {entry}")


def disassemble(parts: Sequence[bytes], architecture: str) -> list[str]:
    """Return the instructions of each part of machine code as text. One process does all, because it starts slowly.

    Raises:
        Missing: nvdisasm is not installed.
        RuntimeError: it fails.
    """
    tool = find("*/bin/nvdisasm", "nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "code")
        file.write_bytes(b"".join(parts))
        command = [str(tool), "--binary", architecture.replace("_", "").upper(), str(file)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise RuntimeError(f"nvdisasm: {made.stderr.strip()}")
    ends = list(accumulate(map(len, parts)))
    found = [""] * len(parts)
    for address, instruction in _INSTRUCTION.findall(made.stdout):
        found[bisect_right(ends, int(address, 16))] += f"{instruction}\n"
    return found


def lacking(wanted: set[str], listing: str) -> tuple[str, ...]:
    """Return which of the kinds `wanted` disassembled code lacks.

    It lacks no loads if the compiler removed all loads.
    """
    lacks = (one for one in wanted if not _FOUND[one].search(listing))
    return tuple(sorted(one for one in lacks if one not in _ANY or _ANY[one].search(listing)))
