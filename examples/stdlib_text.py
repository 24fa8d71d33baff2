"""The data set of train_gpt.py: the sources of the Python standard library, as characters.

The vocabulary is newline and the 95 printable ASCII characters. A tab becomes a space, any other character a question
mark.
"""

from __future__ import annotations

import hashlib
import pathlib
import sysconfig

import torch

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
# Third-party packages, tests, tables and generated files.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
HELD_OUT_SHARE = 0.06

_INDEX = {character: index for index, character in enumerate(ALPHABET)} | {"\t": ALPHABET.index(" ")}
_TO_TOKENS = bytes(_INDEX.get(chr(byte), ALPHABET.index("?")) for byte in range(256))


def encode(text: str) -> torch.Tensor:
    """Return one uint8 token per character, on the CPU."""
    return torch.frombuffer(bytearray(text.encode("ascii", "replace").translate(_TO_TOKENS)), dtype=torch.uint8)


def decode(tokens: torch.Tensor) -> str:
    """Return the text of a one-dimensional tensor of tokens."""
    return "".join(ALPHABET[token] for token in tokens.tolist())


def source_files() -> list[pathlib.Path]:
    """Return the Python files of the standard library, in an order that does not depend on the file system."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    return sorted(path for path in files if not path.name.startswith("_sysconfigdata"))


def is_held_out(name: str) -> bool:
    """Return whether the file `name` (relative to the library) is held out for evaluation: a fixed share, by hash."""
    return hashlib.sha256(name.encode()).digest()[0] < HELD_OUT_SHARE * 256


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training text and the held-out text as uint8 tokens. Each file always belongs to the same text."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[str]] = {False: [], True: []}
    for path in source_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        parts[is_held_out(path.relative_to(root).as_posix())].append(text)
    if not parts[False] or not parts[True]:
        raise FileNotFoundError(
            f"no Python sources for training under {root}: this Python's standard library is compiled or incomplete"
        )
    return encode("".join(parts[False])), encode("".join(parts[True]))
