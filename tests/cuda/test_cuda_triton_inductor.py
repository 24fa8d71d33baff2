"""Tests Inductor's Triton kernels on emulated CUDA devices, against eager PyTorch on the CPU.

Triton compiles the kernels for the GPU, and its interpreter computes what their binaries would
(tests/support/triton_interpreter.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import paths
import pytest

Run = Callable[..., str]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: `make test-triton` installs it"
)

PREAMBLE = f"""\
import copy, sys
sys.path.append({str(paths.SUPPORT)!r})
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._inductor import config
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves
import triton_interpreter

triton_interpreter.install()
torch.backends.bp.inductor_backend("triton")
config.triton.autotune_pointwise = False

def launches():
    torch.bp.synchronize()
    return [name for name, _ in triton_interpreter.launches]

def check(function, *given, tolerance=1e-5, **options):
    \"\"\"Compares results and arguments with those on the CPU, in two calls. Returns the number of launches.\"\"\"
    torch._dynamo.reset()
    before = len(launches())
    compiled = torch.compile(function, fullgraph=True, **options)
    for _ in range(2):
        ours, theirs = [one.to("bp") for one in given], [one.clone() for one in given]
        found, expected = compiled(*ours), function(*theirs)
        for one, other in zip(tree_leaves((found, ours)), tree_leaves((expected, theirs)), strict=True):
            assert one.device.type == "bp"
            assert_close(one.cpu(), other, rtol=tolerance, atol=tolerance)
    assert len(launches()) > before, "no Triton kernel was launched"
    return len(launches()) - before
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders for what Triton and Inductor compile, which the tests of a process share; and no workers."""
    folder = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")


def test_elementwise_operators(run: Run) -> None:
    code = """
x = torch.randn(16, 40)
check(lambda x, y: (torch.sin(x) + y * 2, torch.where(x > 0, x, 0.5).clamp(-1, 1)), x, torch.randn(40))
assert check(lambda x: x.sin().cos() + 1, x) == 2  # one launch per call
check(lambda x: (x.tanh(), x.erf(), x.abs().log1p(), x.exp(), x.abs().pow(1.5), x.round(), F.gelu(x)), x)
check(lambda x: (x.sigmoid(), x.atan2(x + 1), x.abs().lgamma(), x.fmod(0.7), x.remainder(0.7)), x, tolerance=1e-4)
check(lambda x: torch.arange(40, device=x.device) * 2 + x, x)
check(lambda x: x.abs() + 1, torch.tensor(-2.0))
"""
    run(PREAMBLE + code)


def test_dtypes(run: Run) -> None:
    code = """
x = torch.randn(16, 40)
for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 3e-2), (torch.float64, 1e-6)):
    check(lambda x: (x.exp() + x * 2, x.sum(-1), x.softmax(-1)), x.to(dtype), tolerance=tolerance)
