"""A driver whose devices execute nothing. Its C launcher has all optional groups of functions.

The run time of a program on such a device is the overhead of PyTorch and the runtime:

    pip install --no-deps examples/drivers/null
    python benchmarks/overhead.py --driver null

Segments have no memory: copies from them return zeros. Kernels are not compiled. Events are always reached.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from torch_backplane.drivers import NATIVE_APIS, Device, DeviceProperties, Driver, NativeLauncher
from torch_backplane.drivers.base import NATIVE_GROUPS

LAUNCHER = """\
#include <stdint.h>
#include <string.h>
typedef struct { void* memory; uint64_t offset; const void* data; uint64_t bytes; } argument_t;
typedef struct command_t command_t;
typedef struct launch_t launch_t;
static int event, graph;

int launch(void* queue, void* kernel, const uint64_t* items, const uint64_t* group, const argument_t* arguments,
           uint64_t count) { return 0; }
int launch_with_attributes(void* queue, void* kernel, const launch_t* launch, const argument_t* arguments,
                           uint64_t count) { return 0; }
int copy(void* queue, void* to, uint64_t to_offset, void* from, uint64_t from_offset, uint64_t bytes) { return 0; }
int fill(void* queue, void* memory, uint64_t offset, uint64_t bytes, int value) { return 0; }
int flush(void* queue) { return 0; }

int copy_in(void* queue, void* to, uint64_t to_offset, const void* from, uint64_t bytes) { return 0; }
int copy_out(void* queue, void* to, void* from, uint64_t from_offset, uint64_t bytes) {
  memset(to, 0, bytes);
  return 0;
}

int create_event(int timing, void** made) { *made = &event; return 0; }
int destroy_event(void* event) { return 0; }
int record_event(void* event, void* queue) { return 0; }
int wait_event(void* event, void* queue) { return 0; }
int query_event(void* event, int* is_reached) { *is_reached = 1; return 0; }
int synchronize_event(void* event) { return 0; }
int elapsed(void* start, void* end, double* milliseconds) { *milliseconds = 0; return 0; }

int host_callback(void* queue, void (*function)(void*), void* argument) { function(argument); return 0; }
int copy_from_peer(void* queue, void* to, uint64_t to_offset, void* from, uint64_t from_offset, uint64_t bytes) {
  return 0;
}
int wait_peer_event(void* event, void* queue) { return 0; }

int export_memory(void* memory, char* handle) { memcpy(handle, &memory, sizeof memory); return 0; }
int import_memory(const char* handle, uint64_t bytes, void** memory) {
  memcpy(memory, handle, sizeof *memory);
  return 0;
}
int close_memory(void* memory) { return 0; }
int create_shared_event(void** made) { *made = &event; return 0; }
int export_event(void* event, char* handle) { return 0; }
int import_event(const char* handle, void** made) { *made = &event; return 0; }

int graph_create(const command_t* commands, uint64_t count, void** made) { *made = &graph; return 0; }
int graph_update(void* graph, const command_t* commands, uint64_t count, int* updated) { *updated = 1; return 0; }
int graph_launch(void* graph, void* queue) { return 0; }
int graph_destroy(void* graph) { return 0; }

int begin_capture(void** queue) { *queue = &graph; return 0; }
int end_capture(void* queue, void** captured) { *captured = &graph; return 0; }
int destroy_captured(void* captured) { return 0; }
"""


def launcher() -> NativeLauncher:
    """Build the launcher with the system's compiler. It has all functions of NATIVE_APIS and NATIVE_GROUPS."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "null.c"), Path(folder, "null.so")
        source.write_text(LAUNCHER, encoding="utf-8")
        command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
    names = [*NATIVE_APIS["c"], *itertools.chain(*NATIVE_GROUPS["c"].values())]
    functions = {name: ctypes.cast(loaded[name], ctypes.c_void_p).value or 0 for name in names}
    return NativeLauncher(api="c", functions=functions)


class NullDevice(Device):
    """A device without hardware. Segments, streams and kernels are unique numbers."""

    numbers = itertools.count(1 << 40, 1 << 30)

    def __init__(self, native_launcher: NativeLauncher) -> None:
        self.native_launcher = native_launcher
        self.properties = DeviceProperties(
            name="Null accelerator", total_memory=64 << 30, dialect="OpenCL C", kind="gpu", compute_units=64
        )

    def allocate(self, nbytes: int) -> int:
        return next(self.numbers)

    def free(self, handle: int) -> None:
        pass

    def copy_in(self, handle: int, offset: int, host_memory: memoryview, stream: Any) -> None:
        pass

    def copy_out(self, handle: int, offset: int, host_memory: memoryview, stream: Any) -> None:
        host_memory[:] = bytes(len(host_memory))

    def can_access_peer(self, peer: Device) -> bool:
        return isinstance(peer, NullDevice)

    def can_wait_for_peer(self, peer: Device) -> bool:
        return isinstance(peer, NullDevice)

    def compile(self, text: str, entry: str) -> int:
        return next(self.numbers)

    def create_stream(self, priority: int) -> int:
        return next(self.numbers)

    def query_stream(self, stream: int) -> bool:
        return True

    def synchronize_stream(self, stream: int) -> None:
        pass

    def native_kernel(self, kernel: int) -> int:
        return kernel

    def native_stream(self, stream: int) -> int:
        return stream

    def native_segment(self, handle: int) -> int:
        return handle

    def sleep(self, milliseconds: float, stream: int) -> None:
        pass


class NullDriver(Driver):
    """Provides two devices, which are peers, if there is a C compiler."""

    def devices(self) -> list[NullDevice]:
        if shutil.which(os.environ.get("CC", "cc")) is None:
            return []
        shared = launcher()
        return [NullDevice(shared), NullDevice(shared)]
