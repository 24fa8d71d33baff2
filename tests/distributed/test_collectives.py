"""Tests of collectives on bp tensors: Gloo's results for CPU tensors are the reference."""

from __future__ import annotations

import on_opencl
import pytest
import ranks

# Each entry sets DISCRETE, so that a value in the environment of the tests has no effect.
DEVICES = {
    "host": {"TORCH_BACKPLANE_DRIVERS": "host", "TORCH_BACKPLANE_DISCRETE": "0"},
    "late-host": {
        "TORCH_BACKPLANE_DRIVERS": "host", "TORCH_BACKPLANE_DISCRETE": "0", "TORCH_BACKPLANE_HOST_DELAYS": "3",
    },
    "discrete-host": {
        "TORCH_BACKPLANE_DRIVERS": "host", "TORCH_BACKPLANE_DISCRETE": "1", "TORCH_BACKPLANE_FALLBACK": "silent",
    },
    "opencl": {"TORCH_BACKPLANE_DRIVERS": "opencl", "TORCH_BACKPLANE_DISCRETE": "1"},
    "opencl-in-host-memory": {"TORCH_BACKPLANE_DRIVERS": "opencl", "TORCH_BACKPLANE_DISCRETE": "0"},
}  # fmt: skip


QUICK = ("late-host", "opencl")  # in `make test`; `make test-distributed` uses all


@pytest.fixture(params=[*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in DEVICES if one not in QUICK)])
def devices(request: pytest.FixtureRequest) -> dict[str, str]:
    """Environment variables that select the devices of all ranks."""
    if request.param.startswith("opencl"):
        on_opencl.require_platform()
    return DEVICES[request.param]


