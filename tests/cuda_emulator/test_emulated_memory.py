"""Tests the emulated CUDA driver: memory, copies, fills, virtual memory management."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import driver_api as api
import pytest

PAGE = 2 << 20  # granularity of mappings


def _free() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    api.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    assert free.value <= total.value == 8 << 30
    return free.value


def test_allocations_are_accounted_for() -> None:
    before = _free()
    sizes = (1, 512, 513, 5 << 20)
    made = [api.allocate(one) for one in sizes]
    assert before - _free() == 512 + 512 + 1024 + (5 << 20)
    assert all(one % 512 == 0 and one < 1 << 48 for one in made)
    for one in made:
        api.call("cuMemFree_v2", one)
    assert _free() == before


def test_out_of_memory() -> None:
    address = ctypes.c_uint64()
    assert api.status("cuMemAlloc_v2", ctypes.byref(address), 9 << 30) == api.OUT_OF_MEMORY
    half = api.allocate(5 << 30)
    assert api.status("cuMemAlloc_v2", ctypes.byref(address), 5 << 30) == api.OUT_OF_MEMORY
    api.call("cuMemFree_v2", half)
    api.call("cuMemAlloc_v2", ctypes.byref(address), 5 << 30)


def test_wrong_arguments_of_allocations() -> None:
    address = ctypes.c_uint64()
    assert api.status("cuMemAlloc_v2", ctypes.byref(address), 0) == api.INVALID_VALUE
    assert api.status("cuMemAlloc_v2", None, 16) == api.INVALID_VALUE
    assert api.status("cuMemFree_v2", 0) == 0
    memory = api.allocate(4096)
    assert api.status("cuMemFree_v2", memory + 512) == api.INVALID_VALUE
    api.call("cuMemFree_v2", memory)
    assert api.status("cuMemFree_v2", memory) == api.INVALID_VALUE
    api.call("cuCtxSetCurrent", 0)
    assert api.status("cuMemAlloc_v2", ctypes.byref(address), 16) == api.INVALID_CONTEXT


def test_reset_of_a_context_frees_its_memory(context: int) -> None:
    before = _free()
    memory = api.allocate(1 << 20)
    api.call("cuDevicePrimaryCtxReset_v2", 0)
    api.call("cuCtxSetCurrent", api.result("cuDevicePrimaryCtxRetain", 0))
    assert _free() == before
    assert api.status("cuMemFree_v2", memory) == api.INVALID_VALUE


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 3_000_001])
def test_copies(nbytes: int) -> None:
    data = random.randbytes(nbytes)
    one, other = api.allocate(nbytes), api.allocate(nbytes)
    api.write(one, data)
    api.call("cuMemcpyDtoD_v2", other, one, nbytes)
    assert api.read(other, nbytes) == data
    if nbytes > 5:
        api.call("cuMemcpy", one, other + 3, nbytes - 3)
        assert api.read(one, nbytes) == data[3:] + data[-3:]


def test_copies_between_devices(context: int, second: int) -> None:
    data = random.randbytes(100_000)
    memory = api.allocate(len(data))
    api.write(memory, data)
    api.call("cuCtxPushCurrent_v2", second)
    other = api.allocate(len(data))
    stream = api.stream()
    api.call("cuMemcpyPeerAsync", other, second, memory, context, len(data), stream)
    api.synchronize(stream)
    assert api.read(other, len(data)) == data
    assert api.status("cuMemcpyPeer", other, 4096, memory, context, 1) == api.INVALID_CONTEXT
    api.call("cuCtxPopCurrent_v2", None)


def test_wrong_addresses_of_copies() -> None:
    memory = api.allocate(4096)
    data = ctypes.create_string_buffer(8192)
    assert api.status("cuMemcpyHtoD_v2", ctypes.addressof(data), data, 16) == api.INVALID_VALUE
    assert api.status("cuMemcpyHtoD_v2", memory, data, 8192) == api.INVALID_VALUE
    assert api.status("cuMemcpyDtoH_v2", data, memory + 4096, 1) == api.INVALID_VALUE
    assert api.status("cuMemcpyDtoD_v2", memory, ctypes.addressof(data), 16) == api.INVALID_VALUE
    assert api.status("cuMemcpyHtoD_v2", 0, data, 16) == api.INVALID_VALUE
    assert api.status("cuMemcpyDtoHAsync_v2", data, memory, 16, 4096) == api.INVALID_HANDLE
    assert api.status("cuMemcpyHtoD_v2", memory, None, 0) == 0


@pytest.mark.parametrize(("name", "size"), [("D8", 1), ("D16", 2), ("D32", 4)])
def test_fills(name: str, size: int) -> None:
    memory = api.allocate(400)
    pattern = 0xA1B2C3D4 & (1 << 8 * size) - 1
    api.call(f"cuMemset{name}_v2", memory, 0, 400 // size)
    api.call(f"cuMemset{name}Async", memory + 8, pattern, 50, 0)
    api.synchronize()
    assert api.read(memory, 400) == b"\0" * 8 + pattern.to_bytes(size, "little") * 50 + b"\0" * (392 - 50 * size)
    if size > 1:
        assert api.status(f"cuMemset{name}_v2", memory + 1, 0, 1) == api.INVALID_VALUE
    assert api.status(f"cuMemset{name}_v2", memory, 0, 10_000) == api.INVALID_VALUE


def test_content_of_new_memory(run_apart: Callable[..., str]) -> None:
    script = (
        "api.call('cuInit', 0)\n"
        "api.call('cuCtxSetCurrent', api.result('cuDevicePrimaryCtxRetain', 0))\n"
        "size = 5_000_001\n"
        "for _ in range(2):\n"
        "    memory = api.allocate(size)\n"
        "    print(set(api.read(memory, size)))\n"
        "    api.call('cuMemsetD8_v2', memory, 1, size)\n"
        "    api.call('cuMemFree_v2', memory)\n"
    )
    assert run_apart(script) == "{0}\n{0}\n"
    assert run_apart(script, CUDA_EMULATOR_FILL="0xa5") == "{165}\n{165}\n"


# --- memory of the host


def test_pinned_memory_is_copied_when_the_stream_reaches_it() -> None:
    host, memory, stream = api.pinned(64), api.allocate(64), api.stream()
    ctypes.memset(host, 1, 64)
    with api.blocked(stream) as release:
        api.call("cuMemcpyHtoDAsync_v2", memory, host, 64, stream)
        ctypes.memset(host, 2, 64)
        release()
        api.synchronize(stream)
    assert api.read(memory, 64) == b"\2" * 64
    api.call("cuMemFreeHost", host)
    assert api.status("cuMemFreeHost", host) == api.INVALID_VALUE


def test_other_host_memory_is_read_before_the_call_returns() -> None:
    host, memory, stream = ctypes.create_string_buffer(b"\1" * 64, 64), api.allocate(64), api.stream()
    with api.blocked(stream) as release:
        api.call("cuMemcpyHtoDAsync_v2", memory, host, 64, stream)
        ctypes.memset(host, 2, 64)
        release()
        api.synchronize(stream)
    assert api.read(memory, 64) == b"\1" * 64


def test_registered_memory() -> None:
    host = ctypes.create_string_buffer(1 << 16)
    address = ctypes.addressof(host)
    api.call("cuMemHostRegister_v2", address, 1 << 16, 0)
    assert api.status("cuMemHostRegister_v2", address + 4096, 4096, 0) == 712
    pointer = api.result("cuMemHostGetDevicePointer_v2", address, 0)
    assert pointer == address
    function = api.kernel('extern "C" __global__ void set(char* at) { at[threadIdx.x] = 3; }', "set")
    assert api.launch(function, (1,), (32,), pointer) == 0
    api.call("cuCtxSynchronize")
    assert host.raw[:33] == b"\3" * 32 + b"\0"
    api.call("cuMemHostUnregister", address)
    assert api.status("cuMemHostUnregister", address) == 713
    assert api.launch(function, (1,), (32,), pointer) == 0
    assert api.status("cuCtxSynchronize") == api.ILLEGAL_ADDRESS


def test_attributes_of_pointers(context: int) -> None:
    memory, host = api.allocate(1000), api.pinned(1000)

    def attribute(address: int, which: int) -> int:
        value = ctypes.c_uint64(0)
        api.call("cuPointerGetAttribute", ctypes.byref(value), which, address)
        return value.value

    assert [attribute(memory + 10, one) for one in (1, 2, 3, 9, 11, 12)] == [context, 2, memory + 10, 0, memory, 1000]
    assert [attribute(host, one) for one in (2, 4)] == [1, host]
    assert attribute(memory, 7) != attribute(host, 7)
    value = ctypes.c_uint64()
    assert api.status("cuPointerGetAttribute", ctypes.byref(value), 2, 4096) == api.INVALID_VALUE
    begin, size = ctypes.c_uint64(), ctypes.c_size_t()
    api.call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(size), memory + 999)
    assert (begin.value, size.value) == (memory, 1000)


# --- virtual memory management


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", Location), ("meta", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )  # fmt: skip


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


def _create(nbytes: int, device: int = 0) -> int:
    properties = Properties(1, 0, Location(1, device))
    return int(api.result("cuMemCreate", nbytes, ctypes.byref(properties), 0))


def _give_access(address: int, nbytes: int, device: int = 0, flags: int = 3) -> int:
    return api.status("cuMemSetAccess", address, nbytes, ctypes.byref(Access(Location(1, device), flags)), 1)


def test_mapped_memory() -> None:
    before = _free()
    granularity = api.result("cuMemGetAllocationGranularity", ctypes.byref(Properties(1, 0, Location(1, 0))), 0)
    assert granularity == PAGE
    begin = api.result("cuMemAddressReserve", 64 << 30, 0, 0, 0)
    handle = _create(2 * PAGE)
    assert before - _free() == 2 * PAGE
    api.call("cuMemMap", begin + PAGE, 2 * PAGE, 0, handle, 0)
    api.call("cuMemRelease", handle)  # the mapping keeps the memory
    data = ctypes.create_string_buffer(16)
    assert api.status("cuMemcpyHtoD_v2", begin + PAGE, data, 16) == api.INVALID_VALUE  # no access yet
    assert _give_access(begin + PAGE, 2 * PAGE) == 0
    content = random.randbytes(2 * PAGE)
    api.write(begin + PAGE, content)
    assert api.read(begin + PAGE, 2 * PAGE) == content
    assert api.status("cuMemcpyHtoD_v2", begin, data, 16) == api.INVALID_VALUE
    assert api.status("cuMemAddressFree", begin, 64 << 30) == api.INVALID_VALUE  # still mapped
    api.call("cuMemUnmap", begin + PAGE, 2 * PAGE)
    assert api.status("cuMemcpyHtoD_v2", begin + PAGE, data, 16) == api.INVALID_VALUE
    assert _free() == before
    api.call("cuMemAddressFree", begin, 64 << 30)
    assert api.status("cuMemAddressFree", begin, 64 << 30) == api.INVALID_VALUE


def test_memory_can_be_mapped_at_two_addresses() -> None:
    begin, handle = api.result("cuMemAddressReserve", 2 * PAGE, PAGE, 0, 0), _create(PAGE)
    for address in (begin, begin + PAGE):
        api.call("cuMemMap", address, PAGE, 0, handle, 0)
    assert _give_access(begin, 2 * PAGE) == 0
    api.write(begin + 5, b"same")
    assert api.read(begin + PAGE + 5, 4) == b"same"
    retained = api.result("cuMemRetainAllocationHandle", begin + PAGE)
    assert retained == handle
    for _ in range(2):
        api.call("cuMemRelease", handle)
    assert api.status("cuMemRelease", handle) == api.INVALID_VALUE
    api.call("cuMemUnmap", begin, 2 * PAGE)
    api.call("cuMemAddressFree", begin, 2 * PAGE)


def test_wrong_mappings() -> None:
    begin, handle = api.result("cuMemAddressReserve", 4 * PAGE, 0, 0, 0), _create(2 * PAGE)
    for wrong in (
        (begin + 4096, 2 * PAGE, 0, handle, 0), (begin, PAGE, 0, handle, 0), (begin + 3 * PAGE, 2 * PAGE, 0, handle, 0),
        (begin, 2 * PAGE, 0, 12345, 0), (begin, 2 * PAGE, PAGE, handle, 0), (begin, 2 * PAGE, 0, handle, 1),
    ):  # fmt: skip
        assert api.status("cuMemMap", *wrong) == api.INVALID_VALUE
    api.call("cuMemMap", begin, 2 * PAGE, 0, handle, 0)
    assert api.status("cuMemMap", begin + PAGE, 2 * PAGE, 0, handle, 0) == api.INVALID_VALUE  # overlaps
    assert api.status("cuMemUnmap", begin, PAGE) == api.INVALID_VALUE
    assert _give_access(begin, 3 * PAGE) == api.INVALID_VALUE
    assert _give_access(begin, 2 * PAGE, device=2) == api.INVALID_DEVICE
    address = ctypes.c_uint64()
    properties = Properties(1, 0, Location(1, 0))
    assert api.status("cuMemCreate", ctypes.byref(address), 4096, ctypes.byref(properties), 0) == api.INVALID_VALUE
    assert api.status("cuMemCreate", ctypes.byref(address), 16 << 30, ctypes.byref(properties), 0) == api.OUT_OF_MEMORY
    api.call("cuMemUnmap", begin, 2 * PAGE)
    api.call("cuMemRelease", handle)
    api.call("cuMemAddressFree", begin, 4 * PAGE)


def test_access_is_for_devices() -> None:
    begin, handle = api.result("cuMemAddressReserve", PAGE, 0, 0, 0), _create(PAGE, device=1)
    api.call("cuMemMap", begin, PAGE, 0, handle, 0)
    api.call("cuMemRelease", handle)
    assert _give_access(begin, PAGE, device=1) == 0
    function = api.kernel('extern "C" __global__ void set(int* at) { *at = 5; }', "set")
    flags = api.result("cuMemGetAccess", ctypes.byref(Location(1, 0)), begin)
    assert flags == 0
    assert _give_access(begin, PAGE, device=0) == 0
    assert api.launch(function, (1,), (1,), begin) == 0
    assert api.read(begin, 4) == b"\5\0\0\0"
    assert _give_access(begin, PAGE, device=0, flags=0) == 0
    assert api.launch(function, (1,), (1,), begin) == 0
    assert api.status("cuCtxSynchronize") == api.ILLEGAL_ADDRESS
    api.call("cuMemUnmap", begin, PAGE)
    api.call("cuMemAddressFree", begin, PAGE)


@pytest.mark.parametrize("call", ["fill", "copy to", "copy from"])
def test_work_on_memory_that_is_unmapped_before_fails(call: str) -> None:
    begin, handle, stream = api.result("cuMemAddressReserve", PAGE, 0, 0, 0), _create(PAGE), api.stream()
    other = api.allocate(64)
    api.call("cuMemMap", begin, PAGE, 0, handle, 0)
    api.call("cuMemRelease", handle)
    assert _give_access(begin, PAGE) == 0
    with api.blocked(stream):
        if call == "fill":
            api.call("cuMemsetD8Async", begin, 1, 64, stream)
        else:
            to, source = (begin, other) if call == "copy to" else (other, begin)
            api.call("cuMemcpyDtoDAsync_v2", to, source, 64, stream)
        api.call("cuMemUnmap", begin, PAGE)
    assert api.status("cuStreamSynchronize", stream) == api.ILLEGAL_ADDRESS
    api.call("cuMemAddressFree", begin, PAGE)


def test_random_allocations() -> None:
    generator = random.Random(0)
    live: dict[int, bytes] = {}
    before = _free()
    for _ in range(300):
        if live and generator.random() < 0.5:
            address = generator.choice(list(live))
            content = live.pop(address)
            assert api.read(address, len(content)) == content
            api.call("cuMemFree_v2", address)
        else:
            content = generator.randbytes(generator.choice((1, 100, 5000, 3 << 20)))
            address = api.allocate(len(content))
            assert all(address + len(content) <= one or one + len(other) <= address for one, other in live.items())
            api.write(address, content)
            live[address] = content
    for address in live:
        api.call("cuMemFree_v2", address)
    assert _free() == before
