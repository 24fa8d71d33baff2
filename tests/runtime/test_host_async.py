"""Host devices whose streams run in threads: missing waits have effects, and correct programs stay correct."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

START = """
import pytest, torch
import torch.nn.functional as F
from torch import nn
from torch_backplane import _C

DEVICE = "bp:0"
"""

TRAINING = """
torch.manual_seed(3)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * 36, 5)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
side = torch.bp.Stream()
for step in range(6):
    with side:  # the next batch is computed concurrently with the step
        x = torch.rand(8, 1, 8, 8, device=DEVICE)
        y = torch.randint(0, 5, (8,), device=DEVICE)
    torch.bp.current_stream().wait_stream(side)
    x.record_stream(torch.bp.current_stream())
    y.record_stream(torch.bp.current_stream())
    loss = F.cross_entropy(model(x.mul(2)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    side.wait_stream(torch.bp.current_stream())
    print(round(loss.item(), 5))
print(sum(one.double().abs().sum().item() for one in model.parameters()).__round__(4))
"""

PROGRAMS = {
    "operators return before they complete": """
x = torch.ones(1000, device=DEVICE)
torch.bp.synchronize()
gate = _C._StreamGate(0, 0)
y = (x + 1).mul_(3).cumsum(0)
F.softmax(y, 0, dtype=torch.float64)
F.layer_norm(y, (1000,))
assert not torch.bp.current_stream().query()
gate.open()
assert y[-1].item() == 6000
""",
    "a missing wait gives wrong results": """
x = torch.zeros(1000, device=DEVICE)
side = torch.bp.Stream()
torch.bp.synchronize()
with side:
    torch.bp._sleep(200_000_000)
    x.fill_(1)
early = x + 1
assert early.tolist() == [1] * 1000
side.synchronize()
assert (x + 1).tolist() == [2] * 1000
""",
    "a wait gives correct results": """
x = torch.zeros(1000, device=DEVICE)
side = torch.bp.Stream()
side.wait_stream(torch.bp.current_stream())
with side:
    torch.bp._sleep(100_000_000)
    x.fill_(1)
torch.bp.current_stream().wait_stream(side)
assert (x + 1).tolist() == [2] * 1000
event = torch.bp.Event()
with side:
    torch.bp._sleep(50_000_000)
    x.add_(1)
    event.record()
event.synchronize()
assert x.cpu().tolist() == [2] * 1000
""",
    "memory that another stream still uses": """
side = torch.bp.Stream()
torch.bp.synchronize()
x = torch.full((5000,), 7.0, device=DEVICE)
side.wait_stream(torch.bp.current_stream())
with side:
    torch.bp._sleep(100_000_000)
    y = x + 1
where = x.data_ptr()
del x
again = torch.zeros(5000, device=DEVICE)
assert again.data_ptr() == where  # without record_stream, use by the other stream is unknown
side.synchronize()
assert y.unique().tolist() == [1]
x = torch.full((5000,), 7.0, device=DEVICE)
side.wait_stream(torch.bp.current_stream())
with side:
    torch.bp._sleep(100_000_000)
    y = x + 1
x.record_stream(side)
where = x.data_ptr()
del x
again = torch.zeros(5000, device=DEVICE)
assert again.data_ptr() != where
side.synchronize()
assert y.unique().tolist() == [8]
""",
    "memory that is freed while it is in use": """
x = torch.zeros(1 << 22, device=DEVICE)
torch.bp.synchronize()
torch.bp._sleep(100_000_000)
x.add_(1)
del x
torch.bp.empty_cache()
y = torch.ones(1 << 22, device=DEVICE)
assert y.sum().item() == 1 << 22
""",
    "errors in values are raised by the next synchronization": """
table = torch.randn(5, 3, device=DEVICE)
index = torch.tensor([0, 7]).to(DEVICE)
found = F.embedding(index, table)
with pytest.raises(IndexError, match="out of range"):
    torch.bp.synchronize()
index.fill_(4)
assert torch.equal(F.embedding(index, table).cpu(), table.cpu()[[4, 4]])
with pytest.raises(RuntimeError, match="size"):
    table + torch.ones(4, device=DEVICE)  # errors in shapes are raised by the call itself
with pytest.raises(RuntimeError, match="result type Float can't be cast"):
    index += 1.5
assert index.tolist() == [4, 4]
""",
    "errors of queued work have the types of an immediate call": """
singular, a = torch.zeros(3, 3), torch.ones(2)
calls = {
    torch.linalg.LinAlgError: lambda d: torch.cholesky_inverse(singular.to(d)),
    NotImplementedError: lambda d: torch.bitwise_or(a.to(d), a.to(d)),
    IndexError: lambda d: torch.ones(3, device=d)[torch.tensor([5]).to(d)],
    RuntimeError: lambda d: torch.ones(3, device=d).gather(0, torch.tensor([5]).to(d)),
}
for kind, call in calls.items():
    told = []
    for where in ("cpu", DEVICE):
        with pytest.raises(kind) as raised:
            call(where)
            torch.bp.synchronize()
        assert raised.type is kind
        told.append(str(raised.value))
    assert told[0] == told[1]
torch.bp.synchronize()
""",
    "a meta kernel in Python can reject a call, and Ctrl-C propagates": """
with torch.library._scoped_library("backplane", "FRAGMENT") as library:
    library.define("refused(Tensor x, int kind) -> Tensor")
    kinds = ValueError, AssertionError, KeyboardInterrupt, SystemExit

    def refuse(x, kind):
        raise kinds[kind]

    library.impl("refused", lambda x, kind: x + 1, "CPU")
    library.impl("refused", refuse, "Meta")
    for number, kind in enumerate(kinds):
        if issubclass(kind, Exception):  # the CPU kernel runs the call
            assert torch.ops.backplane.refused(torch.ones(3, device=DEVICE), number).tolist() == [2] * 3
        else:
            with pytest.raises(kind):
                torch.ops.backplane.refused(torch.ones(3, device=DEVICE), number)
""",
    "results whose shape depends on values, and Python numbers": """
x = torch.arange(10.0, device=DEVICE)
torch.bp._sleep(50_000_000)
x.sub_(5)
assert x.nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]
x.mul_(2)
assert x[x > 2].tolist() == [4, 6, 8]
assert x.unique().numel() == 10 and not torch.equal(x, x + 1) and bool((x == 0).any())
values, where = x.max(0)
assert (values.item(), where.item()) == (8, 9)
""",
    "out= of another size, in-place operators, views, other dtypes": """
x = torch.arange(12.0, device=DEVICE).reshape(3, 4)
out = torch.empty(0, device=DEVICE)
torch.bp._sleep(50_000_000)
assert torch.add(x, 1, out=out) is out and out.shape == (3, 4)
x.t().mul_(2)
x[1].copy_(x[2])
half = x.half()
strided = torch.empty(4, 3, device=DEVICE).t().copy_(x)
complex_ = torch.complex(x, x).conj().resolve_conj()
torch.testing.assert_close(out.cpu(), torch.arange(12.0).reshape(3, 4) + 1)
right = torch.arange(12.0).reshape(3, 4) * 2
right[1] = right[2]
for found in (x, half.float(), strided, complex_.real, -complex_.imag):
    torch.testing.assert_close(found.cpu(), right)
""",
    "random numbers": """
torch.manual_seed(5)
torch.bp._sleep(50_000_000)
first = [torch.rand(10, device=DEVICE), torch.randn(10, device=DEVICE), F.dropout(torch.ones(10, device=DEVICE))]
torch.bp.synchronize()
torch.manual_seed(5)
again = [torch.rand(10, device=DEVICE), torch.randn(10, device=DEVICE), F.dropout(torch.ones(10, device=DEVICE))]
for one, other in zip(first, again):
    assert torch.equal(one.cpu(), other.cpu())
assert not torch.equal(torch.rand(10, device=DEVICE).cpu(), first[0].cpu())
""",
    "submission blocks while many commands are pending": """
import threading, time
x, given = torch.zeros(10, device=DEVICE), 0
torch.bp.synchronize()
gate = _C._StreamGate(0, 0)

def give():
    global given
    for given in range(1, 3001):
        x.add_(1)

thread = threading.Thread(target=give)
thread.start()
try:
    while given < 1000:
        time.sleep(0.01)
    time.sleep(0.5)
    assert given < 1100, given
finally:
    gate.open()
    thread.join()
assert (given, x.tolist()) == (3000, [3000] * 10)
""",
    "synchronization does not wait for work that other threads submit meanwhile": """
import threading, time
x, enough = torch.zeros(10, device=DEVICE), threading.Event()

def give():
    end = time.monotonic() + 20
    while not enough.is_set() and time.monotonic() < end:
        torch.bp._sleep(1_000_000)
        x.add_(1)

thread = threading.Thread(target=give)
thread.start()
try:
    time.sleep(0.1)
    torch.bp.synchronize()
    assert thread.is_alive()
finally:
    enough.set()
    thread.join()
""",
    "threads share a stream with calls that run immediately": """
from concurrent.futures import ThreadPoolExecutor
xs = [torch.randn(100, 3) for _ in range(400)]
kinds = {
    "nonzero": lambda x: (x > 0).nonzero(),
    "boolean index": lambda x: (x + 1)[x > 1],
    "unique": lambda x: (x * 3).long().unique(),
    "gradient": lambda x: torch.autograd.grad((p := x.requires_grad_())[p > 0].square().sum(), p)[0],
}
for kind, work in kinds.items():
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: work(x.to(DEVICE)).cpu(), xs))
    wrong = sum(not torch.equal(one, work(x.clone())) for one, x in zip(found, xs))
    assert wrong == 0, (kind, wrong)
