"""Tests `python -m torch_backplane explain`: kernels and their bytes, breaks, recompilations, failures, the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_backplane.cli.explain import lines
from torch_backplane.compile_report import Buffer, Compilation, Graph, GraphBreak, Report, Step, page
from torch_backplane.drivers import device

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
HAS_KERNELS = bool(device(0).properties.dialect)
PREFIX = "bp_fused_" if HAS_KERNELS else "cpp_fused_"


def explain(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_backplane", "explain", *arguments],
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "400"} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )


# Sizes are such that no two tensors have the same number of bytes.
PROGRAM = """
import sys
import torch

weight = torch.ones(8, 16, device="bp")

@torch.compile
def product(x, y):
    z = (x * 2 + y).relu()
    return z @ weight

@torch.compile
def broken(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2

@torch.compile
def training(x, w):
    return (x @ w).tanh().sum()

@torch.compile
def on_cpu(x):
    return x + x.t()

@torch.compile
def look_up(table, i, x):
    x.mul_(2)
    return torch.nn.functional.embedding(i, table) + 1

@torch.compile
def put(x, i, values):
    x.index_put_((i,), values, accumulate=True)

product(torch.ones(4, 8, device="bp"), torch.ones(8, device="bp"))
product(torch.ones(6, 8, device="bp"), torch.ones(8, device="bp"))
broken(torch.ones(3, device="bp"))
w = torch.ones(8, 32, device="bp", requires_grad=True)
training(torch.ones(5, 8, device="bp"), w).backward()
on_cpu(torch.ones(7, 7))
i = torch.tensor([1, 2, 1], device="bp")
look_up(torch.ones(1000, 6, device="bp"), i, torch.ones(9, device="bp"))
put(torch.ones(10, 6, device="bp").half(), i, torch.ones(3, 6, device="bp").half())
print("arguments", sys.argv[1:])
sys.exit(3)
"""


@dataclass
class Explained:
    """The result of a run."""

    ended: subprocess.CompletedProcess[str]
    data: dict[str, Any]
    page: Path

    def of(self, function: str) -> list[dict[str, Any]]:
        return [one for one in self.data["compilations"] if one["function"] == function]


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Explained:
    folder = tmp_path_factory.mktemp("programs")
    (folder / "program.py").write_text(PROGRAM)
    written = ["--html", "page.html", "--json", "report.json"]
    ended = explain(folder, *written, "program.py", "--html", "of the program")
    data = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return Explained(ended, data, folder / "page.html")


def moved(step: dict[str, Any]) -> tuple[int, int]:
    return sum(step["reads"].values()), sum(step["writes"].values())


def test_program_runs_unchanged(explained: Explained) -> None:
    assert explained.ended.returncode == 3
    assert explained.ended.stdout.startswith("arguments ['--html', 'of the program']\n")
    assert explained.data["problems"] == []


def test_kernels_and_operators_with_their_bytes(explained: Explained) -> None:
    first, again = explained.of("product")
    assert (first["recompile_reason"], first["failure"], first["file"], first["line"]) == (None, None, "program.py", 7)
    (graph,) = first["graphs"]
    chain, product = graph["steps"]
    assert (chain["kind"], chain["operators"]) == ("kernel", ["aten.mul", "aten.add", "aten.relu"])
    assert re.fullmatch(PREFIX + r"add_mul_relu_\d+", chain["name"])
    assert (product["kind"], product["name"]) == ("operator", "extern_kernels.mm")
    assert product["operators"] == ["aten.mm"]
    x, y, z, weight, result = 4 * 8 * 4, 8 * 4, 4 * 8 * 4, 8 * 16 * 4, 4 * 16 * 4
    assert (moved(chain), moved(product)) == ((x + y, z), (z + weight, result))
    assert graph["compiled_bytes"] == x + y + z + z + weight + result
    assert graph["unfused_bytes"] == (x + z) + (z + y + z) + (z + z) + (z + weight + result)
    assert (graph["kind"], graph["devices"]) == ("inference", ["bp:0"])
    assert graph["compiled_for"] == (None if HAS_KERNELS else "cpu")
    (buffer,) = chain["writes"]
    assert graph["buffers"][buffer] == {"dtype": "float32", "size": [4, 8], "bytes": z}
    assert product["reads"][buffer] == z
    assert sorted(graph["buffers"][one]["bytes"] for one in graph["inputs"]) == [y, x, weight]
    assert [graph["buffers"][one]["bytes"] for one in graph["outputs"]] == [result]
    # Sizes are symbols now. The bytes are those of the call.
    (graph,) = again["graphs"]
    assert moved(graph["steps"][0]) == (6 * 8 * 4 + y, 6 * 8 * 4)
    assert graph["unfused_bytes"] == 7 * 6 * 8 * 4 + y + weight + 6 * 16 * 4
    shape = graph["buffers"][next(iter(graph["steps"][0]["writes"]))]["size"]
    assert (type(shape[0]), shape[1]) == (str, 8)


def test_recompilations_name_the_guard(explained: Explained) -> None:
    reason = explained.of("product")[1]["recompile_reason"]
    assert re.fullmatch(r"\d+/0: tensor 'x' size mismatch at index 0. expected 4, actual 6", reason)


def test_graph_breaks_name_the_place(explained: Explained) -> None:
    (found,) = explained.data["graph_breaks"]
    line = PROGRAM.splitlines().index("    torch._dynamo.graph_break()") + 1
    assert (found["file"], found["line"], found["count"]) == ("program.py", line, 1)
    assert found["reason"] == "Call to `torch._dynamo.graph_break()`"
    assert found["hints"] == ["Remove the `torch._dynamo.graph_break()` call."]
    (before,), (after,) = explained.of("broken"), explained.of(f"torch_dynamo_resume_in_broken_at_{line}")
    assert [len(one["graphs"]) for one in (before, after)] == [1, 1]
    assert before["graphs"][0]["steps"][0]["operators"] == ["aten.add"]
    assert after["graphs"][0]["steps"][0]["operators"] == ["aten.mul"]


def test_forward_and_backward_graphs(explained: Explained) -> None:
    (found,) = explained.of("training")
    forward, backward = found["graphs"]
    assert (forward["kind"], backward["kind"]) == ("forward", "backward")
    x, w, product = 5 * 8 * 4, 8 * 32 * 4, 5 * 32 * 4
    steps = {one["name"]: one for one in forward["steps"]}
    assert moved(steps["extern_kernels.mm"]) == (x + w, product)
    steps = {one["name"]: one for one in backward["steps"]}
    assert moved(steps["extern_kernels.mm"]) == (x + product, w)
    assert any("aten.tanh_backward" in one["operators"] for one in backward["steps"])
    assert 0 < found["inductor_seconds"] < found["seconds"]


def test_graphs_on_the_cpu_are_listed_too(explained: Explained) -> None:
    ((graph,),) = [one["graphs"] for one in explained.of("on_cpu")]
    (step,) = graph["steps"]
    assert (graph["devices"], graph["compiled_for"]) == (["cpu"], None)
    assert step["name"].startswith("cpp_fused_")
    assert moved(step) == (7 * 7 * 4, 7 * 7 * 4)


def test_lookups_and_operators_in_place(explained: Explained) -> None:
    ((graph,),) = [one["graphs"] for one in explained.of("look_up")]
    rows, i, x = 3 * 6 * 4, 3 * 8, 9 * 4
    assert graph["compiled_bytes"] == (x + x) + (rows + i + rows)
    assert graph["unfused_bytes"] == (x + x) + (rows + i + rows) + (rows + rows)
    assert {name for one in graph["steps"] for name in one["operators"]} == {"aten.mul", "aten.embedding", "aten.add"}
    ((graph,),) = [one["graphs"] for one in explained.of("put")]
    (step,) = graph["steps"]
    assert step["operators"] == ["aten.index_put"]
    if HAS_KERNELS:  # float16 has no atomic addition
        assert (step["kind"], step["name"]) == ("operator", "aten.index_put_")
        assert moved(step) == (10 * 6 * 2 + i + 3 * 6 * 2, 10 * 6 * 2)


def test_text_says_the_same(explained: Explained) -> None:
    text = explained.ended.stdout
    assert "graphs: 9, graph breaks: 1, recompilations: 1, compiled in " in text
    assert re.search(r"\nproduct \(program.py:7, compilation \d+/0\): \d+\.\d s\n", text)
    target = "" if HAS_KERNELS else ", compiled for cpu"
    assert f"\n  inference graph on bp:0{target}; launches: 1, eager operators: 1\n" in text
    assert "\n  bytes per call: 1.2 KiB, without fusion: 1.7 KiB (1.4 times)\n" in text
    assert re.search(rf"\n  kernel  {PREFIX}add_mul_relu_0 +160 B +128 B\n          mul, add, relu\n", text)
    assert re.search(r"\n  eager   extern_kernels\.mm +640 B +256 B\n          mm\n", text)
    assert "\nbroken, continued at line 15 (program.py:" in text
    assert "\nGraph breaks\n  program.py:15\n    Call to `torch._dynamo.graph_break()`\n" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_browser_draws_the_page_without_a_network(explained: Explained, tmp_path: Path) -> None:
    assert not re.search(r"(src|href|url|import|fetch)\s*[=(]", explained.page.read_text(encoding="utf-8"))
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium is installed (Debian: chromium-headless-shell)")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    shown = subprocess.run(
        [*command, explained.page.as_uri()], capture_output=True, text=True, check=True, timeout=120
    ).stdout  # after the script has run
    drawing = re.search(r'<div id="drawing">(.*?)</div>', shown, re.DOTALL)
    assert drawing
    boxes = re.findall(r'<g class="(\w+)" transform="translate\((\d+),(\d+)\)">', drawing[1])
    # x, y, the kernel, the weight, the product, the result
    assert sorted(kind for kind, _, _ in boxes) == ["kernel", "operator", "tensor", "tensor", "tensor", "tensor"]
    places = [(int(x), int(y)) for _, x, y in boxes]
    assert len(set(places)) == 6
    assert all(abs(x - other) >= 230 or y != row for x, y in places for other, row in places if (x, y) != (other, row))
    (kernel,), (product,) = ([int(y) for kind, _, y in boxes if kind == wanted] for wanted in ("kernel", "operator"))
    assert kernel < product
    assert len(re.findall("<path ", drawing[1])) == 5
    assert len(re.findall("<option", shown)) == 9
    assert "Call to `torch._dynamo.graph_break()`" in shown
    assert "size mismatch at index 0. expected 4, actual 6" in shown


FAILING = """
import os, torch

@torch.compile(fullgraph=True)
def whole(x):
    torch._dynamo.graph_break()
    return x

@torch.compile
def cached(x):
    return x.sin()

x = torch.ones(3, device="bp")
for _ in range(2):
    torch._dynamo.reset()
    torch._inductor.config.fx_graph_cache = True
    cached(x)
print("on stdout", flush=True)
os.system("echo of a child")
whole(x)
"""


@pytest.mark.slow
def test_report_of_a_program_that_fails(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    ended = explain(tmp_path, "--json", "-", "script.py", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert ended.returncode == 1
    data = json.loads(ended.stdout)
    assert "on stdout\nof a child\n" in ended.stderr
    numbers = {text.strip(): number for number, text in enumerate(FAILING.splitlines(), 1)}
    assert f'File "script.py", line {numbers["whole(x)"]}, in <module>\n    whole(x)\n' in ended.stderr
    assert "torch_backplane/cli" not in ended.stderr
    assert "graphs: 1, graph breaks: 0, recompilations: 0, compiled in " in ended.stderr
    call = "torch._dynamo.graph_break()"
    cached, again, whole = data["compilations"]
    assert [len(one["graphs"]) for one in (cached, again, whole)] == [1, 0, 0]
    assert whole["failure"] == f"script.py:{numbers[call]}: Call to `{call}`"
    (problem,) = data["problems"]
    assert problem.startswith("inductor_output_code of 0/0: ")
    assert "comes from a cache" in problem


PRODUCTS = """
import torch

@torch.compile(mode="max-autotune")
def layer(x, w, r):
    return (x @ w).relu() + r, x.t() @ r

layer(*(torch.randn(shape, device="bp") for shape in ((20, 30), (30, 40), (20, 40))))
"""


@pytest.mark.skipif(not HAS_KERNELS, reason="the devices have no dialect")
def test_products_with_elementwise_operators(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PRODUCTS)
    ended = explain(tmp_path, "--json", "report.json", "script.py")
    assert ended.returncode == 0, ended.stderr
    data = json.loads((tmp_path / "report.json").read_text())
    steps = {one["name"]: one["operators"] for one in data["compilations"][0]["graphs"][0]["steps"]}
    (kernel,) = (name for name in steps if name.startswith(PREFIX))
    assert steps == {kernel: ["aten.mm", "aten.relu", "aten.add"], "extern_kernels.mm": ["aten.mm"]}
    (product,) = data["templates"]
    described, _, chosen = product.rpartition(": ")
    assert described == f"{kernel} ([20, 30]:[30, 1] @ [30, 40]:[40, 1])"
    assert chosen in ("one kernel", "the product as in eager PyTorch, then a kernel")
    assert f"\nProducts and convolutions with elementwise operators\n  {kernel} " in ended.stdout


def test_program_that_compiles_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv)\n")
    ended = explain(tmp_path, "script.py", "--json", "x")
    assert (ended.returncode, ended.stdout) == (0, "['script.py', '--json', 'x']\n\nNo graph was compiled.\n")
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "cannot run 'missing.py': there is no such file"),
        (["-m", "missing_module"], "cannot run -m 'missing_module': there is no such module"),
        (["--html", "missing/page.html", "script.py"], "cannot write missing/page.html: "),
        (["--json", ".", "script.py"], "cannot write .: "),
    ],
)
def test_bad_arguments_are_errors_before_the_program_runs(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "script.py").write_text("print('it runs')\n")
    ended = explain(tmp_path, *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"Error: {message}")
    assert ended.stderr.count("\n") == 1


def without_fusion(function: Any, *arguments: torch.Tensor) -> int:
    from torch_backplane.compile_report.graphs import unfused_bytes

    traced = make_fx(torch.func.functionalize(function, remove="mutations"), tracing_mode="fake")(*arguments)
    return unfused_bytes(traced.graph)


def test_bytes_without_fusion() -> None:
    x, row, long = torch.ones(4, 6), torch.ones(6, dtype=torch.float64), torch.arange(3)
    n = x.numel() * 4
    assert without_fusion(lambda x: x.t()[1:].unsqueeze(0), x) == 0  # views move nothing
    assert without_fusion(lambda x: x[:, :2] * 2, x) == 2 * 4 * 2 * 4  # a part of x
    assert without_fusion(lambda x: x * x, x) == 2 * n  # one argument
    assert without_fusion(lambda x, row: x + row, x, row) == n + 6 * 8 + 2 * n
    assert without_fusion(lambda row: row.expand(4, 6).exp(), row) == 6 * 8 + 4 * 6 * 8  # expanded
    assert without_fusion(lambda x: x.sort(), x) == n + n + 2 * n  # values and int64 positions
    assert without_fusion(lambda x: x.add_(1).sum(), x) == n + n + n + 4  # in place: no copy
    assert without_fusion(lambda x, i: x[i], x, long) == 3 * 6 * 4 + 3 * 8 + 3 * 6 * 4
    assert without_fusion(lambda w, i: torch.nn.functional.embedding(i, w), x, long) == 3 * 6 * 4 + 3 * 8 + 3 * 6 * 4
    assert without_fusion(lambda x: torch.ones(x.shape[0]) if x.shape[1] else x, x) == 16
    assert without_fusion(lambda x: x, x) == 0


NAME = "bp_fused_" + "a_name_that_is_long_" * 5
HOSTILE = Report(
    [
        Compilation(
            "0/0", "</script><b>", "a<b>.py", 1, 3, 0.5, 0.1, "0/0: " + "a guard that failed " * 10, None,
            [
                Graph(
                    "inference", ["bp:0"], None, ["arg0"], ["buf1"],
                    {"arg0": Buffer("int8", ["s77", 3], 9), "buf1": Buffer("int8", [3], 3)},
                    [
                        Step("kernel", NAME, ["aten.add"] * 30 + ["</script>"], {"arg0": 9}, {"buf0": 3 << 40}),
                        Step("none", "op1", ["aten.cat"], {"buf0": 0}, {"buf1": 0}),
                        *[Step("operator", "f", [f"aten.{k}" for k in range(60)], {"buf1": 1}, {}) for k in range(3)],
                    ],
                    compiled_bytes=0, unfused_bytes=0,
                )
            ],
        ),
        Compilation("", operators=2),
    ],
    [GraphBreak("a reason " * 20, "", [], "a.py", 7, 2)],
    ["a problem " * 20],
)  # fmt: skip


def test_text_fits_in_80_columns() -> None:
    shown = list(lines(HOSTILE))
    assert [one for one in shown if len(one) > 80] == [f"  kernel  {NAME}"]
    text = "\n".join(shown)
    assert "  a.py:7 (2 times)\n" in text
    assert f"  eager   f ×3{'3 B':>56}{'0 B':>10}\n" in text
    assert "operators: 2, no graph from Inductor" in text
    assert "cat" not in text
    assert "\nNot recorded\n  a problem" in text


def test_text_from_programs_is_escaped_in_the_page() -> None:
    text = page(HOSTILE, "<b>")
    assert "<title>&lt;b&gt;</title>" in text
    assert text.count("</script>") == 1
    (data,) = re.findall(r"^const report = (.*);$", text, re.MULTILINE)
    assert json.loads(data)["compilations"][0]["function"] == "</script><b>"