check(lambda i: (i * 3 - (i >> 1), i.sum(), i // 3, i % 5, i.float()), torch.randint(-(2**40), 2**40, (300,)))
check(lambda i: (i + 1, i.float() / 2), torch.randint(0, 100, (300,), dtype=torch.uint8))
check(lambda x: ((x > 0).any(1), (x > 3).all(), x.isnan(), (x > 0) ^ (x < 1)), x)
"""
    run(PREAMBLE + code)


def test_reductions(run: Run) -> None:
    code = """
x = torch.randn(8, 40)
check(lambda x: (x.sum(), x.sum(0), x.amax(1), x.mean(), x.var(1)), x, tolerance=1e-4)
check(lambda x: (x.argmax(1), x.max(0), x.min(1).indices, x.t().argmax()), x)
check(lambda x: (x.softmax(-1), x.log_softmax(0)), x)
check(lambda x: F.layer_norm(x, (40,)), x)
check(lambda x: F.batch_norm(x.reshape(4, 2, 40), None, None, training=True), x)
check(lambda x: F.cross_entropy(x, torch.arange(8, device=x.device)), x)
assert check(lambda x: (x.sum(), x.norm()), torch.randn(20000), tolerance=1e-3) > 2  # divided, then combined
"""
    run(PREAMBLE + code)


def test_views_and_strides(run: Run) -> None:
    code = """
x = torch.randn(16, 40)
check(lambda x: (x.t().contiguous() + 1, x[::2, 3:].flip(1) * 2, x.unfold(1, 3, 2).sum(-1)), x)
check(lambda x: x.reshape(8, 80).permute(1, 0) + x.reshape(80, 8), x)
check(lambda x: torch.cat([x, x * 2, x.t().reshape(16, 40)], 1), x)
check(lambda x: x[1:] * 2, torch.randn(33, 7).t())
check(lambda x: (F.max_pool2d(x[None, None], 2), F.interpolate(x[None, None], scale_factor=2)), x)
"""
    run(PREAMBLE + code)


def test_indexing_and_scattering(run: Run) -> None:
    code = """
x, i = torch.randn(16, 40), torch.randint(0, 16, (16, 40))
check(lambda x, i: (x.gather(1, i), x[i[:, 0]], F.embedding(i, x[:, :4])), x, i)
check(lambda x, i: torch.zeros(16, 40, device=x.device).scatter_add(1, i, x), x, i)
check(lambda x, i: torch.zeros(16, 40, device=x.device).index_add(0, i[:, 0], x), x, i)
check(lambda i: torch.zeros(16, dtype=torch.int64, device=i.device).index_add(0, i[0], i[1]) + 1, i)
"""
    run(PREAMBLE + code)


def test_scans_and_sorts(run: Run) -> None:
    code = """
x = torch.randn(8, 20)
check(lambda x: (x.cumsum(1), x.cummax(1).values), x)
check(lambda x: x[:, :8].sort(1), x)
check(lambda x: [one + 1 for one in x.topk(3, 1)], x)
"""
    run(PREAMBLE + code)


def test_arguments_are_written_in_place(run: Run) -> None:
    code = """
def function(x, y):
    x.add_(1).mul_(x.sin())
    x[2:5] = 3
    y.t().copy_(x)
    return x.sum()

check(function, torch.randn(16, 40), torch.zeros(40, 16), tolerance=1e-4)
base = torch.randn(100, device="bp")
before = base.clone()
clone = torch._lazy_clone(base)
torch.compile(lambda x: x.mul_(2))(clone)
assert torch.equal(base, before) and torch.equal(clone, 2 * before)
version = base._version
torch.compile(lambda x: x + 1)(base)
assert base._version == version
"""
    run(PREAMBLE + code)


def test_products_and_convolutions_are_operators(run: Run) -> None:
    code = """
x = torch.randn(16, 40)
for mode in ("default", "max-autotune", "reduce-overhead"):
    check(lambda x: (x @ x.t()).relu() + 1, x, mode=mode, tolerance=1e-4)
assert all(name.startswith("triton_poi_fused_") for name in launches()), launches()  # products are no Triton kernels
check(lambda x: F.conv2d(x[None, None], torch.ones(2, 1, 3, 3, device=x.device)).relu(), x, tolerance=1e-4)
check(lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]) * 2, x, tolerance=1e-4)
"""
    run(PREAMBLE + code)


def test_foreach_and_combo_kernels(run: Run) -> None:
    code = """
given = [torch.randn(3, 40), torch.randn(16, 2), torch.randn(7)]
assert check(lambda *given: torch._foreach_add(torch._foreach_mul(given, 2.0), 1.0), *given) == 2
with config.patch(combo_kernels=True):
    check(lambda x, y, z: (x.sin(), y.cos(), z * 2), *given)
"""
    run(PREAMBLE + code)


def test_training(run: Run) -> None:
    code = """
