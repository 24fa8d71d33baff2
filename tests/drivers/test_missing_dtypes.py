"""Tests a device without float64 and native float16: what it rejects, and what must work without them.

The device is simulated on PoCL: the driver searches kernel text for what the compiler of such a device would reject.
Each test runs in a separate process, with the limited device as bp:0 and the full device as bp:1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import driver_packages
import pytest

Run = Callable[..., str]

PREAMBLE = """
import numpy, torch
import torch.nn.functional as F
from torch_backplane import _C

def compare(functions, dtype):
    torch.manual_seed(0)
    base = (torch.rand(4, 6) + 0.5).to(dtype)
    eps = torch.finfo(dtype).eps
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (2 * eps, 4 * eps)
    for text in functions:
        function = eval(f"lambda a: {text}")
        try:
            found = function(base.to("bp:0"))
            torch.bp.synchronize(0)
            torch.testing.assert_close(found.cpu(), function(base), rtol=rtol, atol=atol)
        except Exception as error:
            raise AssertionError(f"{text} of {dtype}") from error
"""


@pytest.fixture
def run(platform: None, tmp_path: Path) -> Run:
    return driver_packages.opencl_runner(tmp_path, "narrow", PREAMBLE, TORCH_BACKPLANE_FALLBACK="error")


def test_float64_raises_a_type_error(run: Run) -> None:
    run("""
f64, device, x = torch.float64, "bp:0", torch.ones(3, device="bp:0")
for text in (
    "torch.empty(2, dtype=f64, device=device)", "torch.empty(0, dtype=f64, device=device)",
    "torch.empty_strided((2,), (1,), dtype=f64, device=device)", "torch.zeros(2, dtype=f64, device=device)",
    "torch.full((2,), 1.0, dtype=f64, device=device)", "torch.arange(3, dtype=f64, device=device)",
    "torch.linspace(0, 1, 3, dtype=f64, device=device)", "torch.randn(2, dtype=f64, device=device)",
    "torch.eye(2, dtype=f64, device=device)", "torch.tensor(3.0, dtype=f64, device=device)",
    "torch.tensor([3.0], dtype=f64, device=device)", "torch.ones(2, dtype=f64).to(device)",
    "torch.ones(2, dtype=f64, device='bp:1').to(device)", "torch.from_numpy(numpy.ones(3)).to(device)",
    "x.double()", "x.to(f64)", "x.sum(dtype=f64)", "x.cumsum(0, dtype=f64)", "x.softmax(0, dtype=f64)",
    "x.new_empty(3, dtype=f64)", "torch.zeros_like(x, dtype=f64)", "torch.ones(2, device=device).view(f64)",
    "torch.nn.Linear(2, 2).double().to(device)", "torch.arange(3, device=device).double()",
):
    try:
        eval(text)
    except TypeError as error:
        assert "bp:0 (Narrow) does not support Double" in str(error), (text, error)
    else:
        raise AssertionError(text)
c128 = torch.complex128
for text in ("torch.empty(2, dtype=c128, device=device)", "torch.ones(2, dtype=c128).to(device)"):
    try:
        eval(text)
    except TypeError as error:
        assert "bp:0 (Narrow) does not support ComplexDouble" in str(error), (text, error)
    else:
        raise AssertionError(text)