# Calls each collective with CPU tensors and with bp tensors. `late` keeps the stream busy, so that a collective that
# does not wait for it, or a stream that does not wait for the collective, gives wrong results.
AGREE = """
start("cpu:gloo,bp:backplane")
torch.manual_seed(rank)


def late(tensor):
    if tensor.device.type == "bp":
        torch.bp._sleep(2_000_000)  # 2 ms
    return tensor * 1 if tensor.dtype != torch.bool else tensor ^ False


def lists(tensor, count):
    return [torch.zeros_like(tensor) for _ in range(count)]


def all_reduce(x, **options):
    x = late(x).clone()
    dist.all_reduce(x, **options)
    return [x * 1 if x.dtype != torch.bool else x]


def all_reduce_later(x):
    x = late(x).clone()
    work = dist.all_reduce(x, async_op=True)
    y = late(torch.ones_like(x))
    work.wait()
    return [x + y]


def broadcast(x):
    x = late(x).clone()
    dist.broadcast(x, src=size - 1)
    return [x]


def reduce(x):
    x, before = late(x).clone(), x.clone()
    dist.reduce(x, dst=1, op=dist.ReduceOp.MAX)
    return [x] if rank == 1 else [before]


def all_gather(x):
    out = lists(x, size)
    dist.all_gather(out, late(x))
    return out


def all_gather_into_tensor(x):
    out = torch.zeros(size * x.shape[0], *x.shape[1:], dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(out, late(x))
    return [out]


def gather(x):
    out = lists(x, size) if rank == 0 else None
    dist.gather(late(x), out, dst=0)
    return out or []


def scatter(x):
    out = torch.zeros_like(x)
    dist.scatter(out, [late(x) for _ in range(size)] if rank == 1 else None, src=1)
    return [out]


def reduce_scatter(x):
    out = torch.zeros_like(x)
    dist.reduce_scatter(out, [late(x) for _ in range(size)])
    return [out]


def reduce_scatter_tensor(x):
    out = torch.zeros_like(x)
    dist.reduce_scatter_tensor(out, torch.cat([late(x) for _ in range(size)]))
    return [out]


def all_to_all_single(x):
    x = torch.cat([late(x)] * size)
    out = torch.zeros_like(x)
    dist.all_to_all_single(out, x)
    return [out]


def all_to_all_uneven(x):
    sent = [i + 1 for i in range(size)]
    x = torch.cat([late(x)] * size)[: sum(sent)]
    out = torch.zeros((rank + 1) * size, *x.shape[1:], dtype=x.dtype, device=x.device)
    dist.all_to_all_single(out, x, [rank + 1] * size, sent)
    return [out]


def all_to_all(x):
    out = lists(x, size)
    dist.all_to_all(out, [late(x) for _ in range(size)])
    return out


def send_and_receive(x):
    out = torch.zeros_like(x)
    works = [dist.isend(late(x), (rank + 1) % size), dist.irecv(out, (rank - 1) % size)]
    for work in works:
        work.wait()
    return [out]


def batched(x):
    out = torch.zeros_like(x)
    calls = [dist.P2POp(dist.irecv, out, (rank - 1) % size), dist.P2POp(dist.isend, late(x), (rank + 1) % size)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return [out]


def any_source(x):
    out = torch.zeros_like(x)
    if rank == 0:
        dist.recv(out)
    elif rank == 1:
        dist.send(late(x), 0)
    return [out]


def coalesced(x):
    one, other = late(x).clone(), late(x) + late(x)
    if x.device.type == "cpu":  # Gloo cannot coalesce
        dist.all_reduce(one)
        dist.all_reduce(other)
        return [one, other]
    with dist._coalescing_manager(device=x.device, async_ops=True) as manager:
        dist.all_reduce(one)
        dist.all_reduce(other)
    manager.wait()
    return [one, other]


def check(function, x, **options):
    expected = function(x, **options)
    found = function(x.to("bp"), **options)
    assert len(expected) == len(found)
    for one, other in zip(expected, found):
        assert other.device.type == "bp"
        torch.testing.assert_close(other.cpu(), one, msg=lambda text: f"{function.__name__} {x.dtype}: {text}")


moves = [broadcast, all_gather, all_gather_into_tensor, gather, scatter, all_to_all_single, send_and_receive, batched,
         any_source, all_to_all_uneven, all_to_all]
reduces = [all_reduce, all_reduce_later, reduce, reduce_scatter, reduce_scatter_tensor, coalesced]
shapes = [(4, 3), (size, 1), (7, 5, 2)]
dtypes = [torch.float32, torch.float64, torch.int64, torch.float16, torch.bfloat16, torch.uint8, torch.int8]
for number, function in enumerate(reduces + moves):
    for dtype in dtypes[:: 1 + number % 2]:
        check(function, torch.randint(0, 9, shapes[number % 3]).to(dtype))
for op in ("MIN", "MAX", "PRODUCT"):
    check(all_reduce, torch.randint(1, 4, (5,)), op=getattr(dist.ReduceOp, op))
for op in ("BAND", "BOR", "BXOR"):
    check(all_reduce, torch.randint(0, 99, (5,)), op=getattr(dist.ReduceOp, op))
check(all_reduce, torch.randn(3, dtype=torch.complex64))
check(all_reduce, torch.tensor(2.5))
check(broadcast, torch.zeros(0, 3))
check(all_reduce, torch.randn(4, 3, 5, 6).contiguous(memory_format=torch.channels_last))

# Gloo has none of these for CPU tensors.
x = filled(rank + 1.0, 6)
dist.all_reduce(x, op=dist.ReduceOp.AVG)
assert x.tolist() == [(size + 1) / 2] * 6
out = torch.zeros(2, device="bp")
dist.reduce_scatter_tensor(out, filled(rank + 1.0, 2 * size), op=dist.ReduceOp.AVG)
assert out.tolist() == [(size + 1) / 2] * 2
for dtype in (torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn, torch.bool):
    values = [torch.arange(6).remainder(2).add(other % 2).to(dtype) for other in range(size)]
    outs = [torch.zeros(6, dtype=dtype, device="bp") for _ in range(size)]
    dist.all_gather(outs, values[rank].to("bp"))
    assert [out.cpu().tolist() for out in outs] == [value.tolist() for value in values], dtype

objects = [None] * size
dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
assert [one["rank"] for one in objects] == list(range(size))
shared = [{"from": rank}]
dist.broadcast_object_list(shared, src=1)
assert shared == [{"from": 1}]
dist.barrier()
group = dist.new_group([0, 1])
if rank < 2:
    x = filled(1.0, 3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 3
dist.barrier()

# A large tensor is sent in parts.
x = torch.arange(5_000_003, device="bp", dtype=torch.float32).remainder(1000) + rank
dist.all_reduce(x)
expected = torch.arange(5_000_003).remainder(1000).float() * size + sum(range(size))
torch.testing.assert_close(x.cpu(), expected)
dist.broadcast(x, src=0)
torch.testing.assert_close(x.cpu(), expected)
dist.destroy_process_group()
print("agree")
"""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.slow
def test_collectives_agree_with_gloo(devices: dict[str, str], size: int) -> None:
    assert all("agree" in output for output in ranks.run(AGREE, size, **devices))


