"""The caching allocator as programs use it: errors, reuse, streams, threads, forks, options."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import random
import re
import subprocess
import textwrap
import threading
from collections.abc import Callable, Iterator

import forked
import pytest
import torch
from driver_packages import MINIMAL, install, install_toy

import torch_backplane  # noqa: F401
from torch_backplane import _C
from torch_backplane.accelerator import memory

MIB = 1 << 20
Run = Callable[..., subprocess.CompletedProcess[str]]

PRELUDE = """
    import torch, torch_backplane
    from torch_backplane import _C
    from torch_backplane.accelerator import memory
    MIB = 1 << 20
    def empty(n, device="bp"): return torch.empty(n, dtype=torch.uint8, device=device)
"""
SETTINGS: dict[str, str | None] = {
    "TORCH_BACKPLANE_DRIVERS": "host",
    "TORCH_BACKPLANE_HOST_MEMORY": "64MiB",
    "TORCH_BACKPLANE_HOST_DEVICES": "1",
    "TORCH_BACKPLANE_VISIBLE_DEVICES": None,
}


def run(code: str, site: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a separate process, by default on one host device with 64 MiB."""
    return forked.run(
        textwrap.dedent(PRELUDE) + textwrap.dedent(code), pathlib.Path(site), **{**SETTINGS, **environment}
    )


