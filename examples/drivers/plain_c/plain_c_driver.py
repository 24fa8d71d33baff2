"""A driver with its own kernel language and launcher: plain C, built by the system's compiler.

Its device is a simulated accelerator with one thread, whose memory only this module can access. It executes the work
items of a launch one after another, so it has neither local memory nor barriers.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, TypeAlias

import torch

from torch_backplane.drivers import Device, DeviceProperties, Driver, NativeLauncher
from torch_backplane.kernels import Dialect, Target

HEADER = """\
#include <stdbool.h>
#include <stdint.h>
#include <tgmath.h>
#define FUNCTION static inline
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define rsqrt(x) (1 / sqrt(x))
typedef unsigned short ushort;
typedef unsigned int uint;
typedef struct { float x, y; } float2;
typedef struct { double x, y; } double2;
typedef struct { uint64_t index, row, item, group; } work_item_t;
FUNCTION uint as_uint(const float value) { return ((union { float number; uint bits; }){value}).bits; }
FUNCTION float as_float(const uint bits) { return ((union { uint bits; float number; }){bits}).number; }
FUNCTION uint64_t as_ulong(const double value) { return ((union { double number; uint64_t bits; }){value}).bits; }
FUNCTION double as_double(const uint64_t bits) { return ((union { uint64_t bits; double number; }){bits}).number; }
"""


class PlainC(Dialect):
    """Plain C. A kernel is a function for one work item, and an entry function that calls it for all work items."""

    name = "Plain C"
    types: ClassVar = {
        torch.bool: "bool", torch.float32: "float", torch.float64: "double",
        torch.complex64: "float2", torch.complex128: "double2",
        torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t", torch.int64: "int64_t",
        torch.uint8: "uint8_t", torch.uint16: "uint16_t", torch.uint32: "uint32_t", torch.uint64: "uint64_t",
    }  # fmt: skip
    words: ClassVar = {
        "GLOBAL": "",
        "ITEM": "((int)work_item.item)",
        "GROUP": "work_item.group",
        "atomic_swap(at, expected, desired)": "__sync_val_compare_and_swap((uint*)(at), expected, desired)",
        "multiply_high(a, b)": "((uint)((uint64_t)(a) * (b) >> 32))",
    }

    def header(self, dtypes: frozenset[torch.dtype], text: str) -> str:
        return HEADER + self.half_functions(dtypes)

    def complex(self, real: object, imaginary: object, dtype: torch.dtype) -> str:
        return f"(({self.type(dtype)}){{{real}, {imaginary}}})"

    def float_bits(self, value: object, dtype: torch.dtype) -> str:
        if dtype.is_floating_point:
            return f"as_{self.type(dtype)}({value})"
        return f"({self.type(dtype)}){'as_uint' if dtype.itemsize == 4 else 'as_ulong'}({value})"

    def global_index(self, wide: bool) -> str:
        return f"({self.index_type(wide)})work_item.index"

    def global_row(self, wide: bool) -> str:
        return f"({self.index_type(wide)})work_item.row"

    def entry(self, name: str, parameters: Sequence[str], group_size: int | None) -> str:
        return f"void {name}(const uint64_t* items, const uint64_t* group, void** arguments)"

    def kernel(
        self, name: str, parameters: Sequence[str], group_size: int | None, body: Sequence[str], bounded: bool = False
    ) -> str:
        given = [f"*({one.rpartition(' ')[0]}*)arguments[{i}]" for i, one in enumerate(parameters)]
        lines = [
            f"FUNCTION void {name}_item(const work_item_t work_item, {', '.join(parameters)}) {{",
            *body,
            "}",
            f"{self.entry(name, parameters, group_size)} {{",
            "  for (uint64_t row = 0; row < items[1]; ++row)",
            "    for (uint64_t i = 0; i < items[0]; ++i)",
            f"      {name}_item((work_item_t){{i, row, i % group[0], i / group[0]}}, {', '.join(given)});",
            "}",
        ]
        return "\n".join([*lines, ""])


# The functions of the launcher. They ignore the queue, because each call returns when its work is complete.
LAUNCHER = """\
#include <stdint.h>
#include <string.h>
typedef struct { char* memory; uint64_t offset; void* data; uint64_t bytes; } argument_t;
typedef void kernel_t(const uint64_t* items, const uint64_t* group, void** arguments);

int launch(void* queue, kernel_t* kernel, const uint64_t* items, const uint64_t* group, const argument_t* given,
           uint64_t count) {
  char* places[count + 1];
  void* arguments[count + 1];
  for (uint64_t i = 0; i < count; ++i) {
    places[i] = given[i].memory ? given[i].memory + given[i].offset : 0;
    arguments[i] = given[i].bytes ? given[i].data : &places[i];
  }
  kernel(items, group, arguments);
  return 0;
}
int copy(void* queue, char* to, uint64_t to_offset, char* from, uint64_t from_offset, uint64_t bytes) {
  memcpy(to + to_offset, from + from_offset, bytes);
  return 0;
}
int fill(void* queue, char* memory, uint64_t offset, uint64_t bytes, int value) {
  memset(memory + offset, value, bytes);
  return 0;
}
int flush(void* queue) { return 0; }
"""


def built(text: str) -> ctypes.CDLL:
    """Compile `text` to a shared library and load it. Raises RuntimeError with the compiler's output on failure."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernel.c"), Path(folder, "kernel.so")
        source.write_text(text, encoding="utf-8")
        options = ["-std=gnu11", "-O2", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
        command = [os.environ.get("CC", "cc"), *options, str(source), "-o", str(library), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(result.stderr)
        return ctypes.CDLL(str(library))


Segment: TypeAlias = "ctypes.Array[ctypes.c_char]"


def address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


class PlainCDevice(Device):
    """A synchronous device. A segment is a ctypes array."""

    def __init__(self) -> None:
        self.properties = DeviceProperties(
            name="Plain C accelerator",
            total_memory=1 << 30,
            dialect=PlainC,
            # Work items do not run in lockstep.
            target=Target(simt=False, local_memory=0, max_argument_bytes=1 << 16),
        )
        library = built(LAUNCHER)
        functions = {name: address(library[name]) for name in ("launch", "copy", "fill", "flush")}
        self.native_launcher = NativeLauncher(api="c", functions=functions)

    def allocate(self, nbytes: int) -> Segment:
        return (ctypes.c_char * nbytes)()

    def free(self, handle: Segment) -> None:
        pass  # Python frees the array after the last reference

    def copy_in(self, handle: Segment, offset: int, host_memory: memoryview, stream: object) -> None:
        memoryview(handle).cast("B")[offset : offset + len(host_memory)] = host_memory

    def copy_out(self, handle: Segment, offset: int, host_memory: memoryview, stream: object) -> None:
        host_memory[:] = memoryview(handle).cast("B")[offset : offset + len(host_memory)]

    def compile(self, text: str, entry: str) -> object:
        return built(text)[entry]

    def native_kernel(self, kernel: object) -> int:
        return address(kernel)

    def native_stream(self, stream: object) -> int:
        return id(stream)

    def native_segment(self, handle: Segment) -> int:
        return ctypes.addressof(handle)


class PlainCDriver(Driver):
    """Provides one device, if there is a C compiler."""

    def devices(self) -> list[PlainCDevice]:
        return [PlainCDevice()] if shutil.which(os.environ.get("CC", "cc")) else []
