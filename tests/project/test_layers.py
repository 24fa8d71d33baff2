"""Tests that includes and imports follow the layers in docs/architecture.md: they only point downwards."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import paths
import pytest

# From lowest to highest. A folder can include its own files and those of the folders before it.
CSRC = (
    "devices", "drivers", "streams", "memory", "c10", "fallback", "plans", "aten", "graphs", "distributed", "python",
)  # fmt: skip
# What each part of the package can import besides itself.
PACKAGE = {
    "kernels": set(),
    "drivers": {"_C", "kernels"},
    "tuning": {"_C", "_release", "preferences"},
    "planning": {"_C", "drivers", "kernels", "preferences", "tuning"},
    "operators": {"_C", "kernels", "planning", "tuning"},
    "accelerator": {"_C", "drivers", "operators", "tuning"},
    "compile": {
        "_C", "accelerator", "drivers", "kernels", "operators", "planning", "preferences", "triton_driver", "tuning",
    },
    "triton_driver": {"_C", "accelerator", "drivers", "planning"},
    "interpreter": {"drivers"},
    "sanitizer": {"_C", "drivers", "interpreter", "kernels"},
    "conformance": {"_C", "drivers", "sanitizer"},
    "audit": {"_C", "compile_report", "drivers", "interpreter", "kernels", "operators", "planning", "tuning"},
    "ptxas": {"_C", "audit", "conformance", "drivers", "kernels"},
    "compile_report": {"compile"},
    "memory_plot": set(),
    "integrations": {"accelerator", "distributed"},
    "as_cuda": {"_C", "accelerator", "backends"},
    "testing": {"_C"},
    "cli": {
        "_C", "accelerator", "as_cuda", "audit", "compile_report", "conformance", "drivers", "integrations",
        "interpreter", "kernels", "memory_plot", "ptxas", "tuning",
    },
}
# Tools: programs load them only on request.
TOOLS = {
    "as_cuda", "audit", "cli", "compile_report", "conformance", "integrations", "interpreter", "memory_plot",
    "ptxas", "sanitizer", "testing",
}  # fmt: skip


def test_csrc_folders_are_listed() -> None:
    assert {path.name for path in (paths.ROOT / "csrc").iterdir() if path.is_dir()} == set(CSRC)
    assert {path.name for path in (paths.ROOT / "csrc").iterdir() if path.is_file()} == {"bindings.h", "compat.h"}


@pytest.mark.parametrize("folder", CSRC)
def test_includes_point_downwards(folder: str) -> None:
    allowed = CSRC[: CSRC.index(folder) + 1]
    upwards = [
        f"{path.name} includes {name}"
        for path in (paths.ROOT / "csrc" / folder).rglob("*")
        if path.suffix in (".cpp", ".h")
        for name in re.findall(r'^#include "([\w./]+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
        if "/" in name and name.partition("/")[0] not in allowed
    ]
    assert not upwards


def included() -> dict[str, set[str]]:
    """Returns each part of the runtime (a header with its source file) and the parts that it includes."""
    found: dict[str, set[str]] = {}
    for path in (paths.ROOT / "csrc").rglob("*"):
        if path.suffix in (".cpp", ".h"):
            name = str(path.relative_to(paths.ROOT / "csrc").with_suffix(""))
            includes = re.findall(r'^#include "([\w./]+)\.h"', path.read_text(encoding="utf-8"), re.MULTILINE)
            found.setdefault(name, set()).update(set(includes) - {name})
    return found


# Source files that include a header which depends on their own header.
KNOWN_CIRCLES = {
    ("devices/command", "devices/compiled_kernel"),  # a stored command keeps its kernel alive
    ("devices/command", "devices/queue_function"),
    ("streams/device_errors", "streams/stream"),  # reading the error words needs a stream
    ("drivers/native_launcher", "drivers/c_launcher"),  # selection of the launcher
    ("drivers/native_launcher", "drivers/opencl/opencl_launcher"),
}


def test_runtime_has_no_include_cycles() -> None:
    includes = included()
    assert len(includes) > 80
    for part, needed in KNOWN_CIRCLES:
        includes[part].remove(needed)
    includes = {name: needed & set(includes) for name, needed in includes.items()}
    while free := {name for name, needed in includes.items() if not needed}:
        includes = {name: needed - free for name, needed in includes.items() if name not in free}
    assert includes == {}, "cycles, and the parts that depend on them"


def test_only_bindings_and_launcher_selection_include_drivers() -> None:
    drivers = {path.name for path in (paths.ROOT / "csrc" / "drivers").iterdir() if path.is_dir()}
    assert drivers == {"cuda", "hip", "host", "opencl"}
    outside = {
        name
        for name, needed in included().items()
        if any(one.startswith(tuple(f"drivers/{driver}/" for driver in drivers)) for one in needed)
        and not name.startswith(tuple(f"drivers/{driver}/" for driver in drivers))
    }
    assert outside == {"python/driver_bindings", "drivers/native_launcher"}


def imported(path: pathlib.Path) -> set[str]:
    """Returns the parts of the package that a file imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch_backplane":
            parts = str(node.module).split(".")[1:]
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("torch_backplane.")}
    return found