def check(code: str, **environment: str) -> str:
    result = run(code, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(autouse=True)
def clean() -> None:
    torch.empty(1, device="bp")
    memory.empty_cache()


def empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="bp")


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Keeps the stream busy until the end of the `with` block."""
    if torch.bp.get_device_properties(stream.device_index).driver != "host":  # others may lack host callbacks
        with stream:
            torch.bp._sleep(1_000_000_000)  # one second; the block takes about a millisecond
        yield
        stream.synchronize()
        return
    gate = _C._StreamGate(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        gate.open()


# --- out of memory ---------------------------------------------------------------------------------------------------


def test_the_out_of_memory_message_matches_torch_cuda() -> None:
    output = check("""
        small = empty(3 * MIB)
        try:
            empty(100 * MIB)
        except torch.OutOfMemoryError as error:
            print(error)
        else:
            raise SystemExit("no error")
        assert memory.memory_stats()["num_ooms"] == 1
        assert memory.memory_stats()["num_alloc_retries"] == 1
        again = empty(40 * MIB)
        again.fill_(7)
        assert int(again[-1].cpu()) == 7
    """)
    assert re.match(
        r"bp out of memory\. Tried to allocate 100\.00 MiB\. Device 0 has a total capacity of 64\.00 MiB of which "
        r"44\.00 MiB is free\. Of the allocated memory 3\.00 MiB is allocated by PyTorch, and 17\.00 MiB is reserved "
        r"by PyTorch but unallocated\. If reserved but unallocated memory is large try setting "
        r"PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation\. See documentation for Memory Management "
        r"\(https://\S+\)\n$",
        output,
    )


def test_cached_memory_is_freed_before_out_of_memory() -> None:
    check("""
        for size in (30, 40, 50, 60):  # each fits only after the previous one is freed
            empty(size * MIB)
        stats = memory.memory_stats()
        assert stats["num_alloc_retries"] == 3 and stats["num_ooms"] == 0, stats
        assert memory.memory_reserved() == 60 * MIB
    """)


def test_the_out_of_memory_message_counts_private_pools() -> None:
    output = check("""
        pool = memory.MemPool()
        with memory.use_mem_pool(pool):
            empty(20 * MIB)
        try:
            empty(60 * MIB)
        except torch.OutOfMemoryError as error:
            print(error)
    """)
    assert "20.00 MiB is allocated by PyTorch, with 20.00 MiB allocated in private pools" in output


def test_out_of_memory_of_more_than_an_exbibyte() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="more than 1EB"):
        torch.empty(1 << 61, dtype=torch.uint8, device="bp")


def test_memory_fraction_limits_this_process() -> None:
    output = check("""
        assert memory.get_per_process_memory_fraction() == 1.0
        memory.set_per_process_memory_fraction(0.5)
        assert memory.get_per_process_memory_fraction() == 0.5
        held = empty(20 * MIB)
        try:
            empty(20 * MIB)
        except torch.OutOfMemoryError as error:
            print(error)
        memory.set_per_process_memory_fraction(1.0)
        empty(20 * MIB)
    """)
    assert "of which 44.00 MiB is free. 32.00 MiB allowed; Of the allocated memory 20.00 MiB" in output


def test_fraction_from_the_environment() -> None:
    check(
        """
        assert memory.get_per_process_memory_fraction() == 0.25
        try:
            empty(17 * MIB)
        except torch.OutOfMemoryError:
            pass
        else:
            raise SystemExit("no error")
        """,
        PYTORCH_ALLOC_CONF="per_process_memory_fraction:0.25",
    )


def test_out_of_memory_observers_run_before_the_error() -> None:
    output = check("""
        memory._attach_out_of_memory_observer(lambda *numbers: print(*numbers))
        try:
            empty(65 * MIB)
        except torch.OutOfMemoryError:
            print("error")
    """)
    assert output == f"0 {66 * MIB} {64 * MIB} {64 * MIB}\nerror\n"


# --- frees -----------------------------------------------------------------------------------------------------------


def test_freeing_twice_is_an_error() -> None:
    address = memory.caching_allocator_alloc(1000)
    memory.caching_allocator_delete(address)
    with pytest.raises(RuntimeError, match=r"invalid device pointer: 0x[0-9a-f]+ .*freed twice"):
        memory.caching_allocator_delete(address)


def test_freeing_an_address_that_was_not_allocated_is_an_error() -> None:
    address = memory.caching_allocator_alloc(4096)
    for wrong in (address + 1, address + 512, 12345, 1 << 60):
        with pytest.raises(RuntimeError, match="invalid device pointer"):
            memory.caching_allocator_delete(wrong)
    memory.caching_allocator_delete(address)


def test_zero_bytes_allocate_nothing() -> None:
    before = memory.memory_stats()["allocation.all.allocated"]
    tensor = empty(0)
    assert tensor.data_ptr() == 0
    assert tensor.device == torch.device("bp", 0)
    assert memory.caching_allocator_alloc(0) == 0
    memory.caching_allocator_delete(0)
    assert memory.memory_stats()["allocation.all.allocated"] == before


def test_freed_memory_is_reused() -> None:
    first = empty(5000).data_ptr()
    assert empty(5000).data_ptr() == first


def test_caching_can_be_switched_off() -> None:
    reserved = memory.memory_reserved()
    with memory.caching_allocator_disabled():
        tensor = empty(1000)
        assert memory.memory_reserved() == reserved + 2 * MIB
        del tensor
        assert memory.memory_reserved() == reserved
    tensor = empty(64 * MIB)  # fits into no segment that earlier tests can have left
    del tensor
    assert memory.memory_reserved() > reserved


def test_addresses_inside_an_allocation_are_found() -> None:
    tensor = empty(1000)
    start = tensor.data_ptr()
    assert [_C._memory_device_of_address(start + offset) for offset in (0, 1, 999)] == [0, 0, 0]
    base, size = _C._memory_base_allocation(start)
    assert base <= start < start + 1000 <= base + size
    assert _C._memory_device_of_address(torch.empty(10).data_ptr()) == -1


# --- streams ---------------------------------------------------------------------------------------------------------


def test_memory_of_one_stream_is_not_reused_on_another() -> None:
    one, other = (_C.pool_stream(0, 0)[0] for _ in range(2))
    first = _C._memory_allocate(1000, 0, one)
    _C._memory_free(first)
    second = _C._memory_allocate(1000, 0, other)
    assert second != first
    third = _C._memory_allocate(1000, 0, one)
    assert third == first
    _C._memory_free(second)
    _C._memory_free(third)


def test_record_stream_keeps_memory_until_the_stream_completes() -> None:
    side = torch.Stream(device="bp")
    tensor = empty(700_000)
    address = tensor.data_ptr()
    with held(side):
        tensor.record_stream(side)
        del tensor
        blocks = [block for segment in memory.memory_snapshot() for block in segment["blocks"]]
        assert [block["state"] for block in blocks if block["address"] == address] == ["active_awaiting_free"]
        other = empty(700_000)
        assert other.data_ptr() != address
    assert empty(700_000).data_ptr() == address


def test_record_stream_ignores_foreign_memory() -> None:
    tensor = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(empty(1000)))
    tensor.record_stream(torch.Stream(device="bp"))  # its owner manages it: no error and no effect
    del tensor
    assert all(b["state"] != "active_awaiting_free" for s in memory.memory_snapshot() for b in s["blocks"])


def test_streams_are_checked() -> None:
    with pytest.raises(RuntimeError, match="no stream with id 1023"):
        _C._memory_allocate(1000, 0, 1023)
    with pytest.raises(ValueError, match="expects a stream of a bp device"):
        empty(1000).record_stream(torch.Stream(device="cpu"))
    with pytest.raises(TypeError, match=r"torch\.bp\.Stream or an int"):
        memory.caching_allocator_alloc(1000, stream="side")  # type: ignore[arg-type]


# --- threads, forks, exit --------------------------------------------------------------------------------------------


def test_threads_share_an_allocator() -> None:
    """Threads allocate on several streams, write, hand tensors to each other and read back what they wrote."""
    streams = [0, *(_C.pool_stream(0, 0)[0] for _ in range(3))]
    allocated = memory.memory_allocated()
    handed_over: list[tuple[int, int]] = []
    errors: list[str] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        mine: list[int] = []
        try:
            for _ in range(1500):
                if mine and choose.random() < 0.5:
                    address = mine.pop(choose.randrange(len(mine)))
                    if choose.random() < 0.2:
                        _C._memory_record_stream(address, 0, choose.choice(streams))
                    if choose.random() < 0.1:
                        handed_over.append((address, seed))
                    else:
                        _C._memory_free(address)
                elif handed_over and choose.random() < 0.3:
                    _C._memory_free(handed_over.pop()[0])
                else:
                    size = choose.choice([100, 5000, 70_000, 2 * MIB, 12 * MIB])
                    mine.append(_C._memory_allocate(size, 0, choose.choice(streams)))
                if choose.random() < 0.005:
                    memory.empty_cache()
        except Exception as error:
            errors.append(repr(error))
        for address in mine:
            _C._memory_free(address)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for address, _ in handed_over:
        _C._memory_free(address)
    assert not errors
    assert memory.memory_allocated() == allocated
    _C.synchronize(0)
    memory.empty_cache()
    assert memory.memory_stats()["active_bytes.all.current"] == allocated


def test_live_blocks_never_overlap_while_threads_allocate() -> None:
    tensors: list[torch.Tensor] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(200):
            tensor = empty(choose.randrange(1, 100_000))
            if choose.random() < 0.3:
                tensors.append(tensor)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


def test_a_forked_child_raises_and_the_parent_continues() -> None:
    output = check("""
        import os
        tensor = empty(1000)
        child = os.fork()
        if child == 0:
            try:
                empty(1000)
            except RuntimeError as error:
                print(error, flush=True)
            del tensor  # must not free memory of the parent
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        del tensor
        assert memory.memory_allocated() == 0
        empty(1000)
    """)
    assert "Cannot re-initialize bp in forked subprocess" in output


@pytest.mark.parametrize("options", ["", "expandable_segments:True"])
def test_tensors_can_outlive_the_interpreter(options: str, run_python: Run) -> None:
    """In a fresh interpreter, which is finalized at its end; processes of `run` are not."""
    code = """
        import builtins
        side = _C.pool_stream(0, 0)[0]
        builtins.kept = [empty(1000), empty(3 * MIB)]
        _C._memory_record_stream(builtins.kept[1].data_ptr(), 0, side)
    """
    settings = {**SETTINGS, "PYTORCH_ALLOC_CONF": options}
    result = run_python(textwrap.dedent(PRELUDE) + textwrap.dedent(code), **settings)
    assert result.returncode == 0, result.stdout + result.stderr


# --- PYTORCH_ALLOC_CONF ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        "",
        "max_split_size_mb:64",
        "max_split_size_mb:64,garbage_collection_threshold:0.6",
        " roundup_power2_divisions : [256:1,512:2,1024:4,>:8] ",
        "roundup_power2_divisions:4",
        "expandable_segments:True,pinned_use_background_threads:True",
        "backend:native,release_lock_on_cudamalloc:True,throw_on_cudamalloc_oom:True",
        "large_segment_size_mb:32,max_non_split_rounding_mb:40",
        "per_process_memory_fraction:0.5",
    ],
)
def test_valid_options(options: str) -> None:
    result = run("empty(1000); print(memory._snapshot()['allocator_settings'])", PYTORCH_ALLOC_CONF=options)
    assert result.returncode == 0, result.stderr
    assert "has no effect" not in result.stderr


@pytest.mark.parametrize("option", ["pinned_use_cuda_host_register:True", "graph_capture_record_stream_reuse:True"])
def test_options_without_effect_are_accepted_with_a_warning(option: str) -> None:
    result = run("empty(1000)", PYTORCH_ALLOC_CONF=option)
    assert result.returncode == 0, result.stderr
    assert f"'{option.partition(':')[0]}' has no effect on bp devices" in result.stderr


BAD_OPTIONS = {
    "max_split_size_mb": "expected key:value pairs",
    "max_split_size_mb=64": "expected key:value pairs",
    "max_split_size_mb:": "'max_split_size_mb' must be a whole number, not ''",
    "max_split_size_mb:64MB": "'max_split_size_mb' must be a whole number, not '64MB'",
    "max_split_size_mb:-1": "'max_split_size_mb' must be a whole number, not '-1'",
    "max_split_size_mb:[64]": r"'max_split_size_mb' must be a whole number, not '\[64\]'",
    "max_split_size_mb:64 garbage_collection_threshold:0.5": "expected a comma|must be a whole number",
    "max_split_size_mb:64,,": "expected key:value pairs",
    "max_split_size_mb:1": "too small",
    "garbage_collection_threshold:1.5": "'garbage_collection_threshold' must be a number from 0 to 1, not '1.5'",
    "garbage_collection_threshold:0.5x": "must be a number from 0 to 1, not '0.5x'",
    "garbage_collection_threshold:nan": "must be a number from 0 to 1, not 'nan'",
    "garbage_collection_threshold:half": "must be a number from 0 to 1, not 'half'",
    "expandable_segments:yes": "'expandable_segments' must be True or False, not 'yes'",
    "roundup_power2_divisions:[256:1,512": r"has no closing '\]'",
    "roundup_power2_divisions:[256,512:2]": "must be a power of two, or a list",
    "roundup_power2_divisions:3": "power of 2",
    "backend:cudaMallocAsync": "'backend' must be native",
    "max_spilt_size_mb:64": "unknown option 'max_spilt_size_mb'; known options are max_split_size_mb, ",
    "per_process_memory_fraction:2": "must be a number from 0 to 1",
}


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_malformed_options_at_run_time(options: str) -> None:
    before = memory._snapshot()["allocator_settings"]
    with pytest.raises(ValueError, match=BAD_OPTIONS[options]):
        memory._set_allocator_settings(options)
    assert memory._snapshot()["allocator_settings"] == before


@pytest.mark.parametrize("options", ["max_split_size_mb=64", "expandable_segments:yes", "max_spilt_size_mb:64"])
def test_malformed_options_in_the_environment(options: str) -> None:
    if options == "max_split_size_mb=64" and torch.version.cuda and torch.__version__ >= "2.14":
        pytest.skip("PyTorch's CUDA build cannot be imported with this value")
    output = check(
        """
        for _ in range(2):  # the error repeats until the setting is corrected
            try:
                empty(1000)
            except ValueError as error:
                print(error)
        """,
        PYTORCH_ALLOC_CONF=options,
    )
    assert len(output.splitlines()) == 2
    assert re.search(BAD_OPTIONS[options], output)


def test_expandable_segments_grow_in_place() -> None:
    check(
        """
        tensors = [empty(15 * MIB) for _ in range(3)]
        segments = memory.memory_snapshot()
        assert len(segments) == 1 and segments[0]["is_expandable"], segments
        assert memory.memory_reserved() == 60 * MIB
        del tensors[1]
        memory.empty_cache()
        assert memory.memory_reserved() == 60 * MIB  # no whole page of 20 MiB is free
        del tensors
        memory.empty_cache()
        assert memory.memory_reserved() == 0 and memory.mem_get_info()[0] == 64 * MIB
        empty(60 * MIB).fill_(1)  # would not fit into three segments of 20 MiB
        """,
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )


# --- drivers in Python -----------------------------------------------------------------------------------------------


def test_python_drivers_are_called_without_the_allocators_lock(tmp_path: pathlib.Path) -> None:
    """Threads that hold the GIL and threads that hold the allocator's lock must not wait for each other."""
    install_toy(tmp_path)
    check(
        """
        import random, sys, threading
        sys.setswitchinterval(1e-6)
        def work(seed):
            choose = random.Random(seed)
            kept = []
            for _ in range(150):
                size = choose.choice([100, 300_000, 3 * MIB, 11 * MIB])
                try:
                    kept.append(empty(size))
                except torch.OutOfMemoryError:
                    kept.clear()
                if choose.random() < 0.4:
                    kept.clear()
                if choose.random() < 0.1:
                    memory.empty_cache()
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        memory.empty_cache()
        assert memory.memory_reserved() == 0 and memory.mem_get_info() == (64 * MIB, 64 * MIB)
        """,
        TORCH_BACKPLANE_DRIVERS="toy",
        site=str(tmp_path),
    )