# Calls every reduction with every operation and dtype: with CPU tensors, and with bp tensors.
REDUCTIONS = """
start("cpu:gloo,bp:backplane")
ReduceOp = dist.ReduceOp


def all_reduce(x, op):
    x = x.clone()
    dist.all_reduce(x, op)
    return [x]


def all_reduce_coalesced(x, op):
    tensors = [x.clone(), x[:2].clone()]
    dist.all_reduce_coalesced(tensors, op)
    return tensors


def reduce(x, op):
    x, given = x.clone(), x
    dist.reduce(x, dst=1, op=op)
    if rank != 1 and x.device.type == "bp":  # Gloo changes the tensors of other ranks
        assert (x == given).all()
    return [x] if rank == 1 else []


def reduce_scatter(x, op):
    inputs = [x[2 * i : 2 * i + 2].clone() for i in range(size)]
    out = torch.empty_like(inputs[0])
    dist.reduce_scatter(out, inputs, op)
    assert (torch.cat(inputs) == x).all()
    return [out]


def reduce_scatter_tensor(x, op):
    given, out = x.clone(), torch.empty_like(x[:2])
    dist.reduce_scatter_tensor(out, given, op)
    assert (given == x).all()
    return [out]


def outcome(function, x, op):
    try:
        results = [one.cpu() for one in function(x, op)]
        torch.bp.synchronize()
        return results
    except (RuntimeError, ValueError) as error:
        return str(error)


functions = [all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_tensor]
refused = 0
for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
    for dtype in (torch.float32, torch.int32, torch.bool, torch.bfloat16):
        x = (torch.arange(2 * size) + rank + 1).to(dtype)
        for function in functions:
            expected = outcome(function, x, getattr(ReduceOp, op))
            found = outcome(function, x.to("bp"), getattr(ReduceOp, op))
            if isinstance(expected, str):
                refused += 1
                assert isinstance(found, str), (function, op, dtype, expected)
                assert op in found or "non-integral" in found, found
            else:
                assert not isinstance(found, str), (function, op, dtype, found)
                for one, other in zip(expected, found, strict=True):
                    torch.testing.assert_close(other, one, msg=lambda text: f"{function.__name__} {op} {dtype}: {text}")
assert refused  # bitwise operations on floating-point numbers

x = torch.arange(2.0 * size) + rank
total = sum(torch.arange(2.0 * size) + other for other in range(size))
weighted = sum((torch.arange(2.0 * size) + other) * (other + 0.5) for other in range(size))
factor = torch.tensor([rank + 0.5], device="bp")
for op, expected in (
    (ReduceOp.AVG, total / size),
    (dist._make_nccl_premul_sum(rank + 0.5), weighted),
    (dist._make_nccl_premul_sum(factor), weighted),
):
    for dtype in (torch.float32, torch.float16):
        for function in functions:
            found = outcome(function, x.to(dtype).to("bp"), op)
            whole = function in (all_reduce, all_reduce_coalesced, reduce)
            part = expected if whole else expected[2 * rank : 2 * rank + 2]
            if found:
                torch.testing.assert_close(found[0], part.to(dtype), rtol=2e-3, atol=0)
    for function in functions:
        found = outcome(function, x.long().to("bp"), op)
        assert isinstance(found, str) and "floating-point" in found, found
dist.destroy_process_group()
"""


def test_reductions_with_every_operation(devices: dict[str, str]) -> None:
    ranks.run(REDUCTIONS, 2, **devices)


SPLIT = """
start()
group = dist.split_group(split_ranks=[[0, 2], [1]])
mine = [1] if rank == 1 else [0, 2]
assert dist.get_process_group_ranks(group) == mine
for device in ("cpu", "bp"):
    x = torch.full((3,), float(rank), device=device)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [float(sum(mine))] * 3
again = dist.split_group(split_ranks=[[2, 1]])
if rank == 0:
    assert again is None
else:
    x = filled(1.0, 2)
    dist.all_reduce(x, group=again)
    assert x.tolist() == [2.0] * 2
if rank != 1:
    part = dist.split_group(group, split_ranks=[[1]], group_desc="last")  # ranks of the parent
    assert (part is None) == (rank == 0)
    if rank == 2:
        assert dist.get_process_group_ranks(part) == [2] and part.group_desc == "last"
dist.barrier()
dist.destroy_process_group()
"""


