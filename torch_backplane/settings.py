"""Environment variables: the table of all, and those that apply to all devices, which are read at import.

Variables of a single driver, such as TORCH_BACKPLANE_HOST_DEVICES, are read by that driver when it discovers devices.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from torch_backplane import _C, preferences

T = TypeVar("T")

PREFIX = "TORCH_BACKPLANE_"


class Variable(NamedTuple):
    """An environment variable that Backplane reads."""

    meaning: str
    values: str
    default: str
    read: str  # when


# Markdown: docs/environment.md shows them.
VARIABLES: Mapping[str, Variable] = {
    "TORCH_BACKPLANE_DRIVERS": Variable(
        "drivers to use; their devices are numbered in this order", "names, such as `opencl,host`",
        "all installed drivers: GPUs first, then accelerators, CPUs, host devices", "at discovery",
    ),
    "TORCH_BACKPLANE_VISIBLE_DEVICES": Variable(
        "devices to use, numbered in this order; `host` means all host devices", "such as `host:1,host:0`", "all",
        "at discovery",
    ),
    "TORCH_BACKPLANE_FALLBACK": Variable(
        "what happens when an operator falls back to PyTorch's CPU kernel, with copies",
        "`warn` (once for each operator), `silent`, `error`", "`warn`", "at import",
    ),
    "TORCH_BACKPLANE_PLANS": Variable(
        "whether plans are replayed (`1`), not used (`0`), or checked against their planners (`check`)",
        "`1`, `0`, `check`", "`1`", "at import",
    ),
    "TORCH_BACKPLANE_LAUNCH_BLOCKING": Variable(
        "each operator waits for the device, so that errors of kernels are raised by the call itself", "`0`, `1`",
        "`0`", "at import",
    ),
    "TORCH_BACKPLANE_SANITIZER": Variable(
        "unsynchronized accesses of two streams to the same memory raise an error "
        "([debugging.md](debugging.md#find-races-between-streams))", "`0`, `1`", "`0`", "at import",
    ),
    "TORCH_BACKPLANE_SANITIZE_KERNELS": Variable(
        "the only device checks kernels for out-of-bounds accesses and races "
        "([debugging.md](debugging.md#check-kernels-for-out-of-bounds-accesses-and-races))", "`0`, `1`", "`0`",
        "at discovery",
    ),
    "TORCH_BACKPLANE_HOST_DEVICES": Variable("number of host devices", "`0` to `64`", "`1`", "at discovery"),
    "TORCH_BACKPLANE_HOST_MEMORY": Variable(
        "memory of each host device", "a size", "all physical memory", "at discovery"
    ),
    "TORCH_BACKPLANE_HOST_ASYNC": Variable(
        "streams of host devices execute asynchronously, each in a thread "
        "([debugging.md](debugging.md#test-with-asynchronous-host-devices))", "`0`, `1`", "`0`", "at discovery",
    ),
    "TORCH_BACKPLANE_HOST_DELAYS": Variable(
        "seed of random delays of up to 0.2 ms; implies asynchronous execution", "a seed, such as `1`", "none",
        "at discovery",
    ),
    "TORCH_BACKPLANE_HOST_LINK": Variable(
        "a modelled link: collectives of host devices take at least as long as over it "
        "([several-devices.md](several-devices.md#a-cluster-on-one-machine))",
        "a speed, or a speed and a delay, such as `1GiB/s,20us`", "none", "when a process group is created",
    ),
    "TORCH_BACKPLANE_COLLECTIVES": Variable(
        "engine of the collectives of `torch.distributed`; `mpi` and `ucc` need a PyTorch that was built with it",
        "`gloo`, `mpi`, `ucc`", "`gloo`", "when a process group is created",
    ),
    "TORCH_BACKPLANE_DISCRETE": Variable(
        "devices in host memory behave as if the CPU could not access it", "`0`, `1`", "`0`", "at discovery"
    ),
    "TORCH_BACKPLANE_TARGET": Variable(
        "a modelled device whose target replaces that of devices that run kernels "
        "([conformance.md](conformance.md))", "a name, such as `nvidia-ada`, or a file", "none", "at discovery",
    ),
    "TORCH_BACKPLANE_WORKSPACE": Variable(
        "workspace limit of matrix products and convolutions", "a size", "no limit", "when the first one is planned"
    ),
    "TORCH_BACKPLANE_INDUCTOR_BACKEND": Variable(
        "language of the kernels that `torch.compile` generates ([compile.md](compile.md#kernels-in-triton))",
        "`dialect`, `triton`", "`dialect`", "at import",
    ),
    "TORCH_BACKPLANE_CUDA_LIBRARY": Variable(
        "the libcuda that the CUDA driver loads ([cuda.md](cuda.md))", "a file", "the system's", "at discovery"
    ),
    "TORCH_BACKPLANE_NVRTC_LIBRARY": Variable(
        "the NVRTC that the CUDA driver loads ([cuda.md](cuda.md))", "a file", "the one that cuda-bindings finds",
        "at discovery",
    ),
    "TORCH_BACKPLANE_NVML_LIBRARY": Variable(
        "the NVML (libnvidia-ml) that the CUDA driver loads ([cuda.md](cuda.md))", "a file",
        "that of NVIDIA's driver", "when a sensor is read",
    ),
    "TORCH_BACKPLANE_CUBLAS_LIBRARY": Variable(
        "the cuBLAS that the CUDA driver loads ([cuda.md](cuda.md))", "a file; `none` for no cuBLAS",
        "the one that cuda-pathfinder finds", "at discovery",
    ),
    "TORCH_BACKPLANE_CUBLASLT_LIBRARY": Variable(
        "the cuBLASLt that the CUDA driver loads ([cuda.md](cuda.md))", "a file; `none` for no cuBLASLt",
        "the one that cuda-pathfinder finds", "at discovery",
    ),
    "TORCH_BACKPLANE_CUDNN_LIBRARY": Variable(
        "the cuDNN that the CUDA driver loads ([cuda.md](cuda.md))", "a file; `none` for no cuDNN",
        "the one that cuda-pathfinder finds", "at discovery",
    ),
    "TORCH_BACKPLANE_CUSOLVER_LIBRARY": Variable(
        "the cuSOLVER that the CUDA driver loads ([cuda.md](cuda.md))", "a file; `none` for no cuSOLVER",
        "the one that cuda-pathfinder finds", "at discovery",
    ),
    "TORCH_BACKPLANE_CUFFT_LIBRARY": Variable(
        "the cuFFT that the CUDA driver loads ([cuda.md](cuda.md))", "a file; `none` for no cuFFT",
        "the one that cuda-pathfinder finds", "at discovery",
    ),
    "TORCH_BACKPLANE_NCCL_LIBRARY": Variable(
        "the NCCL that the CUDA driver loads ([cuda.md](cuda.md))", "a file; `none` for no NCCL",
        "the one that cuda-pathfinder finds", "at discovery",
    ),
    "TORCH_BACKPLANE_CUDA_OPTIONS": Variable(
        "more options of NVRTC ([cuda.md](cuda.md))", "such as `--generate-line-info`", "none", "at discovery"
    ),
    "TORCH_BACKPLANE_HIP_LIBRARY": Variable(
        "the libamdhip64 that the HIP driver loads ([hip.md](hip.md))", "a file", "that of ROCm", "at discovery"
    ),
    "TORCH_BACKPLANE_HIPRTC_LIBRARY": Variable(
        "the libhiprtc that the HIP driver loads ([hip.md](hip.md))", "a file", "that of ROCm", "at discovery"
    ),
    "TORCH_BACKPLANE_HIP_OPTIONS": Variable(
        "more options of hiprtc ([hip.md](hip.md))", "such as `-g`", "none", "at discovery"
    ),
    "TORCH_BACKPLANE_CACHE_DIR": Variable(
        "folder of the cache of compiled kernels ([opencl.md](opencl.md#kernel-builds-and-the-cache))",
        "a folder; empty for no cache", "`torch_backplane` in `$XDG_CACHE_HOME` or `~/.cache`",
        "when a kernel is built",
    ),
    "TORCH_BACKPLANE_INTEGRATIONS": Variable(
        "whether libraries such as safetensors are adapted to bp when they are imported. "
        "`python -m torch_backplane run` sets it for child processes ([run-cuda-programs.md](run-cuda-programs.md))",
        "`0`, `1`", "`0`", "at import",
    ),
    "TORCH_BACKPLANE_AS_CUDA": Variable(
        '`"cuda"` and `torch.cuda` mean bp. `python -m torch_backplane run --as-cuda` sets it for child processes '
        "([run-cuda-programs.md](run-cuda-programs.md))", "`0`, `1`", "`0`", "at import",
    ),
    "TORCH_BACKPLANE_CACHE_SIZE": Variable("size limit of this cache", "a size", "`1GiB`", "when a kernel is written"),
}  # fmt: skip

FALLBACK_POLICIES = {
    "warn": _C.FallbackPolicy.warn,
    "silent": _C.FallbackPolicy.silent,
    "error": _C.FallbackPolicy.error,
}


def choice(name: str, accepted: Mapping[str, T], default: str) -> T:
    """Returns the value in `accepted` that the environment variable `name` selects.

    Raises:
        ValueError: the variable is not a key of `accepted`.
    """
    text = os.environ.get(name, default).strip()
    if text not in accepted:
        raise ValueError(f"{name}={text!r} is not one of {', '.join(accepted)}")
    return accepted[text]


def unknown() -> dict[str, str]:
    """Returns the set variables with Backplane's prefix that are unknown, each with the most similar known one or "".

    Variables that contain the name of a third-party driver after the prefix belong to that driver and are left out.
    """
    names = [name for name in os.environ if name.startswith(PREFIX) and name not in VARIABLES]
    if not names:
        return {}
    import difflib
    from importlib.metadata import entry_points

    drivers = entry_points(group="torch_backplane.drivers")
    others = tuple(f"{PREFIX}{one.name.upper()}_" for one in drivers if not one.value.startswith("torch_backplane."))
    return {
        name: next(iter(difflib.get_close_matches(name, VARIABLES, 1, cutoff=0.85)), "")
        for name in sorted(names)
        if not name.startswith(others)
    }


def switch(name: str) -> bool:
    """Whether the environment variable `name` is 1. The default is 0.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    return choice(name, {"0": False, "1": True}, default="0")


def apply() -> None:
    """Reads the environment variables and configures the runtime. Warns about unknown variables.

    Raises:
        ValueError: a variable is malformed.
    """
    for name, near in unknown().items():
        meant = f"did you mean {near}?" if near else "docs/environment.md lists all variables"
        warnings.warn(f"{name} is set, but Backplane has no such variable: {meant}", stacklevel=2)
    _C.set_fallback_policy(choice("TORCH_BACKPLANE_FALLBACK", FALLBACK_POLICIES, default="warn"))
    _C.set_launch_blocking(switch("TORCH_BACKPLANE_LAUNCH_BLOCKING"))
    backends = {name: name for name in preferences.INDUCTOR_BACKENDS}
    preferences.set_inductor_backend(choice("TORCH_BACKPLANE_INDUCTOR_BACKEND", backends, default="dialect"))
    _C.set_plan_mode(choice("TORCH_BACKPLANE_PLANS", {mode: mode for mode in ("1", "0", "check")}, default="1"))
