"""Lists OpenCL platforms: a script that `implementations.py` runs in a separate process, which may crash.

    python -I -S listing.py LOADER [LIBRARY]

LOADER is a library that is linked with the OpenCL loader, and LIBRARY the implementation that is listed. Prints
"listing" before the first OpenCL call, then one line of JSON: the names of the platforms with their numbers of devices,
and the error of loading LIBRARY. Imports only parts of the standard library that load in some milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys

PLATFORM_NAME = 0x0902
ALL_DEVICES = ctypes.c_uint64(0xFFFFFFFF)


def platforms(loader: ctypes.CDLL) -> list[tuple[str, int]]:
    """Return the name and the number of devices of each platform."""
    count = ctypes.c_uint(0)
    loader.clGetPlatformIDs(0, None, ctypes.byref(count))
    handles = (ctypes.c_void_p * count.value)()
    if count.value:
        loader.clGetPlatformIDs(count, handles, None)
    found = []
    for handle in map(ctypes.c_void_p, handles):
        name = ctypes.create_string_buffer(256)
        loader.clGetPlatformInfo(handle, PLATFORM_NAME, ctypes.c_size_t(255), name, None)
        devices = ctypes.c_uint(0)
        if loader.clGetDeviceIDs(handle, ALL_DEVICES, 0, None, ctypes.byref(devices)) != 0:
            devices.value = 0
        found.append((name.value.decode(errors="replace"), devices.value))
    return found


def load_error(library: str) -> str:
    """Return the error of loading a library, or an empty string."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return ""


def main(loader: str, library: str = "") -> None:
    """Print what the OpenCL loader lists."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an expected result
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # implementations print to stdout, too
    opencl = ctypes.CDLL(loader)
    for name in ("clGetPlatformIDs", "clGetPlatformInfo", "clGetDeviceIDs"):
        getattr(opencl, name)  # an error about a missing function is not one of an implementation
    print("listing", file=answers, flush=True)
    answer = {"platforms": platforms(opencl), "error": load_error(library) if library else ""}
    print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # without the library's destructors


if __name__ == "__main__":
    main(*sys.argv[1:])
