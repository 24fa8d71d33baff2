"""An emulated CUDA driver over host memory: libcuda, NVRTC, NVML, cuBLAS, cuBLASLt, cuDNN, cuFFT, cuSOLVER and NCCL.

libamdhip64 and libhiprtc have HIP's functions, by those of libcuda and NVRTC. The devices are gfx1100 for them.

CUDA programs run without a GPU. Of NVML and the other libraries, it has the functions that the CUDA driver of Backplane
calls.

`load()` loads the libraries into this process; cuda-bindings then uses them. `environment()` returns the variables with
which other programs do. As a command, this runs a program with these variables, or prints the libraries' folder:

    python tests/cuda_emulator/emulator.py python program.py

The libraries are compiled on first use.

Environment variables of the libraries:

    CUDA_EMULATOR_DEVICES       number of devices, up to 7 (2)
    CUDA_EMULATOR_ARCHITECTURE  compute capability of all devices (80: 8.0)
    CUDA_EMULATOR_MEMORY        bytes of each device (8 GiB)
    CUDA_EMULATOR_UNITS         multiprocessors of each device (4)
    CUDA_EMULATOR_PEERS         0: no device can access another one's memory
    CUDA_EMULATOR_VERSION       what cuDriverGetVersion returns (13000)
    CUDA_EMULATOR_FILL          the byte that new memory contains, such as 0xff (0)
    CUDA_EMULATOR_FAULTS        CALL:NUMBER:ERROR,…: the NUMBERth call of a function fails with an error number.
                                «(kernel)» is the execution of a kernel. Functions of the other libraries can fail, too.
    CUDA_EMULATOR_NCCL_VERSION  what ncclGetVersion returns (22900)
    CUDA_EMULATOR_REPORT        set: print illegal accesses of kernels, and why an image cannot be loaded
    CUDA_EMULATOR_RUN           0: launches return without a kernel run, to measure the time of the program itself
    CUDA_EMULATOR_CHECKS        1: check bounds to the byte, races and barriers of kernels; «report»: only report them

CUDA_VISIBLE_DEVICES has its usual meaning, for numbers.

Kernels run in the kernel interpreter (torch_backplane/interpreter/), one block after another. It checks each memory
access. Differences to a GPU: the host can access device memory, a grid cannot synchronize, and PTX of other compilers
cannot be loaded. Binaries of NVIDIA's compiler can be loaded if `define_kernel()` has defined a Python function for
each of their kernels: its launches call the function instead of the binary's instructions.

CUDA_EMULATOR_CHECKS finds what memcheck, racecheck and synccheck of NVIDIA's compute-sanitizer find, and races on
global memory. Findings go to the standard error output, and the launch fails: with CUDA_ERROR_ILLEGAL_ADDRESS or
CUDA_ERROR_MISALIGNED_ADDRESS (memcheck), or with CUDA_ERROR_LAUNCH_FAILED (racecheck, synccheck). With «report»
launches succeed, and only threads with illegal accesses end. Global memory has the bounds of its allocations;
`check_blocks()` makes those of tensors known.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_SOURCES = _HERE / "src"
sys.path.insert(0, str(_HERE.parents[1]))

from torch_backplane.interpreter import library  # noqa: E402
from torch_backplane.interpreter.cuda_cpp import CudaCpp  # noqa: E402

_INTERPRETER = Path(library.__file__).parent
_SANITIZER = _INTERPRETER.parent / "sanitizer"
_RUNTIME = "libcuda_emulator_kernels.so"
_NVRTC = ("nvrtc.cpp", "nvrtc_compiler.cpp", "nvrtc_source.cpp", "processes.cpp")
# The sources of libraries that are linked with libcuda, and their names for CUDA 13 and 12.
_CUBLAS, _CUFFT = ("libcublas.so.13", "libcublas.so.12"), ("libcufft.so.12", "libcufft.so.11")
_CUBLASLT = ("libcublasLt.so.13", "libcublasLt.so.12")
_CUSOLVER = ("libcusolver.so.12", "libcusolver.so.11")
_CUDNN, _NCCL = ("libcudnn.so.9",), ("libnccl.so.2",)
_HIP, _HIPRTC = ("libamdhip64.so.6",), "libhiprtc.so.6"
_CLIENTS = {
    "cublas.cpp": _CUBLAS,
    "cublaslt.cpp": _CUBLASLT,
    "cudnn.cpp": _CUDNN,
    "cufft.cpp": _CUFFT,
    "cusolver.cpp": _CUSOLVER,
    "hip.cpp": _HIP,
    "nccl.cpp": _NCCL,
}
_OPTIONS = ("-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Wno-stringop-overflow", "-fPIC", "-fvisibility=hidden")


@functools.cache
def library_folder() -> Path:
    """Return the folder of the libraries: libcuda.so.1, libnvidia-ml.so.1, and the others for CUDA 13 and 12.

    Compiles them if a source is new.

    Raises:
        RuntimeError: the compiler has failed. The message is its output.
    """
    language = CudaCpp()
    inputs = [*sorted(_SOURCES.iterdir()), *sorted(_INTERPRETER.glob("*")), _SANITIZER / "checks.h", Path(__file__)]
    digest = hashlib.sha256(f"{_SOURCES} {language.version()}".encode())  # the compiler reads headers there
    for one in filter(Path.is_file, inputs):
        digest.update(one.name.encode() + one.read_bytes())
    digest.update(" ".join(_processor_options()).encode())
    folder = _cache() / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _build(folder, language)
            (folder / "complete").touch()
    return folder


def environment() -> dict[str, str]:
    """Return environment variables with which a program uses the emulator.

    libnvrtc is preloaded, because cuda-bindings prefers the libraries of wheels to those of LD_LIBRARY_PATH.
    """
    folder = library_folder()
    paths = filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH")))
    preload = filter(None, (str(folder / "libnvrtc.so.13"), os.environ.get("LD_PRELOAD")))
    return {"LD_LIBRARY_PATH": ":".join(paths), "LD_PRELOAD": ":".join(preload), **libraries()}


def libraries() -> dict[str, str]:
    """Return the environment variables with which Backplane uses the emulated libraries, from cuBLAS to NCCL."""
    folder = library_folder()
    return {
        "TORCH_BACKPLANE_CUBLAS_LIBRARY": str(folder / _CUBLAS[0]),
        "TORCH_BACKPLANE_CUBLASLT_LIBRARY": str(folder / _CUBLASLT[0]),
        "TORCH_BACKPLANE_CUDNN_LIBRARY": str(folder / _CUDNN[0]),
        "TORCH_BACKPLANE_CUFFT_LIBRARY": str(folder / _CUFFT[0]),
        "TORCH_BACKPLANE_CUSOLVER_LIBRARY": str(folder / _CUSOLVER[0]),
        "TORCH_BACKPLANE_NCCL_LIBRARY": str(folder / _NCCL[0]),
    }


@functools.cache
def load() -> ctypes.CDLL:
    """Load the libraries, and return libcuda. Must be called before another libcuda or libnvrtc is loaded."""
    folder = library_folder()
    ctypes.CDLL(str(folder / "libnvrtc.so.13"))
    return ctypes.CDLL(str(folder / "libcuda.so.1"))


def check_blocks(resolve: Any = None) -> None:
    """Check kernels of this process for accesses outside of the tensors' storages that are their arguments.

    `resolve` finds the bounds in place of the allocator: `Resolve` of torch_backplane.sanitizer.device.

    Needs CUDA_EMULATOR_CHECKS, and libcuda as the library of the CUDA driver of Backplane. Disables the cache of its
    allocator: freed memory has no known bounds, and a kernel can wait for its compiler longer than a block is in use.
    """
    from torch_backplane import _C
    from torch_backplane.sanitizer.device import RESOLVE

    _C._memory_enable_caching(False)
    load().emulator_resolve_bounds(resolve or RESOLVE)


_defined: list[Any] = []  # loaded modules call them, also after other kernels got their names
_HOST_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint * 7), ctypes.c_void_p, ctypes.c_uint64)


def define_kernel(name: str, function: Callable[[tuple[int, ...], bytes], None]) -> None:
    """Define what launches of a kernel compute, in binaries of NVIDIA's compiler that this process loads from now on.

    Args:
        name: of the kernel in the binary.
        function: gets three sizes of the grid, three of a block and the bytes of dynamic shared memory as one tuple,
            and the parameters as in the kernel's constant memory. It can access device memory at its addresses. An
            exception is printed, and the launch fails with CUDA_ERROR_LAUNCH_FAILED.
    """

    @_HOST_KERNEL
    def call(sizes: Any, parameters: int, nbytes: int) -> int:
        try:
            function(tuple(sizes.contents), ctypes.string_at(parameters, nbytes))
        except Exception:
            traceback.print_exc()
            return 719
        return 0

    _defined.append(call)
    load().emulator_define_kernel(name.encode(), call)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_backplane" / "cuda_emulator"


def _processor_options() -> list[str]:
    """Return compiler options for instructions of this processor. Without -mfma, each fma() is a call."""
    facts = Path("/proc/cpuinfo")
    words = facts.read_text(encoding="utf-8").split() if facts.exists() else []
    return ["-mfma"] if "fma" in words else []


def _build(folder: Path, language: CudaCpp) -> None:
    compiler = language.compiler()
    folders = [f"-I{one}" for one in (_INTERPRETER, _SOURCES, _SANITIZER)]
    runtime = [*folders, f'-DOBSERVER="{_SOURCES / "kernel_observer.h"}"']
    _run(
        compiler, *library.RUNTIME_OPTIONS, "-O2", "-w", "-fPIC", "-shared", f"-Wl,-soname,{_RUNTIME}", *runtime,
        str(_INTERPRETER / "runtime.cpp"), "-o", str(folder / _RUNTIME),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as objects:
        made = {}
        for source in sorted(_SOURCES.glob("*.cpp")):
            made[source.name] = str(Path(objects, source.name + ".o"))
            _run(compiler, *_OPTIONS, "-c", str(source), "-o", made[source.name])
        hiprtc = made.pop("hiprtc.cpp")
        nvrtc = [made.pop(name) for name in _NVRTC] + [made["faults.cpp"]]
        _link(compiler, folder / "libnvidia-ml.so.1", [made.pop("nvml.cpp"), made["faults.cpp"]])
        clients = {source: [made.pop(source), made["faults.cpp"]] for source in _CLIENTS}
        libcuda = folder / "libcuda.so.1"
        _link(compiler, libcuda, list(made.values()))
        for source, names in _CLIENTS.items():
            for name in names:
                _link(compiler, folder / name, [*clients[source], str(libcuda)])
        _link(compiler, folder / "libnvrtc.so.13", nvrtc)
        _link(compiler, folder / "libnvrtc.so.12", nvrtc)
        _link(compiler, folder / _HIPRTC, [hiprtc, *nvrtc])
    (folder / "nvrtc.prelude").write_text(_prelude(folder, language), encoding="utf-8")
    shutil.copy(_SOURCES / "kernel_table.h", folder)
    script = folder / "nvrtc.link"
    script.write_text(library.LINK_SCRIPT, encoding="utf-8")
    command = [
        compiler, *language.options(), *_processor_options(), *library.LINK_OPTIONS, f"-Wl,-T,{script}", f"-I{folder}",
        "SOURCE", "-x", "none", str(folder / _RUNTIME), "-lm", "-lgcc", "-lc", "-o", "RESULT",
    ]  # fmt: skip
    (folder / "nvrtc.command").write_text("\n".join(command), encoding="utf-8")


def _prelude(folder: Path, language: CudaCpp) -> str:
    words = (_SOURCES / "kernel_words.h").read_text(encoding="utf-8")
    build = f'#define EMULATOR_BUILD "{folder.name}"\n'
    return f'{build}{language.before("")}#line 1 "kernel_words.h"\n{words}'


def _link(compiler: str, made: Path, objects: Sequence[str]) -> None:
    # Only the API is exported: other libraries can have functions with the names of internal ones.
    exported = made.parent / "exported"
    exported.write_text("{ global: cu*; hip*; nccl*; nvrtc*; nvml*; emulator_*; local: *; };", encoding="utf-8")
    options = [
        f"-Wl,--version-script={exported}",
        "-shared",
        f"-Wl,-soname,{made.name}",
        "-Wl,-z,defs",
        "-Wl,-rpath,$ORIGIN",
        "-Wl,--disable-new-dtags",
    ]
    _run(compiler, *options, *objects, f"-L{made.parent}", f"-l:{_RUNTIME}", "-lpthread", "-ldl", "-o", str(made))


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(library_folder())
    else:
        os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **environment()})
