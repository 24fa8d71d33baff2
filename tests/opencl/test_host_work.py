"""Host work of planners, in stream order: PyTorch's CPU kernels and functions of C libraries."""

from __future__ import annotations

import ctypes
import random
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyopencl as cl
import pytest
import torch
from agreement import DEVICE, plans_from_the_start

from torch_backplane import _C, plans, preferences
from torch_backplane.planning import Call, LibraryFunction, call_on_cpu, host_sees_memory, operator, random_numbers
from torch_backplane.planning.costs import host_is_slow

aten = torch.ops.aten
LIBRARY = torch.library.Library("backplane_host_work", "FRAGMENT")  # never released: planners stay declared
blas = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def needs_sight() -> None:
    if not host_sees_memory(torch.empty(1, device=DEVICE).device):
        pytest.skip("the host cannot access the device's memory: it is not a CPU, or TORCH_BACKPLANE_DISCRETE is 1")


def defined(schema: str, planner: Callable[..., Any], **declared: Any) -> Any:
    """Defines an operator with this planner. `schema` is without the name; `declared` goes to `operator`."""
    name = f"test_{uuid.uuid4().hex}"
    LIBRARY.define(name + schema)
    operator(f"backplane_host_work::{name}", variants=False, **declared)(planner)
    return getattr(torch.ops.backplane_host_work, name)


def test_cpu_kernels_access_device_memory() -> None:
    needs_sight()
    a, b = torch.randint(9, (7, 5)).float(), torch.randint(9, (4, 5)).float()  # sums are exact
    out = torch.zeros(9, 7, device=DEVICE)
    call_on_cpu(aten.mm.out, b.to(DEVICE), a.to(DEVICE).T, out=out[2:6])
    assert torch.equal(out[2:6].cpu(), b @ a.T)
    assert not out[:2].any()
    assert not out[6:].any()


def test_tensor_lists_and_scalars_are_passed() -> None:
    needs_sight()
    parts = [torch.arange(4.0), torch.ones(2), torch.zeros(0)]
    out = torch.empty(6, device=DEVICE)
    call_on_cpu(aten.cat.out, [part.to(DEVICE) for part in parts], 0, out=out)
    assert torch.equal(out.cpu(), torch.cat(parts))


def by_numbers(call: Call, tensors: list[torch.Tensor], numbers: list[Any]) -> list[torch.Tensor]:
    results = [one.clone(memory_format=torch.contiguous_format) for one in tensors]
    call_on_cpu(aten._foreach_mul_.ScalarList, results, numbers)
    return results


def test_one_plan_passes_lists_of_any_numbers() -> None:
    needs_sight()
    scaled = defined("(Tensor[] tensors, Scalar[] numbers) -> Tensor[]", by_numbers, dtypes="complex")
    kept: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    with plans_from_the_start():
        for sizes in ((3, 4), (5, 6), (3, 4)):
            tensors = [torch.randn(size, dtype=torch.complex64) for size in sizes]
            for numbers in ([2.0, 0.5], [-0.25, 8.0], [3, 0.5], [2 + 1j, 0.5], [7, 0.5], [0.5 - 3j, 4.0]):
                found = scaled([one.to(DEVICE) for one in tensors], numbers)
                kept.append((found, torch._foreach_mul(tensors, numbers)))
        counts = _C.plan_counts()[scaled.default.name()]
    assert counts["replays"] > counts["planner_calls"] > 0
    for found, expected in kept:
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)


def test_host_work_and_kernels_wait_for_each_other() -> None:
    needs_sight()
    a, out = torch.ones(1 << 20, device=DEVICE), torch.empty(1 << 20, device=DEVICE)
    for _ in range(20):
        a.add_(1)
        call_on_cpu(aten.mul.out, a, a, out=out)
        out.sub_(a)
        call_on_cpu(aten.sub.out, out, a, out=a)
        a.copy_(out.sign())
    want, copy = torch.ones(1), None
    for _ in range(20):
        want += 1
        copy = want * want - want
        want = copy.sign()
    assert torch.equal(a.cpu(), want.expand(1 << 20))


def test_buffers_of_several_segments() -> None:
    needs_sight()
    # Too large to share a segment. Allocated in this order and used in others.
    tensors = [torch.full((3 << 20,), float(i), device=DEVICE) for i in range(6)]
    for order in ([0, 1, 2], [5, 4, 3], [2, 5, 0], [3, 3, 1], [1, 0, 1], [4, 2, 2]):
        out, a, b = (tensors[i] for i in order)
        want = (a + 10 * b).cpu()
        call_on_cpu(aten.add.out, a, b, alpha=10, out=out)
        assert torch.equal(out.cpu(), want)


