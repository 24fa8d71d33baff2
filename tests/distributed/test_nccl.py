"""Tests NCCL on emulated CUDA devices, one per rank: results as of Gloo, streams, failures, and when it is not used.

The emulated NCCL (tests/cuda_emulator/src/nccl.cpp) checks its arguments, and that all ranks make the same calls.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path

import on_cuda
import pytest
import ranks
import test_collectives
import test_training

from torch_backplane.drivers.cuda.libraries import nccl
from torch_backplane.drivers.cuda.libraries.loading import load

# Functions for programs: calls("ncclAllReduce") is the number of calls of this process.
COUNT = """
import ctypes


def calls(name):
    library = ctypes.CDLL(os.environ["TORCH_BACKPLANE_NCCL_LIBRARY"])
    text = ctypes.create_string_buffer(1 << 16)
    library.emulator_calls(text, ctypes.c_size_t(1 << 16))
    return int(dict(line.split() for line in text.value.decode().splitlines()).get(name, 0))


def error_of(function, *given, **options):
    try:
        function(*given, **options)
        torch.bp.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


"""

BITWISE = """for op in ("BAND", "BOR", "BXOR"):
    check(all_reduce, torch.randint(0, 99, (5,)), op=getattr(dist.ReduceOp, op))
"""


@pytest.fixture
def devices() -> dict[str, str]:
    """Environment variables with which each rank uses its own emulated GPU."""
    if on_cuda.missing():
        pytest.skip(on_cuda.missing())
    return {**on_cuda.environment(), "TORCH_BACKPLANE_FALLBACK": "silent", "DEVICE_PER_RANK": "1"}


def run(code: str, size: int, devices: Mapping[str, str], **env: str) -> list[str]:
    return list(ranks.run(COUNT + code, size, **{**devices, **env}))


def first_output(code: str, size: int, devices: Mapping[str, str], **env: str) -> str:
    return ranks.first_output(COUNT + code, size, **{**devices, **env})


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.slow
def test_collectives_agree_with_gloo(devices: dict[str, str], size: int) -> None:
    program = test_collectives.AGREE.replace("         any_source, ", "         ").replace(BITWISE, "")
    assert len(test_collectives.AGREE) - len(program) > len(BITWISE)
    used = """
for name in ("AllGather", "AllReduce", "Broadcast", "Recv", "Reduce", "ReduceScatter", "Send"):
    assert calls("nccl" + name) > 0, name
assert calls("ncclCommAbort") == 0
"""
    assert all("agree" in output for output in run(program + used, size, devices))


REDUCTIONS = """
start()
ReduceOp = dist.ReduceOp


def expected_of(parts, op):
    stacked = torch.stack(parts)
    wide = stacked.double() if stacked.is_floating_point() else stacked.long()
    if op == "SUM" or op == "AVG":
        total = wide.sum(0)
        total = total.clamp(max=1) if stacked.dtype == torch.bool else total
        divided = total / size if stacked.is_floating_point() else total // size
        return (divided if op == "AVG" else total).to(stacked.dtype)
    function = {"PRODUCT": lambda x: x.prod(0), "MIN": lambda x: x.amin(0), "MAX": lambda x: x.amax(0)}[op]
    return function(wide).to(stacked.dtype)


def all_reduce(x, op):
    dist.all_reduce(x, op)
    return x, slice(None)


def all_reduce_coalesced(x, op):
    tensors = [x, x[:1].clone()]
    dist.all_reduce_coalesced(tensors, op)
    assert (tensors[1] == x[:1]).all()
    return x, slice(None)


def reduce(x, op):
    before = x.clone()
    dist.reduce(x, dst=1, op=op)
    if rank != 1:
        assert (x == before).all()
        return x, None
    return x, slice(None)


def reduce_scatter(x, op):
    out = torch.empty_like(x[:2])
    dist.reduce_scatter(out, [one.clone() for one in x.split(2)], op)
    return out, slice(2 * rank, 2 * rank + 2)


def reduce_scatter_tensor(x, op):
    out = torch.empty_like(x[:2])
    dist.reduce_scatter_tensor(out, x, op)
    return out, slice(2 * rank, 2 * rank + 2)


