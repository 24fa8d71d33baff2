"""Trains on the CPU and on a fake device, and prints facts about the process and PyTorch as JSON.

    python tests/support/process_facts.py FAKE_DEVICE bp         # trains on bp first
    python tests/support/process_facts.py FAKE_DEVICE MODULE...  # imports these modules first

FAKE_DEVICE is the library built from fake_device.cpp. test_process_unchanged.py compares the output of the two forms.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

MIB = 1 << 20


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def train(device: str) -> None:
    """Trains for two steps with a convolution, a recurrent layer, a linear layer, AMP's scaler and an optimizer."""
    model = torch.nn.ModuleList([torch.nn.Conv2d(3, 8, 3), torch.nn.LSTM(36, 16), torch.nn.Linear(16, 4)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(torch.device(device).type)
    for _ in range(2):
        image = torch.randn(4, 3, 8, 8, device=device)
        hidden, _ = model[1](model[0](image).relu().flatten(2))
        scaler.scale(model[2](hidden).log_softmax(-1).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def of_threads(function: Callable[[int], Any]) -> dict[int, Any]:
    """Returns `function(thread_id)` for each thread of the process, by thread id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found[int(task.name)] = function(int(task.name))
    return found


def busy_seconds() -> dict[int, float]:
    """Returns the CPU time of each thread."""
    return of_threads(lambda task: int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0]) / 1e9)


def computing_threads(work: Callable[[], object]) -> int:
    """Returns the number of threads that compute while this one calls `work()` for 0.2 seconds of its CPU time."""
    before, end = busy_seconds(), time.thread_time() + 0.2
    while time.thread_time() < end:
        work()
    return sum(seconds - before.get(task, 0) > 0.04 for task, seconds in busy_seconds().items())


def cpu_parallelism() -> dict[str, Any]:
    x = torch.rand(1 << 21)
    matrix = torch.rand(600, 600)
    return {
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "parallel info": torch.__config__.parallel_info(),
        "threads of an elementwise operator": computing_threads(x.sin),
        "threads of a product": computing_threads(lambda: matrix @ matrix),
        "denormal numbers": torch.tensor([1e-40]).mul(2).item(),
    }


def in_new_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def affinity() -> list[list[int]]:
    """Returns the distinct CPU affinity sets of the process's threads."""
    return sorted(map(list, {tuple(sorted(found)) for found in of_threads(os.sched_getaffinity).values()}))


def malloc() -> dict[str, Any]:
    """Returns how glibc allocates.

    By default, glibc maps large blocks; once such a block was freed, it allocates blocks of up to that size from the
    heap. It returns the end of the heap to the system when twice that size is free there.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return {}
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    library.mallinfo2.restype = MallInfo

    def mapped() -> int:
        return int(library.mallinfo2().hblks)

    def taken(size: int) -> str:
        before = mapped()
        block = library.malloc(size)
        found = "mapped" if mapped() > before else "from the heap"
        library.free(block)
        return found

    found = {f"{size} MiB, {turn}": taken(size * MIB) for turn in ("first", "again") for size in (64, 31)}
    blocks = [library.malloc(30 * MIB) for _ in range(5)]
    for block in blocks:
        library.free(block)
    found["kept at the heap's end"] = "little" if library.mallinfo2().keepcost < 100 * MIB else "much"
    return found


def passes() -> dict[str, Any]:
    """Returns the thread and device of backward passes, and the state of PyTorch's autograd engine."""
    own, found = threading.get_ident(), {}

    def run(name: str, x: torch.Tensor) -> None:
        def hook(gradient: torch.Tensor) -> None:
            where = "here" if threading.get_ident() == own else "in another thread"
            found[name] = [where, str(gradient.device), torch.autograd.is_multithreading_enabled()]

        y = x * 2
        y.register_hook(hook)
        y.sum().backward()

    run("cpu", torch.ones(3, requires_grad=True))
    run("meta", torch.ones(3, requires_grad=True, device="meta"))
    with FakeTensorMode():
        run("maia", torch.ones(3, requires_grad=True, device="maia:0"))
    engine: Any = torch.autograd.Variable._execution_engine
    found["engine"] = f"{type(engine).__module__}.{type(engine).__qualname__}"
    found["enabled"] = torch._C._is_multithreading_enabled()
    return found


def dispatch() -> dict[str, Any]:
    """Returns every registered kernel by operator and key, the backend fallbacks, and this thread's dispatch keys."""
    kernels = {}
    for name in torch._C._dispatch_get_all_op_names():
        for line in torch._C._dispatch_dump(name).splitlines():
            key, _, registered = line.partition(": ")
            kernels[f"{name} {key}"] = re.sub(r"0x[0-9a-f]+", "", registered)
    return {
        "kernels": kernels,
        "fallbacks": [key for key in torch._C.DispatchKey.__members__ if has_fallback(key)],
        "included": str(torch._C._dispatch_tls_local_include_set()),
        "excluded": str(torch._C._dispatch_tls_local_exclude_set()),
    }


def has_fallback(key: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_backend_fallback(getattr(torch._C.DispatchKey, key)))
    except RuntimeError:
        return False  # a key that cannot have a fallback


def process() -> dict[str, Any]:
    status = Path("/proc/self/status").read_text()
    ours = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_BACKPLANE_")
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "environment": {name: value for name, value in os.environ.items() if not name.startswith(ours)},
        "signals caught": re.findall(r"Sig(?:Cgt|Ign|Blk):.*", status),
        "handlers": {name.name: str(signal.getsignal(name)) for name in signal.Signals if name.name != "SIGINT"},
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "garbage collection": [gc.isenabled(), gc.get_threshold()],
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "excepthook": [sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__],
        "umask": re.findall(r"Umask:.*", status),
        "nice": os.nice(0),
    }


def results() -> dict[str, Any]:
    """Returns results that the CPU computes, and PyTorch's default settings."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    model(torch.rand(4, 8)).sum().backward()
    return {
        "gradients": [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None],
        "default device": str(torch.get_default_device()),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
    }


def main(fake_device: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    ctypes.CDLL(fake_device)
    if names == ("bp",):
        train("bp")
        torch.accelerator.synchronize()
    else:
        for name in names:
            __import__(name)
    train("cpu")
    facts = {
        "malloc": malloc(),
        "cpu parallelism": cpu_parallelism(),
        "cpu parallelism in a thread": in_new_thread(cpu_parallelism),
        "affinity": affinity(),
        "autograd": passes(),
        "dispatch": dispatch(),
        "dispatch in a thread": in_new_thread(lambda: {**dispatch(), "kernels": None}),
        "process": process(),
        "results": results(),
    }
    modules = sorted(name for name in sys.modules if name.startswith("torch.") and not is_ours(name))
    print(json.dumps({"facts": facts, "modules": modules}))


def is_ours(module: str) -> bool:
    return module.startswith(("torch.bp", "torch.backends.bp"))


if __name__ == "__main__":
    main(*sys.argv[1:])