assert torch.ones(2, dtype=f64).to(device, torch.float32).sum().item() == 2  # converted on the host
torch.ones(2, dtype=f64, device="bp:1") * 2.5                                # the other device supports float64
assert torch.ones(2, dtype=f64, device="bp:1").to(device, torch.float32).sum().item() == 2
""", TORCH_BACKPLANE_FALLBACK="silent")  # fmt: skip


NUMBERS = [
    "a * 2.5", "a / 3.1", "1.5 - a", "a ** 1.7", "1.7 ** a", "a % 0.3", "a > 0.77", "a.clamp(0.6, 1.1)",
    "torch.add(a, a, alpha=0.3)", "a.lerp(a * 2, 0.3)", "torch.addcmul(a, a, a, value=0.7)", "a * torch.tensor(2.5)",
    "a * torch.tensor(2.5, dtype=torch.float64)", "torch.where(a > 0.9, a, 0.1)", "a.masked_fill(a > 0.9, 0.3)",
    "torch.full_like(a, 0.3)", "a.clone().fill_(0.7)", "F.elu(a, 0.3)", "F.softplus(a, 1.5)", "F.gelu(a)", "a.exp()",
    "torch.arange(5, device=a.device) / 2", "torch.arange(5, device=a.device) * 0.5",
    "torch.arange(5, device=a.device) ** 0.5", "torch.arange(0, 1, 0.1, device=a.device)",
    "torch.linspace(0, 1, 7, device=a.device)", "torch.logspace(0, 1, 5, device=a.device)",
    "torch._foreach_mul([a, a], 1.3)[0]", "torch._foreach_add([a, a], [a, a], alpha=0.3)[0]",
]  # fmt: skip
REDUCTIONS = [
    "a.mean()", "a.mean(1)", "a.sum()", "a.var(1)", "a.std()", "a.norm()", "a.prod(1)", "a.logsumexp(1)", "a.cumsum(1)",
    "F.layer_norm(a, (6,), eps=1e-5)", "F.group_norm(a, 2, eps=1e-5)", "F.rms_norm(a, (6,))", "a.softmax(1)",
    "a.log_softmax(0)", "a @ a.mT", "torch.addmm(a[:, :4], a, a.mT, beta=0.4, alpha=1.3)", "F.mse_loss(a, a * 2)",
    "F.huber_loss(a, a * 2, delta=0.7)", "F.cross_entropy(a, torch.arange(4, device=a.device), label_smoothing=0.1)",
    "F.interpolate(a[None, None], scale_factor=1.7, mode='bilinear')", "F.avg_pool2d(a[None], 2)",
    "F.conv2d(a[None, None], a[None, None, :2, :2])", "F.scaled_dot_product_attention(a[None], a[None], a[None])",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_python_numbers_and_reductions_need_no_float64(run: Run, dtype: str, kind: str) -> None:
    run(f"compare({NUMBERS + REDUCTIONS!r}, torch.{dtype})", NARROW_KIND=kind)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_random_numbers_need_no_float64(run: Run, dtype: str) -> None:
    run(f"""
def draw(device):
    torch.manual_seed(3)
    x = torch.empty(1000, dtype=torch.{dtype}, device=device)
    fills = (torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.exponential_, torch.Tensor.bernoulli_)
    return torch.stack([fill(x.clone()) for fill in fills] + [F.dropout(torch.ones_like(x), 0.3)]).cpu()
narrow, whole = draw("bp:0"), draw("bp:1")
assert torch.equal(narrow, whole)  # the same numbers as on the full device
assert 0.9 < narrow[0].float().std() < 1.1 and 0.45 < narrow[1].float().mean() < 0.55
""")


OPTIMIZERS = {
    "SGD": "momentum=0.9, weight_decay=1e-3", "AdamW": "betas=(0.8, 0.95), eps=1e-7", "Adam": "amsgrad=True",
    "RMSprop": "alpha=0.9", "Adagrad": "lr_decay=0.1",
}  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_runs_without_fallback(run: Run, optimizer: str) -> None:
    run(f"""
def train(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.LayerNorm(16, eps=1e-5), torch.nn.GELU(), torch.nn.Linear(16, 3)).to(device)
    x, y = torch.randn(32, 8).to(device), torch.randint(3, (32,)).to(device)
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.03, {OPTIMIZERS[optimizer]})
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses
losses = train("bp:0")
torch.testing.assert_close(losses, train("cpu"), rtol=1e-4, atol=1e-5)  # float32, summed in another order
assert losses[-1] < losses[0]
assert not _C.fallback_counts(), _C.fallback_counts()
""")


def test_autocast_and_gradient_scaling(run: Run) -> None:
    run("""