def test_expandable_segments_need_a_driver_that_can_reserve(tmp_path: pathlib.Path) -> None:
    install_toy(tmp_path)
    result = run(
        """
        empty(1000)
        empty(3 * MIB)
        assert not any(segment["is_expandable"] for segment in memory.memory_snapshot())
        """,
        TORCH_BACKPLANE_DRIVERS="toy",
        site=str(tmp_path),
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("expandable_segments is not supported by bp:0") == 1


def test_the_allocator_works_after_a_driver_error(tmp_path: pathlib.Path) -> None:
    faulty = MINIMAL.replace(
        "return bytearray(nbytes)",
        "\n        if nbytes > 4 << 20: raise OSError('cable unplugged')\n        return bytearray(nbytes)",
    )
    install(tmp_path, "faulty", faulty, "MinimalDriver")
    check(
        """
        before = empty(1000)
        try:
            empty(5 * MIB)
        except OSError as error:
            assert "cable unplugged" in str(error)
        else:
            raise SystemExit("no error")
        empty(1000)
        assert memory.memory_reserved() == 2 * MIB
        """,
        TORCH_BACKPLANE_DRIVERS="faulty",
        site=str(tmp_path),
    )


def test_lazy_clones_copy_through_the_allocator() -> None:
    original = torch.arange(10, device="bp")
    copy = torch._lazy_clone(original)
    assert copy.data_ptr() != original.data_ptr()  # data_ptr() makes the copy
    assert copy.cpu().tolist() == list(range(10))
