"""Tests the documentation: code blocks run unchanged; files, links, make targets, options and variables exist."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import on_opencl
import paths
import pytest
import torch
import typer

from torch_backplane import cli, drivers, kernels, settings
from torch_backplane.conformance import numbers, report
from torch_backplane.drivers import base
from torch_backplane.drivers.base import NATIVE_GROUPS
from torch_backplane.drivers.checks import ASYNCHRONOUS_METHODS, check_routine
from torch_backplane.drivers.libraries import FAMILIES
from torch_backplane.kernels import Target, layouts, modelled, reductions
from torch_backplane.planning.launch import MAX_KERNELS

PAGES = [paths.ROOT / "README.md", *sorted((paths.ROOT / "docs").glob("*.md"))]
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", TEXTS[page], re.DOTALL)
    assert found, f"{page} has no {language} left"
    return found


def one_line(page: str) -> str:
    return " ".join(TEXTS[page].split())


def prose(page: str) -> str:
    return re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)


def run(command: list[str], folder: Path = paths.ROOT, **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_BACKPLANE_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # use this `python`
    finished = subprocess.run(
        command, cwd=folder, env={**environment, **settings}, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout


@pytest.fixture
def opencl() -> None:
    on_opencl.require_platform()


# --- code --------------------------------------------------------------------------------------------------------


def test_all_code_blocks_are_tested() -> None:
    languages = {page: set(re.findall(r"^```(\w+)$", text, re.MULTILINE)) for page, text in TEXTS.items()}
    assert {page: found for page, found in languages.items() if found} == {
        "README.md": {"python"},  # test_packaging.py
        **{page: {"python"} for page in PROGRAMS},
        "driver-contract.md": {"python", "c"},
        "ecosystem.md": {"python"},  # needs other libraries; `make ecosystem` tests these integrations
        "graphs.md": {"python"},
        "kernels.md": {"python"},
        "profiling.md": {"python"},
        "testing.md": {"sh"},
        "tuning.md": {"python", "sh"},
        "write-a-driver.md": {"python", "toml", "c"},  # also test_drivers_contract.py, test_other_dialects.py
        "write-an-operator.md": {"python", "sh", "c"},
    }


@pytest.mark.usefixtures("opencl")
def test_python_of_write_an_operator_runs() -> None:
    program = "\n".join(blocks("write-an-operator.md", "python"))
    printed = run([sys.executable, "-c", program], TORCH_BACKPLANE_DRIVERS="opencl")
    for told in ("aten::cumsum: planned", "aten::cumsum: replayed", "launch bp_cumsum", "kernels have no complex32"):
        assert told in printed


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize("command", "".join(blocks("write-an-operator.md", "sh")).splitlines())
@pytest.mark.slow
def test_commands_of_write_an_operator_run(command: str) -> None:
    run(["bash", "-c", command])


# Pages whose Python blocks are complete programs → what they print. The blocks of a page also run as one program.
PROGRAMS = {
    "first-program.md": ("bp:0", "host host", "2 0", "aten::_linalg_eigvals"),
    "compile.md": (".",),
    "training.md": ("\n4 ",),
    "several-devices.md": (".",),
    "memory.md": ("PyTorch bp memory summary",),
    "debugging.md": ("add_", "called a synchronizing bp operation", "injected fault in allocate", "'allocate': "),
    "torch-backends.md": ("default\n",),
}


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_of_pages_run(page: str, tmp_path: Path) -> None:
    parts = [part for part in blocks(page, "python") if "torchrun" not in part]
    assert all("import torch" in part for part in parts)
    # debugging.md prepares faults, which must happen before devices are discovered: a process for each block.
    programs = parts if page == "debugging.md" else ["\n".join(parts)]
    printed = ""
    for number, program in enumerate(programs):
        file = tmp_path / f"program{number}.py"
        file.write_text(program, encoding="utf-8")
        command = ["bash", "-c", f"{sys.executable} {file} 2>&1"]
        printed += run(command, tmp_path, TORCH_BACKPLANE_DRIVERS="host", TORCH_BACKPLANE_HOST_DEVICES="2")
    assert [told for told in PROGRAMS[page] if told not in printed] == [], printed


@pytest.mark.slow
def test_distributed_program_runs(tmp_path: Path) -> None:
    (program,) = [part for part in blocks("several-devices.md", "python") if "torchrun" in part]
    file = tmp_path / "program.py"
    file.write_text(program, encoding="utf-8")
    (command,) = re.findall(r"TORCH_BACKPLANE_HOST_LINK=\S+ (torchrun .*) program.py", one_line("several-devices.md"))
    settings = {"TORCH_BACKPLANE_DRIVERS": "host", "TORCH_BACKPLANE_HOST_DEVICES": "4", "OMP_NUM_THREADS": "1"}
    for link in ({}, {"TORCH_BACKPLANE_HOST_LINK": "1GiB/s,20us"}):
        printed = run([*command.split(), "--standalone", str(file)], tmp_path, **settings, **link)
        assert float(printed.split()[-1]) < 10


def test_memory_snapshot_of_the_guide_is_plotted(tmp_path: Path) -> None:
    (program,) = [part for part in blocks("memory.md", "python") if "_dump_snapshot" in part]
    run([sys.executable, "-c", program], tmp_path, TORCH_BACKPLANE_DRIVERS="host")
    (command,) = re.findall(r"^    (python -m torch_backplane memory plot .*)$", TEXTS["memory.md"], re.MULTILINE)
    run(["bash", "-c", command], tmp_path)
    assert "<html" in (tmp_path / "memory.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize("command", "".join(blocks("testing.md", "sh")).splitlines())
def test_commands_of_testing_find_tests(command: str) -> None:
    assert command.startswith(".venv/bin/python ")
    run(["bash", "-c", command.removeprefix(".venv/bin/") + " --collect-only -p no:cacheprovider"])


@pytest.mark.usefixtures("opencl")
def test_python_of_graphs_runs() -> None:
    (program,) = blocks("graphs.md", "python")
    printed = [float(line) for line in run([sys.executable, "-c", program], TORCH_BACKPLANE_DRIVERS="opencl").split()]
    assert len(set(printed)) == 3


def test_python_of_profiling_runs(tmp_path: Path) -> None:
    (program,) = blocks("profiling.md", "python")
    printed = run([sys.executable, "-c", program], tmp_path)
    # PyTorch 2.11 has no interface for profilers of other devices.
    assert ("Self BP" in printed) == hasattr(torch.autograd.ProfilerState, "KINETO_PRIVATEUSE1")
    assert (tmp_path / "trace.json").stat().st_size > 1000


@pytest.mark.usefixtures("opencl")
def test_code_of_tuning_runs(tmp_path: Path) -> None:
    (program,) = blocks("tuning.md", "python")
    printed = run([sys.executable, "-c", program], tmp_path, TORCH_BACKPLANE_DRIVERS="opencl")
    said = "ProductTunableOp_float32,a=64x64:64x1 b=64x64:64x1 added=0,"
    assert said.split(",")[1] in printed
    assert said in (tmp_path / "tunableop_results0.csv").read_text(encoding="utf-8")
    assert said in TEXTS["tuning.md"]
    (tmp_path / "tunableop_results0.csv").unlink()
    (tmp_path / "train.py").write_text(program.replace("tunable.enable()", "init()"), encoding="utf-8")
    (commands,) = blocks("tuning.md", "sh")
    printed = run(["bash", "-ec", commands], tmp_path, TORCH_BACKPLANE_DRIVERS="opencl")
    assert "1 operators; results are in tunableop_results0.csv" in printed
    assert said.split(",")[1] in printed.splitlines()[-1]  # the last program has read the results


def test_library_of_write_an_operator_compiles(tmp_path: Path) -> None:
    (part,) = blocks("write-an-operator.md", "c")
    launcher = blocks("driver-contract.md", "c")[0]
    declared = re.compile(r"\{(.*?)\} argument_t;", re.DOTALL)
    (ours,), (theirs,) = (declared.findall(re.sub("//.*", "", one)) for one in (part, launcher))
    assert ours.split() == theirs.split()
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("needs a C compiler: install cc, or set CC")
    (tmp_path / "axpy.c").write_text(part, encoding="utf-8")
    run([compiler, "-Wall", "-Werror", "-fsyntax-only", str(tmp_path / "axpy.c")])


@pytest.mark.usefixtures("opencl")
def test_python_of_kernels_runs() -> None:
    program = "\n".join(blocks("kernels.md", "python"))
    on_devices = 'for device in ("cpu", "bp:0", f"bp:{torch.bp.device_count() - 1}"):\n'
    on_devices += '    print(leaky(torch.tensor([-1.0, 2.0], device=device), 1, slope=0.5).tolist())'
    printed = run([sys.executable, "-c", f"{program}\n{on_devices}"], TORCH_BACKPLANE_DRIVERS="opencl,host")
    assert printed.startswith("tensor([0.5000, 3.0000])\n")
    assert "gelu_times(" in printed
    assert printed.endswith("[0.5, 3.0]\n" * 3)


def test_methods_of_write_a_driver_match_the_contract() -> None:
    """Checks the incomplete blocks of write-a-driver.md: methods, and a class with a native launcher."""
    whole, session, *parts = blocks("write-a-driver.md", "python")
    assert whole.startswith("# my_driver.py")
    assert session.startswith(">>> ")
    for tested in ("(Dialect)", "Library(", "(MyDevice)"):  # covered by other tests
        (part,) = [part for part in parts if tested in part]
        parts.remove(part)
    assert len(parts) == 4
    for part in parts:
        for node in ast.walk(ast.parse(textwrap.dedent(part))):
            if isinstance(node, ast.FunctionDef) and node.name != "__init__":
                expected = list(inspect.signature(getattr(drivers.Device, node.name)).parameters)
                assert [argument.arg for argument in node.args.args] == expected
            elif isinstance(node, ast.ImportFrom):
                package = {"torch_backplane.drivers": drivers, "torch_backplane.kernels": kernels}[str(node.module)]
                assert {alias.name for alias in node.names} <= set(package.__all__)
    (toml,) = blocks("write-a-driver.md", "toml")
    assert f'[project.entry-points."{drivers.ENTRY_POINT_GROUP}"]' in toml


def test_target_of_write_a_driver_and_the_table_of_figures() -> None:
    (part,) = [block for block in blocks("write-a-driver.md", "python") if "target=Target(" in block]
    said: dict[str, Any] = {"DeviceProperties": drivers.DeviceProperties, "torch": torch}
    exec(part, said)
    assert said["properties"].target.max_group_size == 1024
    (table,) = re.findall(r"^\| figure of `Target` .*?\n\n", TEXTS["driver-contract.md"], re.DOTALL | re.MULTILINE)
    named = [name for row in table.strip().splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert {*named, "compute_units"} == {one.name for one in fields(Target)}
    assert len(named) == len(set(named))


def test_library_of_write_a_driver_and_the_table_of_families() -> None:
    (part,) = [block for block in blocks("write-a-driver.md", "python") if "Library(" in block]
    said: dict[str, Any] = {}
    exec(part, said)
    library = said["library"](1, 2)
    check_routine("matmul", library.routines["matmul"])
    sizes = dict.fromkeys(FAMILIES["matmul"].integers, 2) | {"rows": 3}
    asked = [getattr(library.routines["matmul"], name) for name in ("guard", "workspace", "cost")]
    assert [one(torch.float32, **sizes) for one in asked] == [None, 3 * 2 * 4, 200]
    assert library.explain(7) == "no memory"
    (table,) = re.findall(r"^\| family \| memory .*?\n\n", TEXTS["driver-contract.md"], re.DOTALL | re.MULTILINE)
    rows = [[re.findall(r"`(\w+)`", cell) for cell in row.split("|")[1:-1]] for row in table.strip().splitlines()[2:]]
    settled = {family: one for family, one in FAMILIES.items() if one.memory}
    assert [(*row[0], *map(tuple, row[1:])) for row in rows[:-1]] == [(name, *one[1:]) for name, one in settled.items()]
    assert rows[-1][0] == [family for family in FAMILIES if family not in settled]


def test_kernels_page_lists_the_shipped_targets() -> None:
    (sentence,) = re.findall(r"the name\s+of\s+one\s+that\s+ships: (.*?)\. A\s+file", TEXTS["kernels.md"], re.DOTALL)
    assert re.findall(r"`([\w-]+)`", sentence) == list(modelled.SHIPPED)


def test_dialect_of_write_a_driver_generates_kernels() -> None:
    (part,) = [block for block in blocks("write-a-driver.md", "python") if "(Dialect)" in block]
    said: dict[str, Any] = {}
    exec(part, said)
    layout = layouts.Layout(0, 1)
    options: dict[str, Any] = {"inputs": [torch.float32], "outputs": [torch.float32], "layout": layout}
    text = kernels.pointwise("twice", lambda x: x * 2, dialect=said["PlainC"](), **options).text
    assert "void bp_twice(const work_item_t work_item, float* out0, const float* in0, const uint32_t count) {" in text
    with pytest.raises(kernels.MissingOperation) as raised:
        kernels.pointwise("lgamma", kernels.functions.lgamma, dialect=said["PlainC"](), **options)
    assert f"`MissingOperation: aten::lgamma: {raised.value}`" in TEXTS["write-a-driver.md"].replace("\n", " ")


def test_contracting_dialect_of_the_driver_contract() -> None:
    (part,) = blocks("driver-contract.md", "python")
    said: dict[str, Any] = {}
    exec(part, said)
    assert "--fmad=true" in said["ContractingCudaCpp"]().compile_options
    assert "`CudaCpp(target).compile_options` has `--fmad=true`" in one_line("driver-contract.md")


def test_launcher_of_the_driver_contract_compiles(tmp_path: Path) -> None:
    part = "\n".join(blocks("driver-contract.md", "c"))
    names = (*drivers.NATIVE_APIS["c"], *(name for group in NATIVE_GROUPS["c"].values() for name in group))
    assert tuple(re.findall(r"^int (\w+)\(", part, re.MULTILINE)) == names
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("needs a C compiler: install cc, or set CC")
    (tmp_path / "launcher.c").write_text(part, encoding="utf-8")
    # The functions of the example driver and of the test drivers have the same parameter names in the same order.
    for name in names:
        is_needed = name in drivers.NATIVE_APIS["c"]
        optional = ["tests/support/queued_c_driver.py", "tests/support/offering_c_driver.py"]
        where = ["examples/drivers/plain_c/plain_c_driver.py"] if is_needed else optional
        example = "".join((paths.ROOT / one).read_text(encoding="utf-8") for one in where)
        parameters = re.compile(rf"^int {name}\((.*?)\)", re.DOTALL | re.MULTILINE)
        (declared,), (defined,) = parameters.findall(part), parameters.findall(example)
        assert [one.split()[-1].lstrip("*").partition("[")[0] for one in declared.split(",")] == [
            one.split()[-1].lstrip("*") for one in defined.replace("given", "arguments").split(",")
        ]
    run([compiler, "-fsyntax-only", "-Wall", "-Werror", str(tmp_path / "launcher.c")])


# --- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", TEXTS)
def test_links_have_targets(page: str) -> None:
    folder = next(path for path in PAGES if path.name == page).parent
    text = re.sub(r"^ {4}.*$", "", TEXTS[page], flags=re.MULTILINE)  # without code
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = folder / file if file else folder / page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, link


SKIPPED = {"__pycache__", ".git", ".venv", "build", "dist", "out"}
FOLDERS = [
    str(path.relative_to(paths.ROOT))
    for top in paths.ROOT.iterdir()
    if top.is_dir() and top.name not in SKIPPED and not top.name.startswith(".")
    for path in (top, *top.rglob("*"))
    if path.is_dir() and not SKIPPED & set(path.parts)
]
# Files of PyTorch, the reader's program, and the folders that `make dist`, `make gpu` and `make gpu-wheels` make.
ELSEWHERE = {"test/test_torch.py", "test/", "script.py", "dist/", "build/gpu/", "wheels/", "output_code.py"}
# A file name with a suffix, or a folder; not the end of a longer path, such as ~/.cache/pocl.
FILE = r"(?<![\w/.~-])(?:[\w.*…-]+/)*(?:[\w*…-]+\.(?:py|cpp|c|h|md|sh|txt|toml)\b|(?<=/)$)"


@pytest.mark.parametrize("page", TEXTS)
def test_named_files_exist(page: str) -> None:
    """Checks file names in the text, complete or as the end of a path; `…` and `*` match anything."""
    files = [str(path.relative_to(paths.ROOT)) for folder in ("", *FOLDERS) for path in (paths.ROOT / folder).glob("*")]
    folders = {f"{folder}/" for folder in FOLDERS}
    for name in [name for code in re.findall(r"`([^`\n]+)`", prose(page)) for name in re.findall(FILE, code)]:
        pattern = re.escape(name).replace(r"\*", ".*").replace("…", ".*")
        candidates = folders if name.endswith("/") else files
        assert name in ELSEWHERE or any(re.search(rf"(^|/){pattern}$", file) for file in candidates), name


@pytest.mark.parametrize("page", TEXTS)
def test_named_make_targets_and_variables_exist(page: str) -> None:
    makefile = (paths.ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(" ".join(re.findall(r"^([a-z][a-z -]*):", makefile, re.MULTILINE)).split())
    variables = set(re.findall(r"^([A-Z]+) \?=", makefile, re.MULTILINE))
    for target, given in re.findall(r"(?:`|^    )make ([a-z][a-z-]*)((?: [A-Z]+=\S+)*)", prose(page), re.MULTILINE):
        assert target in targets
        assert set(re.findall(r"([A-Z]+)=", given)) <= variables


def options_of(command: str) -> set[str]:
    parameters = typer.main.get_command(cli.app).commands[command].params  # type: ignore[attr-defined]
    return {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("page", TEXTS)
def test_named_command_options_exist(page: str) -> None:
    for command, rest in re.findall(r"python -m torch_backplane (\w+)([^`\n]*)", TEXTS[page]):
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest.partition("#")[0])) <= options_of(command)


def test_conformance_page_lists_every_option() -> None:
    named = set(re.findall(r"`(--[a-z-]+)", TEXTS["conformance.md"]))
    assert named == options_of("conformance") - {"--no-grad"}


def variables_in(*patterns: str) -> set[str]:
    text = "".join(path.read_text(encoding="utf-8") for pattern in patterns for path in paths.ROOT.glob(pattern))
    return set(re.findall(r"TORCH_BACKPLANE_[A-Z]+(?:_[A-Z]+)*", text))


def test_guides_list_exactly_the_variables_that_are_read() -> None:
    read = variables_in("torch_backplane/**/*.py", "csrc/**/*.*", "tools/*.*", "setup.py")
    assert variables_in("README.md", "docs/*.md") == read
    of_builds = {"TORCH_BACKPLANE_SANITIZE", "TORCH_BACKPLANE_UNITY"}  # read by setup.py
    assert set(settings.VARIABLES) == read - of_builds
    # test_cli.py and test_torch_bp_environment.py use unknown variables on purpose.
    unread = {f"TORCH_BACKPLANE_{name}" for name in ("SOMETHING", "FALBACK", "HOST_DEVICE", "COLOUR", "MINE_SPEED")}
    assert variables_in("tests/**/*.py", "examples/**/*.py", "benchmarks/*.py", "Makefile") <= read | unread
    users = set(re.findall(r"^\| `(TORCH_BACKPLANE_\w+)`", TEXTS["environment.md"], re.MULTILINE))
    assert users == read - of_builds


def test_memory_page_lists_every_allocator_option() -> None:
    with pytest.raises(ValueError, match="known options are") as caught:
        torch.bp.memory._set_allocator_settings("no_such_option:1")
    known = str(caught.value).partition("known options are ")[2].splitlines()[0].split(", ")
    (table,) = re.findall(r"^\| option .*?\n\n", TEXTS["memory.md"], re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(known)


def test_options_without_effect_give_a_warning() -> None:
    row_of_options = r"^\| (.*?) \| none, with a warning \|$"
    (row,) = re.findall(row_of_options, TEXTS["memory.md"], re.MULTILINE)
    named = re.findall(r"`(\w+)`", row)
    text = ",".join(f"{name}:{1 if name.endswith(('_mb', '_threads')) else True}" for name in named)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = torch.bp.memory._snapshot()["allocator_settings"]["PYTORCH_ALLOC_CONF"]
        torch.bp.memory._set_allocator_settings(text)
        torch.bp.memory._set_allocator_settings(before)
    warned = re.findall(r"'(\w+)' has no effect on bp devices", "\n".join(str(one.message) for one in caught))
    assert warned == named


def test_driver_contract_is_complete() -> None:
    page = TEXTS["driver-contract.md"]
    methods = {name for name in vars(drivers.Device) if not name.startswith("_")}
    named = methods | {field.name for field in fields(drivers.DeviceProperties)}
    assert {name for name in named if not re.search(rf"`[^`\n]*\b{name}\b|\bdef {name}\b", page)} == set()
    (asynchronous,) = re.findall(r"overrides all of (.*?); with only some", one_line("driver-contract.md"))
    assert set(re.findall(r"`(\w+)`", asynchronous)) == set(ASYNCHRONOUS_METHODS)
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.*?) \|", page, re.MULTILINE)
    groups = {getattr(base, name): tuple(re.findall(r"`(\w+)`", functions)) for name, functions in rows}
    assert groups == NATIVE_GROUPS["c"]
    of_opencl = [drivers.NATIVE_APIS["opencl"], *NATIVE_GROUPS["opencl"].values(), base.NATIVE_EXTRAS["opencl"]]
    assert {name for names in of_opencl for name in names} <= set(re.findall(r"`(cl\w+)`", page))


def test_torch_bp_page_lists_every_device_property() -> None:
    (sentence,) = re.findall(r"^`get_device_properties` gives .*?\.$", TEXTS["torch-bp.md"], re.DOTALL | re.MULTILINE)
    found = {name for name in dir(torch.bp.get_device_properties(0)) if not name.startswith("_")}
    assert found <= set(re.findall(r"`(\w+)`", sentence))


def test_error_messages_of_troubleshooting_exist() -> None:
    """Each quoted text, split at `…`, occurs in the sources."""
    (section,) = re.findall(r"^## Error messages\n(.*?)^## ", TEXTS["troubleshooting.md"], re.DOTALL | re.MULTILINE)
    quoted = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    parts = {part.strip(" ,;:") for text in quoted for part in text.split("…")} - {"", "aten::"}
    assert len(parts) > 15
    files = [*paths.ROOT.glob("torch_backplane/**/*.py"), *paths.ROOT.glob("csrc/**/*.cpp"), paths.ROOT / "setup.py"]
    joined = "".join(path.read_text(encoding="utf-8") for path in files)
    sources = re.sub(r'"\s*f?"', "", joined)  # join adjacent string literals
    assert {part for part in parts if part not in sources} == set()


def test_conformance_page_lists_every_kind_of_finding() -> None:
    (table,) = re.findall(r"^\| kind of finding .*?\n\n", TEXTS["conformance.md"], re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| (.*?) \|.*\| (yes|no) \|$", table, re.MULTILINE)
    assert {kind: fails == "yes" for kinds, fails in rows for kind in kinds.split(", ")} == report.KINDS


def test_numbers_match_the_code() -> None:
    limits = layouts.RowLimits()
    cpu = Target.of_kind("cpu")
    for page, phrase in (
        ("kernels.md", f"has {limits.shortest} elements or more ({cpu.row_limits.shortest} on CPUs)"),
        ("kernels.md", f"on GPUs, more than {limits.most:,}"),
        ("kernels.md", f"in groups of {cpu.element_group_size}."),
        ("kernels.md", f"blocks of {reductions.BLOCK} elements, {reductions.BLOCK} blocks to a part"),
        ("conformance.md", f"with {len(numbers.NUMBERS)} numbers"),
        ("architecture.md", f"among the {MAX_KERNELS:,} that were used last"),
    ):
        assert phrase in one_line(page)
    assert len(numbers.DTYPES) == 11  # conformance.md: "in eleven dtypes"
    cache = (paths.ROOT / "csrc" / "plans" / "plan_cache.cpp").read_text(encoding="utf-8")
    most = {name: int(number) for name, number in re.findall(r"kMax(\w+) = (\d+);", cache)}
    assert f"keeps the {most['Plans']:,} plans and the {most['Classes']:,} classes" in one_line("architecture.md")
    assert f"up to {most['DynamicShapePlans']} plans of a class" in one_line("architecture.md")