def scaled_by_blas(call: Call, self: torch.Tensor, factor: Any) -> torch.Tensor:
    result = self.clone(memory_format=torch.contiguous_format)
    sscal = LibraryFunction("sscal_", blas.sscal_, torch.int32, torch.float32, torch.Tensor, torch.int32)
    sscal(result.numel(), factor, result, 1)
    return result


def test_library_calls_are_replayed_with_other_numbers() -> None:
    needs_sight()
    scaled = defined("(Tensor self, Scalar factor) -> Tensor", scaled_by_blas)
    with plans_from_the_start():
        x = torch.randn(3, 4)
        for factor in (2.0, -0.5, 3.25):
            assert torch.equal(scaled(x.to(DEVICE), factor).cpu(), x * factor)
        counts = _C.plan_counts()[scaled.default.name()]
        assert (counts["planner_calls"], counts["replays"], counts["unplannable_calls"]) == (1, 2, 0)
        assert "on the host sscal_ at " in plans.explain(scaled, x.to(DEVICE), 2.0)


def test_numbers_are_passed_by_value_and_by_reference() -> None:
    needs_sight()
    seen = []

    double_at, byte_at = ctypes.POINTER(ctypes.c_double), ctypes.POINTER(ctypes.c_int8)

    @ctypes.CFUNCTYPE(None, ctypes.c_int64, double_at, ctypes.c_void_p, byte_at)
    def function(value: int, double: Any, memory: int, byte: Any) -> None:
        seen.append((value, double[0], ctypes.c_float.from_address(memory).value, byte[0]))

    x = torch.tensor([1.5, 2.5], device=DEVICE)
    LibraryFunction("function", function, int, torch.float64, torch.Tensor, torch.int8)(-3, 0.1, x[1:], -7)
    torch.bp.synchronize()
    assert seen == [(-3, 0.1, 2.5, -7)]


@preferences.preferring("products", "host")
def test_matrix_products_equal_the_cpus_bitwise() -> None:
    needs_sight()
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    for dtype in (one for one in dtypes if not host_is_slow(one)):
        a, b = torch.randn(3, 133, 65, dtype=dtype), torch.randn(3, 65, 77, dtype=dtype)
        c = torch.randn(77, dtype=dtype)
        on_device = [tensor.to(DEVICE) for tensor in (a, b, c)]
        assert torch.equal(torch.bmm(*on_device[:2]).cpu(), torch.bmm(a, b))
        got = torch.addmm(on_device[2], on_device[0][0], on_device[1][0], beta=0.5, alpha=2)
        assert torch.equal(got.cpu(), torch.addmm(c, a[0], b[0], beta=0.5, alpha=2))


def test_set_num_threads_applies_to_host_work() -> None:
    """Also when the program changes it later: OpenMP keeps the number per thread."""
    needs_sight()
    seen = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def function(memory: int) -> None:
        seen.append(torch.get_num_threads())

    work = LibraryFunction("function", function, torch.Tensor)
    x, before = torch.zeros(4, device=DEVICE), torch.get_num_threads()
    try:
        for count in (3, 1, 2):
            torch.set_num_threads(count)
            for _ in range(8):
                x.add_(1)
                work(x)
            torch.bp.synchronize()
    finally:
        torch.set_num_threads(before)
    assert seen == [3] * 8 + [1] * 8 + [2] * 8


@pytest.mark.parametrize("size", [90, 700])
def test_rounding_does_not_depend_on_timing(size: int) -> None:
    """Results are equal whether the queue is idle or busy with a kernel."""
    needs_sight()
    a, b, x = (torch.randn(size, size, device=DEVICE) for _ in range(3))
    with preferences.preferring("products", "host"):
        found = []
        for step in range(20):
            if step % 2:
                x.mul_(1.5)
            else:
                torch.bp.synchronize()
            found.append(a @ b)
        assert all(torch.equal(one, found[0]) for one in found)