torch.manual_seed(0)
model = torch.nn.Linear(8, 4).to("bp:0")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("bp", init_scale=256.0)
x = torch.randn(16, 8, device="bp:0")
losses = []
for _ in range(5):
    optimizer.zero_grad()
    with torch.autocast("bp", dtype=torch.float16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaled = model.weight.grad.clone()
    scaler.unscale_(optimizer)
    assert torch.equal(model.weight.grad * scaler.get_scale(), scaled)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
assert losses[-1] < losses[0]
""", TORCH_BACKPLANE_FALLBACK="silent")  # fmt: skip


def test_batch_norm_of_empty_tensors_needs_no_float64(run: Run) -> None:
    """In this case PyTorch creates statistics in float64 that are not returned."""
    run("""
for training in (True, False):
    for shape in ((0, 3), (2, 3, 0, 4)):
        found = []
        for device in ("cpu", "bp:0"):
            x, w, b = (torch.ones(s, device=device, requires_grad=True) for s in (shape, 3, 3))
            mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
            out = F.batch_norm(x, mean, var, w, b, training=training)
            grads = torch.autograd.grad(out.sum(), (x, w, b))
            with torch.inference_mode():
                plain = F.batch_norm(x, mean, var, training=training)
            found.append([t.cpu() for t in (out.detach(), plain, mean, var, *grads)])
        torch.testing.assert_close(found[1], found[0])
""")


def test_ranks_and_pseudoinverses_need_no_float64(run: Run) -> None:
    """PyTorch creates their tolerances as float64 tensors."""
    run("""
_C.set_fallback_policy(_C.FallbackPolicy.silent)  # singular values are computed by a fallback
torch.manual_seed(0)
calls = [
    (torch.linalg.pinv, {}), (torch.linalg.pinv, {"rcond": 1e-3}), (torch.linalg.pinv, {"atol": 0.3}),
    (torch.linalg.pinv, {"rtol": 1e-3, "atol": 1e-3}), (torch.linalg.pinv, {"hermitian": True}),
    (torch.pinverse, {"rcond": 1e-3}),  # with the default 1e-15, rounding errors dominate for the first matrix
    (torch.linalg.matrix_rank, {}), (torch.linalg.matrix_rank, {"tol": 0.3}), (torch.linalg.matrix_rank, {"atol": 0.3}),
    (torch.linalg.matrix_rank, {"rtol": 0.3}), (torch.linalg.matrix_rank, {"rtol": 0.3, "atol": 1.0}),
    (torch.linalg.matrix_rank, {"hermitian": True}),
]
half = torch.randn(5, 2)
for base in (half @ half.mT, torch.randn(3, 4, 4), torch.diag(torch.tensor([1.0, 0.2, 1e-9])), torch.randn(4, 6)):
    for function, named in calls:
        if named.get("hermitian"):
            if base.shape[-1] != base.shape[-2]:
                continue
            base = base + base.mT
        for by_tensor in (False, True):
            if by_tensor and ("hermitian" in named or function is torch.pinverse):
                continue
            found = []
            for device in ("cpu", "bp:0", "bp:1"):
                given = {key: torch.tensor(one, device=device) if by_tensor else one for key, one in named.items()}
                a = base.clone().to(device).requires_grad_(function is not torch.linalg.matrix_rank)
                result = function(a, **given)
                gradient = torch.autograd.grad(result.sum(), a) if a.requires_grad else ()
                with torch.inference_mode():
                    again = function(base.to(device), **given)
                found.append([one.cpu() for one in (result.detach(), again, *gradient)])
            for other in found[1:]:
                torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-4)
for function in (torch.linalg.pinv, torch.linalg.matrix_rank):
    for device in ("cpu", "bp:0"):
        try:
            function(torch.ones(3, device=device))
        except RuntimeError as error:
            assert "dimension" in str(error), error
        else:
            raise AssertionError(device)
x = torch.randn(4, 6, device="bp:0", requires_grad=True)
torch.linalg.lstsq(x, torch.randn(4, 2, device="bp:0")).solution.sum().backward()
assert x.grad.isfinite().all()
""")


def test_compiled_graphs_compute_indices_in_float64_on_the_cpu(run: Run) -> None:
    run("""
def function(x):
    return x[(torch.arange(4, dtype=torch.float64) * 0.7).long()] * 2

x = torch.randn(4, 3)
for device in ("bp:0", "bp:1"):
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function)(x.to(device)).cpu(), function(x))
""")