functions = [all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_tensor]
floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
numbers = (*floats, torch.int32, torch.int64, torch.int8, torch.uint8)
values = [torch.arange(2 * size).remainder(3) + other for other in range(size)]
for dtype in (*numbers, torch.bool):
    for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG"):
        if dtype == torch.bool and op == "AVG":
            continue
        parts = [one.remainder(2).bool() if dtype == torch.bool else one.to(dtype) for one in values]
        expected = expected_of(parts, op)
        for function in functions:
            found, where = function(parts[rank].to("bp"), getattr(ReduceOp, op))
            if where is not None:
                torch.testing.assert_close(
                    found.cpu(), expected[where], msg=lambda text: f"{function.__name__} {op} {dtype}: {text}")

for dtype in floats:
    weighted = sum(one.double() * (other + 0.5) for other, one in enumerate(values)).to(dtype)
    factor = torch.tensor([rank + 0.5], device="bp")
    for op in (dist._make_nccl_premul_sum(rank + 0.5), dist._make_nccl_premul_sum(factor)):
        for function in functions:
            found, where = function(values[rank].to(dtype).to("bp"), op)
            if where is not None:
                torch.testing.assert_close(found.cpu(), weighted[where], rtol=1e-2, atol=0)
assert calls("ncclRedOpCreatePreMulSum") == calls("ncclRedOpDestroy") > 0

x = filled(1.0, 4)
for dtype in (torch.int16, torch.uint32, torch.float8_e4m3fn):
    message = error_of(dist.all_reduce, torch.zeros(4, dtype=dtype).to("bp"))
    assert message.startswith("TypeError: NCCL reduces tensors of float32, float64, "), message
for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
    assert "NCCL has no bitwise reductions" in error_of(dist.all_reduce, x.int(), op=op)
assert "ReduceOp.AVG needs tensors of numbers" in error_of(dist.all_reduce, x.bool(), op=ReduceOp.AVG)
scaled = dist._make_nccl_premul_sum(0.5)
assert "needs tensors of a floating-point dtype, not Int" in error_of(dist.all_reduce, x.int(), op=scaled)
y = torch.view_as_complex(torch.ones(3, 2)).to("bp")
dist.all_reduce(y)
assert (y.cpu() == size * (1 + 1j)).all()
dist.all_reduce(x)  # refused calls change nothing
assert x.tolist() == [size] * 4
dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.slow
def test_reductions_of_every_dtype(devices: dict[str, str], size: int) -> None:
    run(REDUCTIONS, size, devices)