@pytest.mark.parametrize("part", PACKAGE)
def test_imports_point_downwards(part: str) -> None:
    for path in (paths.ROOT / "torch_backplane" / part).rglob("*.py"):
        assert imported(path) <= PACKAGE[part] | {part}, path


def modules() -> dict[str, pathlib.Path]:
    """Returns the package's Python modules by name."""
    found = {}
    for path in (paths.ROOT / "torch_backplane").rglob("*.py"):
        parts = path.relative_to(paths.ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def modules_imported(path: pathlib.Path, known: dict[str, pathlib.Path]) -> set[str]:
    """Returns the modules that a file imports, also within functions, but not those for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_checkers = {
        id(statement)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in for_checkers:
            assert node.level == 0, path
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known or alias.name == "_C" else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(known)


def test_modules_have_no_import_cycles() -> None:
    known = modules()
    imports = {name: modules_imported(path, known) - {name} for name, path in known.items()}
    assert len(imports) > 200
    while free := {name for name, needed in imports.items() if not needed}:
        imports = {name: needed - free for name, needed in imports.items() if name not in free}
    assert imports == {}, "cycles, and the parts that depend on them"


PROGRAM = """
import sys
import torch
import torch_backplane
import torch_backplane.operators  # imported for devices that run kernels

x = torch.randn(8, 8, device="bp", requires_grad=True)
(x @ x).relu().sum().backward()
x.grad.cpu()
torch.bp.synchronize()
print(*sorted(name for name in sys.modules if name.startswith("torch_backplane.")))
"""


def test_programs_do_not_import_tools() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_BACKPLANE_SANITIZE")}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=280
    )
    parts = {name.split(".")[1] for name in ended.stdout.split()}
    assert {"drivers", "kernels", "operators", "planning"} <= parts
    assert parts & TOOLS == set()


MAX_PARAMETERS = 7
# Functions with more parameters → the reason.
MANY_PARAMETERS = {
    "accelerator/memory.py _record_memory_history": "torch.cuda's signature",
    "cli/conformance.py conformance": "one parameter for each command-line option",
    "compile/flex_lowering.py lower": "the signature of PyTorch's higher-order operator",
    "compile/flex_lowering.py lower_backward": "the signature of PyTorch's higher-order operator",
    "compile/flex_operator.py _plan": "the operator's signature",
    "compile/flex_operator.py _plan_backward": "the operator's signature",
    "compile/inductor.py create_scan": "Inductor's signature",
    "compile/inductor.py create_sort": "Inductor's signature",
    "drivers/base.py copy_from_peer": "two memory locations and the stream",
    "drivers/opencl/libraries/vkfft.py _guard": "the integers of a family of libraries (drivers/libraries.py)",
    "kernels/multi_tensor.py multi_tensor": "keywords that describe a kernel (docs/kernels.md)",
    "kernels/pointwise.py pointwise": "keywords that describe a kernel (docs/kernels.md)",
    "operators/reduce_ops.py reduce": "keywords that describe a reduction",
    "planning/launch.py launch": "keywords that describe a launch (docs/write-an-operator.md)",
    "planning/tracing.py launch": "keywords that describe a launch (docs/write-an-operator.md)",
    "planning/declare.py operator": "keywords of a declaration (docs/write-an-operator.md)",
    "planning/pointwise.py pointwise": "keywords of a declaration (docs/write-an-operator.md)",
    "planning/reduce.py run_reduction": "keywords that describe a launch (docs/write-an-operator.md)",
    "planning/template.py run_kernel": "keywords that describe a launch (docs/write-an-operator.md)",
    "planning/views.py _to_copy": "an ATen operator's signature",
}


def has_aten_signature(function: ast.FunctionDef) -> bool:
    """Whether the function is a planner, which has the parameters of its operator."""
    return any(isinstance(one, ast.Call) and ast.unparse(one.func) == "operator" for one in function.decorator_list)


def test_functions_have_few_parameters() -> None:
    """Related parameters belong in a class, such as `AttentionParams`."""
    package, found = paths.ROOT / "torch_backplane", set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or has_aten_signature(node):
                continue
            given = node.args
            count = len([*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg])
            count -= (given.vararg is None) + (given.kwarg is None)
            if count > MAX_PARAMETERS:
                found.add(f"{path.relative_to(package)} {node.name}")
    assert found == set(MANY_PARAMETERS)
