"""Writes the generated parts of the documentation: tables from the code, tables and plots from results/.

    python tools/pages.py          # writes them
    python tools/pages.py --check  # exits with 1 if a page is out of date

A generated part is the text between `<!-- generated: NAME -->` and `<!-- /generated -->` in README.md or
a page of docs/.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COUNTED_RELEASE = "2.13."  # the release of torch.cuda whose names torch-bp.md counts
PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def variables() -> Iterator[str]:
    """The environment variables of torch_backplane.settings."""
    from torch_backplane.settings import VARIABLES

    yield "| variable | meaning | values | default | takes effect |"
    yield "|---|---|---|---|---|"
    for name, one in VARIABLES.items():
        yield f"| `{name}` | {one.meaning} | {one.values} | {one.default} | {one.read} |"


def commands() -> Iterator[str]:
    """The commands of `python -m torch_backplane`, with their options."""
    import typer

    from torch_backplane.cli import app

    def described(command: Any, name: str) -> Iterator[str]:
        if hasattr(command, "commands"):
            for each, one in command.commands.items():
                yield from described(one, f"{name} {each}")
            return
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        options = [one for one in command.params if one.param_type_name == "option"]
        parts = [name, *(f"[{(one.metavar or one.name).upper()}]" for one in arguments), "[OPTIONS]" if options else ""]
        yield f"## {name.removeprefix('python -m torch_backplane ')}\n"
        yield f"    {' '.join(parts).rstrip()}\n"
        yield f"{(command.help or '').strip()}\n"
        if options:
            yield "| option | meaning | default |"
            yield "|---|---|---|"
        for one in options:
            value = f" {one.metavar}" if one.metavar else ""
            names = ", ".join(f"`{each}{value}`" for each in [*one.opts, *one.secondary_opts])
            shown = one.show_default if isinstance(one.show_default, str) else one.default
            default = "" if one.is_flag or shown in (None, "", ()) or callable(shown) else f"`{shown}`"
            yield f"| {names} | {one.help or ''} | {default} |".replace("NAME|FILE", "NAME\\|FILE")
        yield ""

    yield from described(typer.main.get_command(app), "python -m torch_backplane")


def parity() -> Iterator[str]:
    """How much of torch.cuda torch.bp has."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import cuda_parity

    yield cuda_parity.sentence()


def _of_results(name: str) -> Callable[[], Iterator[str]]:
    def lines() -> Iterator[str]:
        sys.path.insert(0, str(ROOT / "tools"))
        import results_pages

        yield from getattr(results_pages, name)()

    return lines


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "variables": variables,
    "commands": commands,
    "parity": parity,
    "benchmarks": _of_results("benchmarks"),
    "conformance": _of_results("conformance"),
    "operators": _of_results("operators"),
    "overview": _of_results("overview"),
    "ecosystem": _of_results("ecosystem"),
    "models": _of_results("models"),
    "ptxas": _of_results("ptxas"),
    "gpu": _of_results("gpu"),
}


def generated(text: str) -> str:
    """The page's text with its generated parts made anew."""

    def fill(match: re.Match[str]) -> str:
        if match[2] == "parity" and not torch.__version__.startswith(COUNTED_RELEASE):
            return match[0]
        return match[1] + "\n".join(PARTS[match[2]]()).rstrip("\n") + "\n" + match[3]

    return PART.sub(fill, text)


def pages() -> Iterator[tuple[Path, str, str]]:
    """The path, the text and the new text of each page that has generated parts."""
    for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if PART.search(text):
            yield path, text, generated(text)


def main() -> int:
    stale: list[Any] = []
    for path, text, new in pages():
        if text != new:
            stale.append(path.relative_to(ROOT))
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if stale:
        print("out of date:" if "--check" in sys.argv else "wrote:", *stale)
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