MOVES = """
start()
for dtype in (torch.int16, torch.uint64, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2):
    parts = [torch.arange(6).remainder(2).add(other % 2).to(dtype).view(2, 3) for other in range(size)]
    mine, following = parts[rank].to("bp"), (rank + 1) % size
    outs = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(outs, mine)
    assert all(out.cpu().tolist() == part.tolist() for out, part in zip(outs, parts)), dtype
    out = torch.empty_like(mine)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, following), dist.P2POp(dist.irecv, out, (rank - 1) % size)])
    assert len(works) == 1
    works[0].wait()
    assert out.cpu().tolist() == parts[rank - 1].tolist(), dtype
    dist.scatter(out, outs if rank == 1 else None, src=1)
    assert out.cpu().tolist() == parts[rank].tolist(), dtype

# Tensors of different sizes, and without elements.
mine = torch.full((rank, 3), float(rank), device="bp")
outs = [torch.empty(other, 3, device="bp") for other in range(size)]
dist.all_gather(outs, mine)
assert [out.cpu().tolist() for out in outs] == [[[float(other)] * 3] * other for other in range(size)]
sent = [torch.full((rank + other,), float(rank), device="bp") for other in range(size)]
outs = [torch.empty(rank + other, device="bp") for other in range(size)]
dist.all_to_all(outs, sent)
assert [out.tolist() for out in outs] == [[float(other)] * (rank + other) for other in range(size)]
dist.broadcast(torch.empty(0, device="bp"), src=0)
dist.all_reduce(torch.empty(0, 4, device="bp"))

# Coalesced calls are one group.
x, y = filled(rank + 1.0, 4), filled(2.0 * rank, 3)
outs = [torch.empty(4 * size, device="bp"), torch.empty(3 * size, device="bp")]
begun = calls("ncclGroupStart")
with dist._coalescing_manager(device=x.device, async_ops=True) as manager:
    dist.all_gather_into_tensor(outs[0], x)
    dist.all_gather_into_tensor(outs[1], y)
manager.wait()
assert calls("ncclGroupStart") == begun + 1
assert outs[0].tolist() == [other + 1.0 for other in range(size) for _ in range(4)]
assert outs[1].tolist() == [2.0 * other for other in range(size) for _ in range(3)]
scattered = [torch.empty(4, device="bp"), torch.empty(3, device="bp")]
with dist._coalescing_manager(device=x.device):
    dist.reduce_scatter_tensor(scattered[0], outs[0])
    dist.reduce_scatter_tensor(scattered[1], outs[1])
assert scattered[0].tolist() == [size * (rank + 1.0)] * 4 and scattered[1].tolist() == [size * 2.0 * rank] * 3

# Memory in another order than the dimensions is moved as it is; gaps are refused.
image = torch.arange(120.0).view(2, 3, 4, 5).to("bp").contiguous(memory_format=torch.channels_last)
dist.all_reduce(image)
assert (image.cpu() == size * torch.arange(120.0).view(2, 3, 4, 5)).all()
for call in (lambda: dist.all_reduce(filled(1.0, 4, 4)[:, ::2]), lambda: dist.broadcast(filled(1.0, 4, 4)[:, :2], 0)):
    assert "ValueError: Tensors must be contiguous, but got strides" in error_of(call)
assert "must be contiguous" in error_of(dist.all_to_all_single, image, image)
assert "must have 2 times as many" in error_of(
    dist.all_gather_into_tensor, torch.empty(5, device="bp"), x, group=dist.new_group([0, 1])) if rank < 2 else True
assert "NotImplementedError: NCCL cannot receive from any rank: name the source" in error_of(dist.recv, x)
assert "one tensor" in error_of(dist.group.WORLD._get_backend(x.device).allreduce, [x, y])
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.slow
def test_every_dtype_and_size_is_moved(devices: dict[str, str], size: int) -> None:
    run(MOVES, size, devices)


@pytest.mark.slow
def test_default_backend_split_groups_and_debug_level(devices: dict[str, str]) -> None:
    ranks.run(test_collectives.DEFAULT, 2, **devices)
    ranks.run(test_collectives.SPLIT, 3, **devices)
    outputs = ranks.run(test_collectives.SHAPES, 2, TORCH_DISTRIBUTED_DEBUG="DETAIL", **devices)
    assert all("mismatch" in output for output in outputs)


@pytest.mark.slow
def test_training_has_the_losses_of_one_process(devices: dict[str, str]) -> None:
    expected = test_training.losses("single", 1, devices)
    for kind in ("ddp", "hook", "fsdp", "tp"):
        assert test_training.losses(kind, 2, devices) == pytest.approx(expected, rel=1e-4, abs=1e-5), kind
    staged = {**devices, "TORCH_BACKPLANE_NCCL_LIBRARY": "none"}
    assert test_training.losses("ddp", 2, staged) == pytest.approx(expected, rel=1e-4, abs=1e-5)


# --- streams and memory ----------------------------------------------------------------------------------------------

STREAMS = """
start()
store = dist.distributed_c10d._get_default_store()
x = filled(float(rank), 1 << 16)
dist.broadcast(filled(1.0, 1), src=0)  # the ranks meet
if rank == 1:
    store.get("go")  # rank 1 joins late
work = dist.all_reduce(x, async_op=True)
work.wait()
y = x + 1
if rank == 0:
    blocked = work.is_completed()  # wait() has made the stream wait, not the host
    store.set("go", "1")
    assert not blocked
assert (y == sum(range(size)) + 1).all()
assert work.is_completed() and work.is_success() and work.exception() is None
assert work.get_future().wait()[0].data_ptr() == x.data_ptr()

# On another stream; the tensor is released meanwhile.
side = torch.bp.Stream()
for number in range(20):
    with torch.bp.stream(side):
        torch.bp._sleep(2_000_000)
        x = filled(float(number), 1 << 14)
        out = torch.empty(size << 14, device="bp")
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        del x
        other = filled(-1.0, 1 << 14)
    work.wait()
    found = out + 0
    assert (found == number).all()

# In use by the communication until it has ended, although no stream waits for it.
x = filled(1.0, 1 << 14)
address = x.data_ptr()
if rank == 1:
    store.get("again")
dist.all_reduce(x, async_op=True)
del x
fresh = [torch.empty(1 << 14, device="bp") for _ in range(4)]
if rank == 0:
    assert address not in [one.data_ptr() for one in fresh]
    store.set("again", "1")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_streams_wait_and_memory_is_kept(devices: dict[str, str]) -> None:
    run(STREAMS, 2, devices)