def test_threads_that_share_a_stream_keep_kernels_and_host_work_in_order() -> None:
    needs_sight()
    results = {}

    def work(number: int) -> None:
        x, y = torch.zeros(1000 * (number + 1), device=DEVICE), torch.empty(1000 * (number + 1), device=DEVICE)
        for step in range(150):
            x.add_(1)
            call_on_cpu(aten.mul.Scalar_out, x, 2.0, out=y)
            if step % (number + 3) == 0:
                torch.bp.synchronize()
            call_on_cpu(aten.sub.out, y, x, out=x)
            call_on_cpu(aten.add.Scalar_out, x, 1.0, out=x)
        results[number] = x.cpu()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(x, torch.full_like(x, 300.0)) for x in results.values())


@pytest.mark.parametrize("seed", range(6))
def test_random_sequences_of_host_work_run_in_order(seed: int) -> None:
    needs_sight()
    choose = random.Random(seed)
    small, large = torch.rand(3, 5, 5) / 3, torch.rand(3, 400, 400) / 200
    want = [list(small), list(large)]
    have = [[one.to(DEVICE) for one in operands] for operands in want]
    event = torch.bp.Event()
    for _ in range(60):
        kind = choose.choice("pppppppkercs")
        operands = choose.randrange(2)
        x, y, to = (choose.randrange(3) for _ in range(3))
        for device, tensors in (("cpu", want[operands]), (DEVICE, have[operands])):
            if kind == "p" and to not in (x, y):
                torch.mm(tensors[x], tensors[y], out=tensors[to])
            elif kind == "k":
                tensors[x].mul_(1.5)
            elif kind == "c":
                tensors[to].copy_(tensors[x])
            elif kind == "e" and device == DEVICE:
                event.record()
            elif kind == "r" and device == DEVICE:
                event.wait()
            elif kind == "s" and device == DEVICE:
                torch.bp.synchronize()
    for tensors, results in zip(want, have, strict=True):
        for one, result in zip(tensors, results, strict=True):
            torch.testing.assert_close(result.cpu(), one)


def test_failed_call_leaves_its_neighbours_intact() -> None:
    needs_sight()
    a = torch.randint(3, (400, 400), device=DEVICE).float()  # exact in any order of summation
    out, other, wrong = (torch.empty_like(a) for _ in range(3))
    for _ in range(2):
        torch.bp.synchronize()  # the other stream does not wait for the fills
        stream = torch.bp.Stream()
        with stream:
            gate = _C._StreamGate(stream.device_index, stream.stream_id)
            call_on_cpu(aten.mm.out, a, a, out=out)
            call_on_cpu(aten.mm.out, a, a[:3], out=wrong)
            call_on_cpu(aten.mm.out, out, a, out=other)
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            gate.open()
        torch.bp.synchronize()
        assert torch.equal(other.cpu(), a.cpu() @ a.cpu() @ a.cpu())
        out.zero_()
        other.zero_()


def test_callbacks_can_exceed_the_limit_of_pending_commands() -> None:
    needs_sight()
    x = torch.zeros(4, device=DEVICE)
    x.add_(1).sub_(1)  # a first launch can wait for pending work, which would deadlock in a callback
    stream = torch.bp.Stream()
    torch.bp.synchronize()
    given: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def give(_: int) -> None:
        with stream:
            for _ in range(3000):
                x.add_(1)
        given.append(3000)

    many = LibraryFunction("give", give, torch.Tensor)
    for times in (1, 2):
        with stream:
            many(x)
        stream.synchronize()
        torch.bp.synchronize()
        assert (len(given), x.tolist()) == (times, [3000.0 * times] * 4)


def test_blocked_stream_does_not_block_other_streams() -> None:
    needs_sight()
    if any("Intel" in platform.vendor for platform in cl.get_platforms()):
        pytest.skip("Intel's runtime runs the host callbacks of all queues on one thread fewer than there are cores")
    a = torch.randint(9, (400, 400), device=DEVICE).float()
    out, other = torch.empty_like(a), torch.empty_like(a)
    torch.bp.synchronize()
    stream = torch.bp.Stream()
    with stream:
        first = _C._StreamGate(stream.device_index, stream.stream_id)
        call_on_cpu(aten.mm.out, a, a, out=out)
        second = _C._StreamGate(stream.device_index, stream.stream_id)
    thread = threading.Thread(target=first.open)
    thread.start()
    call_on_cpu(aten.mm.out, a, a, out=other)
    torch.bp.current_stream().synchronize()
    assert not stream.query()
    second.open()
    thread.join()
    assert torch.equal(out.cpu(), other.cpu())