def test_a_group_is_split(devices: dict[str, str]) -> None:
    ranks.run(SPLIT, 3, **devices)


DEFAULT = """
import torch.distributed._functional_collectives as functional_collectives

start()
assert dist.group.WORLD._get_backend(torch.device("bp")).name() == "backplane"
for device in ("cpu", "bp"):
    x = torch.ones(2, device=device)
    dist.all_reduce(x)
    assert x.tolist() == [size] * 2
x = filled(1.0, 4)
dist.all_reduce(x)
assert x.tolist() == [size] * 4
mesh = dist.device_mesh.init_device_mesh("bp", (size,))
out = functional_collectives.all_gather_tensor(filled(float(rank), 2), 0, mesh)
assert (out + 0).tolist() == [value for value in range(size) for _ in range(2)]
dist.destroy_process_group()
os.environ["STORE"] += "2"
start(device_id=torch.device("bp:0"))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_backplane_is_the_default_backend(devices: dict[str, str]) -> None:
    ranks.run(DEFAULT, 2, **devices)


BAD_INPUT = """
start("backplane")


def refused(error, text, function, *arguments, **options):
    try:
        function(*arguments, **options)
        torch.bp.synchronize()
    except error as raised:
        assert text in str(raised), str(raised)
    else:
        raise AssertionError(f"no error: {text}")


def works():
    x = filled(1.0, 3)
    dist.all_reduce(x)
    assert x.tolist() == [size] * 3


x = filled(1.0, 4, 4)
refused(RuntimeError, "cpu", dist.all_reduce, torch.ones(3))
works()
refused(ValueError, "contiguous", dist.all_reduce, x[:, ::2])
works()
refused(ValueError, "floating-point", dist.all_reduce, x.long(), op=dist.ReduceOp.AVG)
works()
refused(ValueError, "bp tensors, but got one on cpu", dist.all_gather, [torch.ones(4, 4) for _ in range(size)], x)
works()


def capture():
    with torch.bp.graph(torch.bp.Graph()):
        dist.all_reduce(x)


refused(RuntimeError, "captured", capture)
works()
dist.destroy_process_group()
"""


def test_refused_calls_change_nothing(devices: dict[str, str]) -> None:
    ranks.run(BAD_INPUT, 2, **devices)


STREAMS = """
start()
x = filled(float(rank), 1 << 20)
torch.bp.synchronize()
if rank == 1:
    dist.distributed_c10d._get_default_store().get("go")  # rank 1 joins late
work = dist.all_reduce(x, async_op=True)
work.wait()
y = x + 1
if rank == 0:
    blocked = work.is_completed()  # wait() has made the stream wait, not the host
    dist.distributed_c10d._get_default_store().set("go", "1")
    assert not blocked
assert (y == sum(range(size)) + 1).all()
assert work.is_completed() and work.is_success()
assert work.get_future().wait()[0] is not None
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["late-host", "opencl"])
def test_wait_does_not_block_the_host(name: str) -> None:
    if name == "opencl":
        on_opencl.require_platform()
    ranks.run(STREAMS, 2, **DEVICES[name])


LOST = """
import datetime, time
start(timeout=datetime.timedelta(seconds=4))
x = filled(1.0, 1000)
dist.all_reduce(x)
if rank == 1:
    os._exit(3)
begin = time.time()
try:
    for _ in range(20):
        dist.all_reduce(x)
        x.sum().item()
except RuntimeError as error:
    assert time.time() - begin < 10
    assert "all_reduce" in str(error) and "rank 0" in str(error), str(error)
    print("lost a peer")
os._exit(0)
"""


def test_a_lost_peer_is_an_error_that_names_the_collective(devices: dict[str, str]) -> None:
    output = ranks.first_output(LOST, 2, **devices)
    assert "lost a peer" in output, output