BARRIER = """
start("backplane")
store = dist.distributed_c10d._get_default_store()
dist.barrier()
torch.bp._sleep(50_000_000)
begun = calls("ncclAllReduce")
if rank == 1:
    store.set("arrived", "1")
dist.barrier()
assert store.check(["arrived"])  # the host has waited for the other rank
assert torch.bp.current_stream().query() and calls("ncclAllReduce") == begun + 1
work = dist.barrier(async_op=True)
work.wait()
assert work.is_completed()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_barrier_makes_the_host_wait(devices: dict[str, str]) -> None:
    run(BARRIER, 2, devices)


EXIT = """
start()
x = filled(1.0, 4)
dist.all_reduce(x)
assert x.tolist() == [size] * 4
if MODE == "destroy":
    dist.destroy_process_group()
    assert calls("ncclCommFinalize") == calls("ncclCommDestroy") == 1 and calls("ncclCommAbort") == 0
print("done")
"""


@pytest.mark.parametrize("mode", ["destroy", "exit"])
def test_programs_end(devices: dict[str, str], mode: str) -> None:
    """With and without destroy_process_group()."""
    for output in run(f"MODE = {mode!r}\n{EXIT}", 2, devices):
        assert output.splitlines()[-1] == "done" or mode == "exit", output  # PyTorch warns about the latter
        assert "done" in output


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["LOST", "TIMEOUT", "ABORT"])
@pytest.mark.slow
def test_lost_and_late_ranks_and_abort(devices: dict[str, str], program: str) -> None:
    output = first_output(getattr(test_collectives, program), 2, devices)
    expected = {"LOST": ["lost a peer"], "TIMEOUT": ["timed out"], "ABORT": ["aborted", "refused"]}[program]
    assert all(text in output for text in expected), output


MISSING = """
import datetime, time
start(timeout=datetime.timedelta(seconds=3))
x = filled(1.0, 10)
store = dist.distributed_c10d._get_default_store()
if rank == 1:
    if KIND == "joins another":
        dist.isend(x, 0)
    store.get("done")
    os._exit(0)
begin = time.time()
message = error_of(dist.all_reduce, x)
assert 2 < time.time() - begin < 8, time.time() - begin
print(message.splitlines()[0])
refusal = error_of(dist.all_reduce, x)
store.set("done", "1")
print(refusal.splitlines()[0])
os._exit(0)
"""


@pytest.mark.parametrize("kind", ["never", "joins another"])
@pytest.mark.slow
def test_a_missing_rank_is_an_error_within_the_timeout(devices: dict[str, str], kind: str) -> None:
    output = first_output(f"KIND = {kind!r}\n{MISSING}", 2, devices)
    first, second = [line for line in output.splitlines() if "Error" in line]
    if kind == "never":
        reason = "DistBackendError: rank 1 did not begin a collective within the timeout, on rank 0 of 2"
        assert first.startswith(reason)
        assert second.startswith(reason)
    else:
        assert first.startswith("DistBackendError: all_reduce of 40 bytes failed on rank 0 of 2 (group '"), output
        assert "within" in first
        assert "failed earlier: all_reduce: " in second


FAULT = """
start()
x = filled(1.0, 10)
if rank == 0:
    print(error_of(dist.all_reduce, x).splitlines()[0])
    os._exit(0)
try:
    dist.all_reduce(x)
    x.sum().item()
except RuntimeError:
    pass
os._exit(0)
"""


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("ncclGetUniqueId:1:2", "ncclGetUniqueId answered 2 (internal error"),
        ("ncclCommInitRankConfig:1:1", "ncclCommInitRankConfig answered 1 (unhandled cuda error"),
        ("ncclGroupStart:1:3", "ncclGroupStart answered 3 (internal error"),
        ("ncclAllReduce:1:4", "ncclAllReduce answered 4 (invalid argument"),
        ("ncclGroupEnd:1:5", "ncclAllReduce answered 5 (invalid usage"),
        ("ncclCommGetAsyncError:1:6", "answered 6 (remote process exited"),
    ],
)
@pytest.mark.slow
def test_a_failing_call_is_an_error_that_names_it(devices: dict[str, str], fault: str, says: str) -> None:
    output = first_output(FAULT, 2, devices, CUDA_EMULATOR_FAULTS=fault)
    assert "DistBackendError: all_reduce of 40 bytes failed on rank 0 of 2" in output, output
    assert says in output, output


MISUSE = """
start()
x = filled(1.0, 4)
dist.all_reduce(x)
message = error_of(dist.all_reduce, x.to(f"bp:{2 + rank}"))
assert f"communicates from bp:{rank}, the device of its first tensors, but got a tensor on bp:{2 + rank}" in message
assert "bp tensors, but got one on cpu" in error_of(dist.all_gather, [torch.ones(4) for _ in range(size)], x)
message = error_of(dist.all_gather, [torch.empty(4, device=f"bp:{2 + rank}") for _ in range(size)], x)
assert "needs tensors on one device" in message, message
message = error_of(dist.send, x, rank)
assert "ValueError" in message, message


