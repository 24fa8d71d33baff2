"""Tests the emulated CUDA driver: devices, contexts, errors, entry points."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import driver_api as api
import pytest


def test_initialization_is_required(run_apart: Callable[..., str]) -> None:
    script = (
        "count = api.ctypes.c_int()\n"
        "print(api.status('cuDeviceGetCount', api.ctypes.byref(count)), api.status('cuInit', 1))\n"
        "api.call('cuInit', 0)\n"
        "print(api.number('cuDeviceGetCount'))\n"
    )
    assert run_apart(script).split() == [str(api.NOT_INITIALIZED), str(api.INVALID_VALUE), "2"]


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"CUDA_EMULATOR_DEVICES": "5"}, 5),
        ({"CUDA_EMULATOR_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "2,0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1,7,0"}, 1),
    ],
)
def test_number_of_devices(run_apart: Callable[..., str], variables: dict[str, str], count: int) -> None:
    script = "api.call('cuInit', 0)\nprint(api.number('cuDeviceGetCount'))"
    assert int(run_apart(script, **variables)) == count


@pytest.mark.parametrize("variables", [{"CUDA_EMULATOR_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_no_device(run_apart: Callable[..., str], variables: dict[str, str]) -> None:
    assert run_apart("print(api.status('cuInit', 0))", **variables).strip() == "100"


def test_settings_of_devices(run_apart: Callable[..., str]) -> None:
    script = (
        "api.call('cuInit', 0)\n"
        "print(*(api.number('cuDeviceGetAttribute', one, 1) for one in (75, 76, 16)))\n"
        "print(api.result('cuDeviceTotalMem_v2', 0), api.number('cuDriverGetVersion'))\n"
    )
    variables = {
        "CUDA_EMULATOR_ARCHITECTURE": "90", "CUDA_EMULATOR_UNITS": "7", "CUDA_EMULATOR_MEMORY": "12345",
        "CUDA_EMULATOR_VERSION": "12040",
    }  # fmt: skip
    assert run_apart(script, **variables).split() == ["9", "0", "7", "12345", "12040"]


def test_attributes() -> None:
    facts = [api.number("cuDeviceGetAttribute", one, 0) for one in (1, 8, 10, 75, 76, 97)]
    assert facts == [1024, 48 << 10, 32, 8, 0, 163 << 10]
    value = ctypes.c_int()
    assert api.status("cuDeviceGetAttribute", ctypes.byref(value), 1, 2) == api.INVALID_DEVICE
    assert api.status("cuDeviceGetAttribute", ctypes.byref(value), 0, 0) == api.INVALID_VALUE
    assert api.status("cuDeviceGetAttribute", None, 1, 0) == api.INVALID_VALUE
    assert api.status("cuDeviceGet", ctypes.byref(value), -1) == api.INVALID_DEVICE


def test_names_of_devices() -> None:
    names, buses, uuids = set(), set(), set()
    for device in (0, 1):
        text = ctypes.create_string_buffer(64)
        api.call("cuDeviceGetName", text, 64, device)
        names.add(text.value)
        api.call("cuDeviceGetPCIBusId", text, 64, device)
        buses.add(text.value)
        assert api.number("cuDeviceGetByPCIBusId", text.value) == device
        api.call("cuDeviceGetUuid_v2", text, device)
        uuids.add(text.raw[:16])
    assert len(names) == len(buses) == len(uuids) == 2
    text = ctypes.create_string_buffer(b"untouched")
    api.call("cuDeviceGetName", text, 5, 0)
    assert text.value == b"Emul"


# --- contexts


def test_primary_contexts_are_counted(context: int) -> None:
    assert api.result("cuDevicePrimaryCtxRetain", 0) == context
    api.call("cuDevicePrimaryCtxRelease_v2", 0)
    assert api.result("cuCtxGetCurrent") == context
    api.call("cuCtxSynchronize")
    api.call("cuDevicePrimaryCtxRelease_v2", 0)
    assert api.status("cuCtxSynchronize") == 709  # the context is destroyed
    assert api.status("cuDevicePrimaryCtxRelease_v2", 0) == api.INVALID_CONTEXT
    again = api.result("cuDevicePrimaryCtxRetain", 0)
    api.call("cuCtxSetCurrent", again)
    api.call("cuCtxSynchronize")


def test_state_of_a_primary_context() -> None:
    flags, active = ctypes.c_uint(), ctypes.c_int()
    api.call("cuDevicePrimaryCtxSetFlags_v2", 1, 4)
    api.call("cuDevicePrimaryCtxGetState", 1, ctypes.byref(flags), ctypes.byref(active))
    assert (flags.value, active.value) == (4, 0)
    api.result("cuDevicePrimaryCtxRetain", 1)
    api.call("cuDevicePrimaryCtxGetState", 1, ctypes.byref(flags), ctypes.byref(active))
    assert (flags.value, active.value) == (4, 1)
    api.call("cuDevicePrimaryCtxSetFlags_v2", 1, 0)
    assert api.status("cuDevicePrimaryCtxSetFlags_v2", 1, 1 << 20) == api.INVALID_VALUE


def test_stack_of_contexts(context: int, second: int) -> None:
    assert api.number("cuCtxGetDevice") == 0
    api.call("cuCtxPushCurrent_v2", second)
    assert api.number("cuCtxGetDevice") == 1
    made = api.result("cuCtxCreate_v2", 0, 0)
    assert api.result("cuCtxGetCurrent") == made
    api.call("cuCtxDestroy_v2", made)
    assert api.result("cuCtxPopCurrent_v2") == second
    assert api.result("cuCtxGetCurrent") == context
    assert api.status("cuCtxSetCurrent", 4096) == api.INVALID_CONTEXT
    assert api.status("cuCtxDestroy_v2", context) == api.INVALID_CONTEXT  # primary
    assert api.result("cuCtxGetCurrent") == context


def test_each_thread_has_its_own_current_context() -> None:
    seen = []

    def run() -> None:
        seen.append(api.result("cuCtxGetCurrent"))
        seen.append(api.status("cuCtxSynchronize"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [0, api.INVALID_CONTEXT]


def test_priorities_and_limits() -> None:
    least, greatest = ctypes.c_int(), ctypes.c_int()
    api.call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
    assert (least.value, greatest.value) == (0, -5)
    before = api.result("cuCtxGetLimit", 0)
    api.call("cuCtxSetLimit", 0, 4096)
    assert api.result("cuCtxGetLimit", 0) == 4096
    api.call("cuCtxSetLimit", 0, before)
    assert api.status("cuCtxSetLimit", 99, 1) == api.NOT_SUPPORTED


def test_contexts_have_numbers(context: int, second: int) -> None:
    numbers = []
    for one in (context, second):
        value = ctypes.c_uint64()
        api.call("cuCtxGetId", one, ctypes.byref(value))
        numbers.append(value.value)
    assert numbers[0] != numbers[1]


# --- errors and entry points


@pytest.mark.parametrize(
    ("error", "name", "meaning"),
    [
        (0, b"CUDA_SUCCESS", b"no error"),
        (2, b"CUDA_ERROR_OUT_OF_MEMORY", b"out of memory"),
        (700, b"CUDA_ERROR_ILLEGAL_ADDRESS", b"an illegal memory access was encountered"),
    ],
)
def test_names_of_errors(error: int, name: bytes, meaning: bytes) -> None:
    text = ctypes.c_char_p()
    api.call("cuGetErrorName", error, ctypes.byref(text))
    assert text.value == name
    api.call("cuGetErrorString", error, ctypes.byref(text))
    assert text.value == meaning


def test_unknown_error_has_no_name() -> None:
    text = ctypes.c_char_p(b"before")
    assert api.status("cuGetErrorName", 12345, ctypes.byref(text)) == api.INVALID_VALUE
    assert text.value is None


def _entry_point(name: str, version: int, flags: int = 0) -> tuple[int, int | None, int]:
    found, reason = ctypes.c_void_p(), ctypes.c_int(7)
    error = api.status("cuGetProcAddress_v2", name, ctypes.byref(found), version, flags, ctypes.byref(reason))
    return error, found.value, reason.value


def test_entry_points_have_versions() -> None:
    library = api.emulator.load()

    def address(name: str) -> int | None:
        return ctypes.cast(library[name], ctypes.c_void_p).value

    assert _entry_point("cuMemAlloc", 3020) == (0, address("cuMemAlloc_v2"), 0)
    assert _entry_point("cuCtxCreate", 13000)[1] == address("cuCtxCreate_v4")
    assert _entry_point("cuCtxCreate", 4000)[1] == address("cuCtxCreate_v2")
    assert _entry_point("cuStreamGetCaptureInfo", 11030)[1] == address("cuStreamGetCaptureInfo_v2")
    assert _entry_point("cuStreamGetCaptureInfo", 12030)[1] == address("cuStreamGetCaptureInfo_v3")
    # Another version has other parameters, which the emulator does not have.
    assert _entry_point("cuCtxCreate", 12000) == (api.NOT_FOUND, None, 1)
    assert _entry_point("cuGraphAddKernelNode", 11000) == (api.NOT_FOUND, None, 1)
    assert _entry_point("cuTexRefCreate", 13000) == (api.NOT_FOUND, None, 1)
    assert _entry_point("emulator_calls", 13000)[0] == api.NOT_FOUND
    assert _entry_point("cuMemAlloc", 3020, 2)[0] == api.NOT_SUPPORTED  # per-thread default streams


def test_internal_entry_points_are_not_found() -> None:
    table = ctypes.c_void_p(7)
    assert api.status("cuGetExportTable", ctypes.byref(table), b"16 bytes: a uuid") == api.NOT_FOUND
    assert table.value is None
    assert api.status("cuGetExportTable", None, b"16 bytes: a uuid") == api.INVALID_VALUE


def test_nvidias_nvrtc_compiles_beside_the_emulator(run_apart: Callable[..., str]) -> None:
    """It asks the libcuda of the process for internal entry points, and crashed without the function for them."""
    pytest.importorskip("nvidia.cu13", reason="needs NVIDIA's NVRTC: pip install nvidia-cuda-nvrtc")
    script = (
        "api.emulator.load()\n"
        "from torch_backplane.ptxas.nvrtc import compile_text\n"
        "source = 'extern \"C\" __global__ void put(int* out) { *out = 1; }'\n"
        "print(compile_text(source, [], 'sm_80').code[:4] == b'\\x7fELF')\n"
    )
    assert run_apart(script).split() == ["True"]


def test_forked_child_cannot_use_the_driver() -> None:
    child = os.fork()
    if child == 0:
        value = ctypes.c_int()
        os._exit(api.status("cuDeviceGetCount", ctypes.byref(value)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == api.NOT_INITIALIZED


# --- peer access


def test_peer_access(context: int, second: int) -> None:
    value = ctypes.c_int()
    api.call("cuDeviceCanAccessPeer", ctypes.byref(value), 0, 1)
    assert value.value == 1
    api.call("cuDeviceCanAccessPeer", ctypes.byref(value), 0, 0)
    assert value.value == 0
    source = 'extern "C" __global__ void set(int* at) { *at = 7; }'
    function = api.kernel(source, "set")
    api.call("cuCtxPushCurrent_v2", second)
    memory = api.allocate(4)
    api.call("cuCtxPopCurrent_v2", None)
    api.call("cuCtxEnablePeerAccess", second, 0)
    assert api.status("cuCtxEnablePeerAccess", second, 0) == 704
    assert api.launch(function, (1,), (1,), memory) == 0
    assert api.read(memory, 4) == b"\7\0\0\0"
    api.call("cuCtxDisablePeerAccess", second)
    assert api.status("cuCtxDisablePeerAccess", second) == 705
    assert api.launch(function, (1,), (1,), memory) == 0
    assert api.status("cuCtxSynchronize") == api.ILLEGAL_ADDRESS


def test_peer_access_can_be_missing(run_apart: Callable[..., str]) -> None:
    script = (
        "api.call('cuInit', 0)\n"
        "contexts = [api.result('cuDevicePrimaryCtxRetain', one) for one in (0, 1)]\n"
        "api.call('cuCtxSetCurrent', contexts[0])\n"
        "print(api.number('cuDeviceCanAccessPeer', 0, 1), api.status('cuCtxEnablePeerAccess', contexts[1], 0))\n"
    )
    assert run_apart(script, CUDA_EMULATOR_PEERS="0").split() == ["0", "217"]