from torch import nn
model = nn.Sequential(nn.Linear(10, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 5))
ours = copy.deepcopy(model).to("bp")
compiled = torch.compile(ours)
optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, ours)]
steps = optimizers[0].step, torch.compile(optimizers[1].step)
for _ in range(2):
    x, target = torch.randn(12, 10), torch.arange(12) % 5
    losses = F.cross_entropy(model(x), target), F.cross_entropy(compiled(x.to("bp")), target.to("bp"))
    assert_close(losses[1].cpu(), losses[0], rtol=1e-4, atol=1e-5)
    for optimizer, loss, step in zip(optimizers, losses, steps):
        optimizer.zero_grad()
        loss.backward()
        step()
for one, other in zip(ours.parameters(), model.parameters()):
    assert_close(one.cpu(), other, rtol=1e-3, atol=1e-4)
assert {"triton_per", "triton_for"} <= {name[:10] for name in launches()}, launches()
assert any("backward" in name for name in launches()), launches()
"""
    run(PREAMBLE + code)


def test_random_numbers_are_those_of_eager_pytorch(run: Run) -> None:
    code = """
def function(x):
    size = dict(size=(41,), device=x.device)
    return (torch.rand_like(x), torch.randn(3, 50, device=x.device), F.dropout(x, 0.3),
            torch.randint(3, 9, **size), torch.randint(0, 2**40, **size), torch.randint(-(2**63), 2**63 - 1, **size),
            torch.rand(33, device=x.device, dtype=torch.float16), torch.empty(21, device=x.device).uniform_(2, 5))

x = torch.ones(7, 30, device="bp")
drawn = []
for one in (function, torch.compile(function, fullgraph=True)):
    torch.bp.manual_seed(2**33 + 3)
    drawn.append(tree_leaves([one(x), one(x)]))
assert launches()
for one, other in zip(*drawn, strict=True):
    assert_close(one, other, rtol=1e-5, atol=1e-6)
"""
    run(PREAMBLE + code)


def test_dynamic_shapes(run: Run) -> None:
    code = """
function = lambda x: (x.sin() * 2).sum(-1) + x[:, 0] + x.shape[1]
compiled = torch.compile(function, dynamic=True, fullgraph=True)
for n, m in ((5, 7), (6, 9), (7, 11), (8, 20), (300, 3), (6, 9)):
    x = torch.randn(n, m)
    assert_close(compiled(x.to("bp")).cpu(), function(x), rtol=1e-4, atol=1e-4)
assert launches()
"""
    run(PREAMBLE + code)


def test_plans_and_graphs_contain_the_launches(run: Run) -> None:
    code = """
from torch_backplane import plans
compiled = torch.compile(lambda x: x.softmax(-1) * 2, fullgraph=True)
x = torch.randn(4, 30, device="bp")
compiled(x), compiled(x)
before = plans.stats()["backplane::compiled_graph"]["replays"]
compiled(x)
assert plans.stats()["backplane::compiled_graph"]["replays"] == before + 1
count = len(launches())
graph = torch.bp.Graph()
with torch.bp.graph(graph):
    out = compiled(x)
assert len(launches()) == count  # captured, not launched
for _ in range(2):
    x.normal_()
    graph.replay()
    assert_close(out.cpu(), x.cpu().softmax(-1) * 2, rtol=1e-4, atol=1e-5)
assert len(launches()) == count + 2
with torch.profiler.profile() as profile:
    compiled(x)
    torch.bp.synchronize()
names = {event.name for event in profile.events()}
assert any(name.startswith("triton_per_fused") for name in names), names
"""
    run(PREAMBLE + code)


def test_several_devices(run: Run) -> None:
    code = """
function = lambda x: (x * 2).sum(0) + 1
compiled = torch.compile(function)
x = torch.randn(6, 50)
for device in ("bp:1", "bp:0", "bp:2"):
    found = compiled(x.to(device))
    assert str(found.device) == device
    assert_close(found.cpu(), function(x), rtol=1e-4, atol=1e-4)