def capture():
    with torch.bp.graph(torch.bp.Graph()):
        dist.all_reduce(x)


assert "captured" in error_of(capture)
dist.all_reduce(x)
assert x.tolist() == [size ** 2] * 4
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_refused_calls_change_nothing(devices: dict[str, str]) -> None:
    run(MISUSE, 2, devices)


# --- without NCCL ----------------------------------------------------------------------------------------------------

SHARED = """
assert calls("ncclCommInitRankConfig") == 0
"""


@pytest.mark.slow
def test_ranks_that_share_a_gpu_use_copies(devices: dict[str, str]) -> None:
    outputs = run(test_collectives.AGREE + SHARED, 2, devices, DEVICE_PER_RANK="0")
    for output in outputs:
        assert "agree" in output
        assert output.count("ranks 0 and 1 of a process group share a GPU, and NCCL needs one GPU per rank") == 1


MIXED = """
if rank == 1:
    os.environ["TORCH_BACKPLANE_NCCL_LIBRARY"] = "none"
torch.bp.set_device(rank)
start()
x = filled(1.0, 4)
dist.all_reduce(x)
assert x.tolist() == [size] * 4
dist.barrier()
print("done")
dist.destroy_process_group()
"""


def test_a_rank_without_nccl_makes_all_use_copies(devices: dict[str, str]) -> None:
    outputs = run(MIXED, 2, devices, DEVICE_PER_RANK="0")
    assert "rank 1 of a process group has no communication library" in outputs[0]
    assert all("done" in output for output in outputs)


FINDING = """
from torch_backplane import drivers
finding = [one for one in drivers.findings()["cuda"] if one.what == "NCCL"][0]
print(finding.ok, finding.found, finding.remedy, sep="|")
start()
x = filled(1.0, 4)
dist.all_reduce(x)
assert x.tolist() == [size] * 4
dist.destroy_process_group()
print(drivers.device(0).properties.software.partition("NCCL")[2])
"""


@pytest.mark.parametrize(
    ("env", "finding", "version"),
    [
        ({}, "True|version 2.29|", " 2.29"),
        ({"CUDA_EMULATOR_NCCL_VERSION": "23203"}, "True|version 2.32|", " 2.32"),
        (
            {"CUDA_EMULATOR_NCCL_VERSION": "21304"},
            "False|version 2.13 is not used: version 2.14 or later is required|pip install --upgrade nvidia-nccl-cu13",
            "",
        ),
        (
            {"TORCH_BACKPLANE_NCCL_LIBRARY": "none"},
            "True|switched off by TORCH_BACKPLANE_NCCL_LIBRARY: collectives use copies in host memory|",
            "",
        ),
        (
            {"TORCH_BACKPLANE_NCCL_LIBRARY": "libm.so.6"},
            "False|is not used: it has no function ncclGetUniqueId, ",
            "",
        ),
    ],
)
@pytest.mark.slow
def test_what_doctor_says(devices: dict[str, str], env: dict[str, str], finding: str, version: str) -> None:
    first, *_, last = ranks.run(FINDING, 1, **{**devices, **env})[0].splitlines()
    assert first.startswith(finding)
    assert last == version.rstrip() or version == last


def test_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nccl.PRODUCT.variable, raising=False)

    class NotFound(RuntimeError):
        pass

    def find(name: str) -> None:
        assert name == "nccl"
        raise NotFound

    module = types.SimpleNamespace(DynamicLibNotFoundError=NotFound, load_nvidia_dynamic_lib=find)
    monkeypatch.setitem(__import__("sys").modules, "cuda.pathfinder", module)
    for version, package in (((12, 4), "nvidia-nccl-cu12"), ((13, 0), "nvidia-nccl-cu13")):
        finding = load(nccl.PRODUCT, version).finding
        assert finding.ok
        assert finding.found == "not installed: collectives use copies in host memory"
        assert finding.remedy == f"pip install {package}"
    monkeypatch.setenv(nccl.PRODUCT.variable, str(Path(__file__)))
    assert not load(nccl.PRODUCT, (13, 0)).finding.ok