@preferences.preferring("products", "host")
def test_calls_from_several_threads() -> None:
    needs_sight()
    a = torch.randint(9, (80, 80)).float()
    results: list[torch.Tensor] = []

    def work() -> None:
        x = a.to(DEVICE)
        results.extend((x @ x).cpu() for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    assert all(torch.equal(result, a @ a) for result in results)


# --- bad input -------------------------------------------------------------------------------------------------------


def test_kernel_errors_are_raised_at_the_next_synchronization() -> None:
    needs_sight()
    a, out = torch.ones(3, 4, device=DEVICE), torch.ones(3, 3, device=DEVICE)
    call_on_cpu(aten.mm.out, a, a, out=out)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.bp.synchronize()
    torch.bp.synchronize()  # the error is raised once
    assert torch.equal((out + 1).cpu(), torch.full((3, 3), 2.0))


def test_result_that_needs_a_resize_is_an_error() -> None:
    needs_sight()
    a, out = torch.ones(3, 3, device=DEVICE), torch.ones(1, device=DEVICE)
    call_on_cpu(aten.mm.out, a, a, out=out)
    with pytest.raises(RuntimeError, match="resize"):
        torch.bp.synchronize()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        ("call_on_cpu(aten.mm.default, x, x)", ValueError, "aten::mm does not write to any of its arguments"),
        ("call_on_cpu(aten.mm.out, x, out=x)", TypeError, "is missing the argument 'mat2'"),
        ("call_on_cpu(aten.mm.out, x, x, x, out=x)", TypeError, "got unexpected arguments: 1 positional"),
        ("call_on_cpu(aten.mm.out, x, x, outs=x, out=x)", TypeError, "got unexpected arguments: outs"),
        ("call_on_cpu(aten.mm.out, x, x.cpu(), out=x)", TypeError, "got a tensor on cpu"),
        ('call_on_cpu(aten.mm.out, x, x.to("bp:1"), out=x)', ValueError, "tensors on bp:0 and bp:1"),
        ('LibraryFunction("f", 0, torch.Tensor)', ValueError, "needs its address, and f has none"),
        ('LibraryFunction("f", 1, float)', TypeError, "a parameter of f must be torch.Tensor, a dtype or int"),
        ('LibraryFunction("f", 1, *[int] * 21)', ValueError, "f has 21 parameters, but at most 20 are"),
        ('LibraryFunction("f", 1, int)(1, 2)', ValueError, "f takes 1 arguments, but got 2"),
        ('LibraryFunction("f", 1, torch.Tensor)(3)', TypeError, "argument 0 of f must be a tensor, but got <class"),
        ('LibraryFunction("f", 1, int)(3)', TypeError, "needs a bp tensor among its arguments"),
    ],
)
def test_invalid_arguments_are_errors(call: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        eval(call, globals() | {"x": torch.ones(2, 2, device=DEVICE)})


def test_devices_without_host_access_raise() -> None:
    x = torch.ones(2, 2, device=DEVICE)
    if host_sees_memory(x.device):
        pytest.skip("needs TORCH_BACKPLANE_DISCRETE=1, or a device that is not a CPU")
    with pytest.raises(RuntimeError, match="the host cannot access the memory of bp:0"):
        call_on_cpu(aten.mm.out, x, x, out=x)
    assert torch.equal((x @ x).cpu(), torch.full((2, 2), 2.0))  # computed by a kernel


def test_host_callbacks_in_graphs_get_new_random_numbers_at_each_replay() -> None:
    needs_sight()
    seen: list[tuple[int, int]] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    def note(seed: int, offset: int, memory: int) -> None:
        seen.append((seed, offset))

    function = LibraryFunction("note", note, int, int, torch.Tensor)

    def planner(call: Call, x: torch.Tensor) -> torch.Tensor:
        result = x.clone()
        function(*random_numbers(4), result)
        return result

    noted = defined("(Tensor x) -> Tensor", planner)
    torch.manual_seed(7)
    with plans_from_the_start():
        for size in (3, 5, 3):
            noted(torch.ones(size, device=DEVICE))
        torch.bp.synchronize()
        step = seen[1][1] - seen[0][1]
        assert step > 0
        assert seen == [(7, i * step) for i in range(3)]
        seen.clear()
        graph, x = torch.bp.Graph(), torch.ones(4, device=DEVICE)
        with torch.bp.graph(graph):
            noted(x)
            noted(x)
        assert seen == []
        for _ in range(2):
            graph.replay()
        noted(x)
        torch.bp.synchronize()
    assert seen == [(7, i * step) for i in range(3, 8)]