""",
    "numbers and indices on the CPU are read at the call": """
x = torch.zeros(10, device=DEVICE)
number = torch.tensor(2.0)
torch.bp._sleep(50_000_000)
y = x + number
number.fill_(5)
assert y.tolist() == [2] * 10
x = torch.arange(6.0, device=DEVICE).view(3, 2)
rows, some, value = torch.tensor([2, 0]), torch.tensor([True, False, True]), torch.tensor(7.0)
torch.bp._sleep(50_000_000)
y = x[rows]
x.index_put_((rows,), value)
x.index_put_((rows[:1],), torch.ones(2, device=DEVICE), accumulate=True)
chosen = x[some]
rows.fill_(1)
value.fill_(8)
assert (y.tolist(), x.tolist(), chosen.tolist()) == ([[4, 5], [0, 1]], [[7, 7], [2, 3], [8, 8]], [[7, 7], [8, 8]])
""",
}


# Runs the programs one after another in one process, with a synchronization after each.
TOGETHER = """
import sys, traceback
failed = []
for name, program in PROGRAMS.items():
    try:
        exec(program, globals() | {"__name__": name})
    except Exception:
        failed.append(f"{name}: {traceback.format_exc()}")
    torch.bp.synchronize()
print("\\n".join(failed) or f"{len(PROGRAMS)} fine")
"""


@pytest.mark.parametrize(
    "settings",
    [{"TORCH_BACKPLANE_HOST_ASYNC": "1"}, {"TORCH_BACKPLANE_HOST_DELAYS": "7"}],
    ids=["asynchronous", "delayed"],
)
def test_asynchronous_host_devices(settings: dict[str, str], run_python: Callable[..., Any]) -> None:
    program = f"{START}\nPROGRAMS = {PROGRAMS!r}\n{TOGETHER}"
    done = run_python(program, TORCH_BACKPLANE_DRIVERS="host", **settings)
    assert done.stdout == f"{len(PROGRAMS)} fine\n", done.stdout + done.stderr


@pytest.mark.slow
def test_correct_programs_give_the_same_results(run_python: Callable[..., Any]) -> None:
    ways: list[dict[str, str]] = [{}, {"TORCH_BACKPLANE_HOST_ASYNC": "1"}]
    ways += [{"TORCH_BACKPLANE_HOST_DELAYS": seed} for seed in ("1", "2")]
    done = [run_python(START + TRAINING, TORCH_BACKPLANE_DRIVERS="host", **settings) for settings in ways]
    assert [one.returncode for one in done] == [0] * len(ways), done[-1].stderr
    assert len({one.stdout for one in done}) == 1, [one.stdout for one in done]


@pytest.mark.parametrize(
    ("name", "value"),
    [("HOST_ASYNC", "yes"), ("HOST_DELAYS", "-1"), ("HOST_DELAYS", "soon"), ("HOST_DELAYS", str(2**64))],
)
def test_invalid_settings_raise(name: str, value: str, run_python: Callable[..., Any]) -> None:
    program = "import torch\ntorch.ones(1, device='bp')"
    done = run_python(program, TORCH_BACKPLANE_DRIVERS="host", **{f"TORCH_BACKPLANE_{name}": value})
    assert done.returncode != 0
    assert f"TORCH_BACKPLANE_{name}='{value}'" in done.stderr