TIMEOUT = """
import datetime, time
start(timeout=datetime.timedelta(seconds=2))
x = filled(1.0, 10)
dist.all_reduce(x)
x.sum().item()
if rank == 1:
    time.sleep(6)
    os._exit(0)
begin = time.time()
try:
    dist.all_reduce(x)
    x.sum().item()
except RuntimeError as error:
    assert 1 < time.time() - begin < 5, time.time() - begin
    assert "all_reduce of 40 bytes failed on rank 0 of 2" in str(error), str(error)
    print("timed out")
os._exit(0)
"""


MANY = """
start()
x = torch.ones(256, device="bp")
for _ in range(12_000):
    for _ in range(2):
        x.mul_(1.0)
        dist.all_reduce(x)
    torch.bp.synchronize()
print(x.sum().item())
"""


@pytest.mark.slow
def test_many_collectives_while_the_host_waits_for_the_device() -> None:
    """The thread that starts a collective must not wait for that collective, whichever thread submits commands.

    A race: it hung in one of two runs, after thousands of collectives.
    """
    on_opencl.require_platform()
    assert ranks.first_output(MANY, 1, HANGS_AFTER="50", **DEVICES["opencl"]) == "256.0\n"


def test_a_late_peer_is_an_error_within_the_timeout(devices: dict[str, str]) -> None:
    output = ranks.first_output(TIMEOUT, 2, **devices)
    assert "timed out" in output, output


SHAPES = """
start()
x = filled(1.0, 3 + rank)
try:
    dist.all_reduce(x)
    x.sum().item()
except RuntimeError as error:
    text = str(error)
    assert "3" in text and "4" in text, text
    print("mismatch")
os._exit(0)
"""


def test_debug_level_detail_names_both_shapes(devices: dict[str, str]) -> None:
    outputs = ranks.run(SHAPES, 2, TORCH_DISTRIBUTED_DEBUG="DETAIL", **devices)
    assert any("mismatch" in output for output in outputs), outputs


ABORT = """
import time
start()
x = filled(1.0, 4)
dist.all_reduce(x)
x.sum().item()
if rank == 0:
    work = dist.all_reduce(x, async_op=True)
    dist.distributed_c10d._get_default_group()._get_backend(torch.device("bp")).abort()
    try:
        work.wait()
        x.sum().item()
    except RuntimeError as error:
        assert "aborted" in str(error), str(error)
        print("aborted")
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        assert "aborted" in str(error), str(error)
        print("refused")
else:
    time.sleep(60)  # until the test ends it: its end would close the connection before rank 0 aborts
os._exit(0)
"""


def test_abort_ends_waits(devices: dict[str, str]) -> None:
    output = ranks.first_output(ABORT, 2, **devices)
    assert "aborted" in output, output
    assert "refused" in output, output


DIFFERENT = """
os.environ["TORCH_BACKPLANE_DISCRETE"] = str(rank)  # rank 1 copies, rank 0 shares its memory
os.environ["TORCH_BACKPLANE_FALLBACK"] = "silent"
start()
for count, shape in ((5_000_003, (-1,)), (3, (3,)), (6_000_000, (5, 10, 300, 400))):
    x = torch.arange(count, dtype=torch.float32).remainder(100).view(shape)
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    y = x.to("bp") + rank
    dist.all_reduce(y)
    assert (y.cpu() == 2 * x + 1).all()
    dist.broadcast(y, src=1)
    assert (y.cpu() == 2 * x + 1).all()
dist.destroy_process_group()
"""


def test_ranks_with_different_devices_agree_on_the_parts_of_large_tensors() -> None:
    ranks.run(DIFFERENT, 2, **DEVICES["host"])


PROFILES = """
start()
for step in range(30):
    x, gathered = filled(rank, 100 + step), [filled(-1, 100 + step) for _ in range(size)]
    with torch.autograd.profiler.profile(use_kineto=True, record_shapes=True) as profile:
        dist.all_gather(gathered, x)
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert [one.mean().item() for one in gathered] == list(range(size)), gathered
    assert x.mean().item() == sum(range(size)), x
    events = {one.name: one for one in profile.function_events}
    assert events["backplane:all_reduce"].input_shapes == [[100 + step]], events["backplane:all_reduce"]
    assert not [name for name in events if name.startswith("gloo:")], events
dist.destroy_process_group()
"""


def test_collectives_can_end_after_the_profile(devices: dict[str, str]) -> None:
    ranks.run(PROFILES, 2, **devices)
