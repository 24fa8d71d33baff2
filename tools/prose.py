"""Finds phrases that this project has overused, in comments, docstrings, messages and pages. Part of `make lint`.

    python tools/prose.py           # all tracked files
    python tools/prose.py FILE...
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {"", ".py", ".cpp", ".h", ".md", ".sh", ".toml", ".yml"}  # "": Makefile and its like

# Pattern: what to write instead.
PHRASES = {
    r"\bat once\b": "immediately, or at the same time",
    r"\bbeside\b": "next to, in addition to, compared with",
    r"(^|[.#/\"] )Who \w+s\b": "name the subject",
    r"\bhas the words\b": "raises the error, contains the text",
    r"\bwhat lies\b": "name the thing",
    r"\bto be had\b": "available",
    r"\bis told of\b": "is informed about, gets",
    r"\bof its own\b": "own, separate",
    r"\bof any kind\b": "any",
    r"\bso many\b": "as many, this number of",
    r"\b(nobody|somebody|anybody)\b": "name the user, caller or thread",
    r"\bgoes? through\b": "iterates over",
    r"\btakes? down\b": "records",
    r"\bfinds? fit\b": "chooses",
    r"\btried on\b": "tested on",
    r"\bhas the call\b": "runs",
    r"\b(times|calls|runs) in a row\b": "consecutive",
    r"\bby (its|their) (own )?way\b": "by this method",
    r"\bwhere there (is|are) (none|no|one)\b": "if there is none, no or one",
    r"\b(and|but) is none\b": "but is not one",
    r"\bit has been (tried|measured)\b": "tested on, measured on",
    r"\bruns in a circle\b": "busy-waits",
    r"\bside by side\b": "next to each other, in parallel",
    r"\btold (apart|of)\b": "distinguished, informed",
    r"\bas (ever|it stands)\b": "unchanged",
    r"\bwhatever comes\b": "everything that",
}


def findings(path: Path) -> list[str]:
    """A line for each phrase in the file."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for pattern, instead in PHRASES.items():
            for match in re.finditer(pattern, line):
                where = path.relative_to(ROOT)
                found.append(f"{where}:{number}: «{match[0].strip()}»: write {instead}")
    return found


def main() -> int:
    listed = sys.argv[1:] or subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    paths = [ROOT / name for name in listed if Path(name).suffix in SUFFIXES and name != "tools/prose.py"]
    found = [line for path in paths if path.is_file() for line in findings(path)]
    print(*found, sep="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
