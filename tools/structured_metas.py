"""Writes the table of PyTorch's structured meta functions, which csrc/fallback/structured_meta.cpp includes.

A structured operator has C++ functions that check a call and compute the metadata of its results, such as
`at::meta::add_outf`. The table is generated from the headers of the PyTorch that Backplane is built against.
"""

import pathlib
import re

SCHEMA = re.compile(
    r'using schema = (.*?);.*?const char\* name = "(.*?)";.*?const char\* overload_name = "(.*?)";', re.DOTALL
)
FUNCTION = re.compile(r"TORCH_API (.*?) (\w+)\((.*)\);")


def write_table(headers: pathlib.Path, target: pathlib.Path) -> None:
    """Generate the table from the headers in ATen/ops, and write `target` if its contents change.

    The table has an #include for each operator, and STRUCTURED_META(type, function, "aten::add.out") for each overload.
    """
    # Some headers of other operators also end with "_meta.h".
    bases = sorted(
        path.name.removesuffix("_meta.h")
        for path in headers.glob("*_meta.h")
        if "struct TORCH_API structured_" in path.read_text(encoding="utf-8")
    )
    includes, rows = [], []
    for base in bases:
        functions = _functions((headers / f"{base}_meta_dispatch.h").read_text(encoding="utf-8"))
        includes.append(f"#include <ATen/ops/{base}_meta_dispatch.h>")
        for kind, name, overload in SCHEMA.findall((headers / f"{base}_ops.h").read_text(encoding="utf-8")):
            own = name.partition("::")[2]
            for candidate in (own, f"{own}_symint", f"{own}_outf", f"{own}_symint_outf"):
                if (candidate, _squeezed(kind)) in functions:
                    full = f"{name}.{overload}" if overload else name
                    rows.append(f'STRUCTURED_META(({kind}), {candidate}, "{full}")')
                    break
    lines = ["#ifdef STRUCTURED_META", *rows, "#else", *includes, "#endif"]
    text = "// Written by tools/structured_metas.py.\n" + "\n".join(lines) + "\n"
    if not target.exists() or target.read_text(encoding="utf-8") != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def _functions(header: str) -> set[tuple[str, str]]:
    """Return (name, type) of the functions that a header declares."""
    found = set()
    for result, name, parameters in FUNCTION.findall(header):
        types = [_type(parameter) for parameter in _split(parameters)]
        found.add((name, _squeezed(f"{result} ({', '.join(types)})")))
    return found


def _split(parameters: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in parameters:
        depth += (letter in "<({") - (letter in ">)}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _type(parameter: str) -> str:
    return parameter.partition("=")[0].rstrip().rpartition(" ")[0]


def _squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)
