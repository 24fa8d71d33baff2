"""PyTorch's tests of torch.distributed, read from the installed wheel, with bp in place of CUDA.

They name the device type "cuda" and their backends "nccl" and "gloo", and skip by these names. So their source is
executed with other names, in modules of their own:

| module | PyTorch's | "cuda" | "nccl" | "gloo", "mpi" | |
|---|---|---|---|---|---|
| `as_nccl` | `distributed_test` | bp | backplane | | tests of CUDA tensors |
| `as_gloo` | `distributed_test` | bp | | backplane | tests of CPU tensors: run them with bp as the default device |
| `fsdp` | `common_fsdp` | bp | backplane | | models and base classes |
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import sys
import types
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

# The tests read these when they are defined, and when they run.
ENVIRONMENT = {"BACKEND": "backplane", "WORLD_SIZE": "4", "INIT_METHOD": "file://"}

_COMMON = "bp_common_distributed"
_DEVICE = {
    r"\bcuda\b": "bp",
    r"\bis_cuda\b": "is_bp",
    r"\bTEST_CUDA\b": "TEST_PRIVATEUSE1",
    r"\bActivity\.CUDA\b": "Activity.PrivateUse1",
    r"\bDeviceType\.CUDA\b": "DeviceType.PrivateUse1",
    r"\bis_nccl_available\(\)": 'is_backend_available("backplane")',
    r"import torch\.bp\.nccl\n": "",
    r"torch\.testing\._internal\.common_distributed": _COMMON,
    r"DEVICE_COUNT = torch\.bp\.device_count\(\)": "DEVICE_COUNT = 4",  # forked processes must discover devices
}


def _backend(names: str) -> dict[str, str]:
    return {rf'"({names})"': '"backplane"', rf"\bBackend\.({names.upper()})\b": "Backend.BACKPLANE"}


def _load(origin: str, name: str, renamed: dict[str, str]) -> Any:
    """Executes the source of the module `origin` of PyTorch, with other names, as the module `name`."""
    origin = f"torch.testing._internal.{origin}"
    spec = importlib.util.find_spec(origin)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    for pattern, new in renamed.items():
        text = re.sub(pattern, new, text)
    module = types.ModuleType(name)
    module.__file__ = spec.origin
    sys.modules[name] = module
    exec(compile(text, f"<{origin} for bp>", "exec", dont_inherit=True), vars(module))
    return module


common = _load("common_distributed", _COMMON, _DEVICE)
common.requires_nccl_version = lambda version, reason: lambda test: test
common.skip_if_small_worldsize = lambda test: test  # skips below 8 ranks, but no test needs more than 4
for _feature in ("gpu", "bp", "ddp", "subgroup", "plugin"):
    common.DistTestCases.backend_feature[_feature].add("backplane")
with mock.patch.dict(os.environ, ENVIRONMENT):
    # What NCCL has only for CUDA tensors.
    _cuda_only = mock.patch.dict(
        common.DistTestCases.skip_collective,
        {name: {"backplane"} for name in ("allgather_coalesced", "cpu barrier", "sendrecv anysource")},
    )
    with _cuda_only:
        as_nccl = _load("distributed.distributed_test", "bp_as_nccl", {**_DEVICE, **_backend("nccl")})
    as_gloo = _load("distributed.distributed_test", "bp_as_gloo", {**_DEVICE, **_backend("gloo|mpi")})
fsdp = _load("common_fsdp", "bp_common_fsdp", {**_DEVICE, **_backend("nccl")})

_context = multiprocessing.get_context("forkserver")


def _run(environment: dict[str, str], function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    os.environ.update(environment)
    as_gloo.INIT_METHOD = environment["INIT_METHOD"]
    function(*args, **kwargs)


class InForks:
    """Starts the ranks of a MultiProcessTestCase as forks of a process that has imported this module.

    That is faster than new interpreters. Importing this module discovers devices, and multiprocessing has one server
    for all forks. So the class has a separate server, and the next user (forked.py) starts another one. Only host
    devices that were discovered can be used after a fork: on other devices, the server has imported only torch.
    """

    @classmethod
    def setUpClass(cls) -> None:
        patch = mock.patch.dict(os.environ, ENVIRONMENT)
        patch.start()
        cls.addClassCleanup(patch.stop)
        server = forkserver._forkserver  # type: ignore[attr-defined]
        before = server._preload_modules
        server._stop()
        cls.addClassCleanup(_context.set_forkserver_preload, before)
        cls.addClassCleanup(server._stop)
        _context.set_forkserver_preload([__name__ if os.environ["TORCH_BACKPLANE_DRIVERS"] == "host" else "torch"])
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            forkserver.ensure_running()
        super().setUpClass()

    def _spawn_processes(self) -> None:
        def process(target: Any, name: str, args: Any, kwargs: Any) -> Any:
            return _context.Process(target=_run, name=name, args=(dict(os.environ), target, *args), kwargs=kwargs)

        self._start_processes(process)