crossing = torch.compile(lambda x: (x * 2).to("bp:1") + 1)
found = crossing(x.to("bp:0"))
assert str(found.device) == "bp:1" and torch.bp.current_device() == 0
assert_close(found.cpu(), x * 2 + 1)
"""
    run(PREAMBLE + code)


def test_configurations_are_measured(run: Run) -> None:
    code = """
config.triton.autotune_pointwise = True
compiled = torch.compile(lambda x: x * 2 + 1, fullgraph=True)
for _ in range(3):
    x = torch.randn(1000)
    assert_close(compiled(x.to("bp")).cpu(), x * 2 + 1)
    grids = {sizes[0] for _, sizes in triton_interpreter.launches}
    assert len(grids) > 1, grids
measured = len(launches())
compiled(x.to("bp"))
assert len(launches()) == measured + 1
"""
    run(PREAMBLE.replace("install()", "install(measures=True)") + code)


def test_kernels_of_worker_processes(run: Run, tmp_path: Path) -> None:
    code = """
from torch._inductor.async_compile import AsyncCompile
AsyncCompile.wait_pool_ready()
assert AsyncCompile.use_process_pool()
check(lambda x: x.softmax(-1), torch.randn(3, 10))
modules = "__import__('sys').modules"
used = f"'{triton_interpreter.triton_runtime.__name__}' in {modules}, 'torch_backplane.drivers.cuda' in {modules}"
submit = AsyncCompile.process_pool().submit
print([job.result() for job in [submit(eval, f"(__import__('time').sleep(1), {used})[1:]") for _ in range(2)]])
"""
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    workers = run(PREAMBLE + code, TORCHINDUCTOR_COMPILE_THREADS="2", **caches)
    assert "(True, False)" in workers  # one has compiled the kernel
    assert "True)" not in workers  # none looks for devices


def test_cached_graphs(run: Run, tmp_path: Path) -> None:
    code = """
from torch._dynamo.utils import counters
x = torch.randn(4, 30)
found = torch.compile(lambda x: x.softmax(-1) * 2)(x.to("bp"))
assert_close(found.cpu(), x.softmax(-1) * 2, rtol=1e-4, atol=1e-5)
print(counters["inductor"]["fxgraph_cache_hit"], len(set(launches())))
"""
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    assert run(PREAMBLE + code, **caches) == "0 1\n"
    assert run(PREAMBLE + code, **caches) == "1 1\n"
    assert run(PREAMBLE.replace('"triton")', '"dialect")') + code, **caches) == "0 0\n"


def test_other_drivers_of_triton_stay_active(run: Run) -> None:
    code = """
from triton.backends import backends
from triton.runtime import driver

class Other:
    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", 90, 32)

backends["other"] = type(backends["bp"])(backends["bp"].compiler, Other)
driver.set_active(Other())
check(lambda x: x.sum(0) + 1, torch.randn(3, 10))
assert type(driver.active) is Other
"""
    run(PREAMBLE + code)


def test_what_is_not_available_is_refused(run: Run) -> None:
    code = """
for patch in ({"triton.cooperative_reductions": True}, {"profile_bandwidth": True}):
    with config.patch(patch):
        try:
            torch.compile(lambda x: x.sum() + 1)(torch.ones(10, device="bp"))
        except Exception as error:
            print(str(error).splitlines()[0])
torch.bp.set_device(torch.bp.device_count() - 1)
try:
    torch.compile(lambda x: x + 1)(torch.ones(3, device="bp"))
except Exception as error:
    print(str(error))
"""
    out = run(PREAMBLE + code, TORCH_BACKPLANE_DRIVERS="cuda,host")
    assert "cooperative reductions in Triton are not available on bp" in out
    assert "profile_bandwidth is not available for Triton kernels on bp" in out
    assert "torch.compile cannot generate Triton kernels: Triton kernels do not run on bp:7 (" in out
