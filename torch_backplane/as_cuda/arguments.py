"""Functions of PyTorch that take the name of a device and do not ask `torch.device`: here "cuda" becomes "bp".

Most functions in Python convert names with `torch.device`, which accepts "cuda" for bp. Wrapped are those that are
implemented in C++ or that compare names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from torch_backplane.accelerator import legacy
from torch_backplane.as_cuda.callers import is_pytorch

Function = Callable[..., Any]

# The argument `device=`: the most frequent functions, whose other arguments can be strings or large.
DEVICE_KEYWORD: dict[Any, tuple[str, ...]] = {
    torch: (
        "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like", "empty_permuted",
        "empty_quantized", "empty_strided", "eye", "from_file", "full", "full_like", "hamming_window", "hann_window",
        "kaiser_window", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint",
        "randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor", "sparse_bsc_tensor",
        "sparse_bsr_tensor", "sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor",
        "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
    ),
    torch.fft: ("fftfreq", "rfftfreq"),
    torch.nested: ("as_nested_tensor", "nested_tensor"),
    torch.Tensor: (
        "new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros",
    ),
}  # fmt: skip

# Any argument that is the name of a device, or a default value that is one.
ANY_ARGUMENT: dict[Any, tuple[str, ...]] = {
    torch: ("get_autocast_dtype", "is_autocast_enabled", "set_autocast_dtype", "set_autocast_enabled"),
    torch.Tensor: ("bp", "is_pinned", "pin_memory", "to"),
    torch._C._nn: ("_parse_to",),  # Module.to
    torch.amp: ("custom_bwd", "custom_fwd", "is_autocast_available"),
    torch.amp.GradScaler: ("__init__",),
    torch.autocast: ("__init__",),
    torch.random: ("fork_rng",),
}

# Methods that have a counterpart with another name.
RENAMED_METHODS: dict[Any, dict[str, str]] = {
    torch.Tensor: {"cuda": "bp"},
    torch.UntypedStorage: {"cuda": "bp"},
    torch.TypedStorage: {"cuda": "bp"},
    torch.nn.Module: {"cuda": "bp"},
    torch.nn.utils.rnn.PackedSequence: {"cuda": "bp"},
}
HAVE_IS_CUDA: tuple[Any, ...] = (
    torch.Tensor, torch.UntypedStorage, torch.TypedStorage, torch.nn.utils.rnn.PackedSequence
)  # fmt: skip


def translated(value: Any) -> Any:
    """Returns "bp:1" for "cuda:1", and other values as they are."""
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "bp" + value[4:]
    return value


def _device_keyword(original: Function) -> Function:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = translated(kwargs["device"])
        return original(*args, **kwargs)

    return function


def _any_argument(original: Function) -> Function:
    defaults: tuple[Any, ...] | None = getattr(original, "__defaults__", None)
    if defaults:
        original.__defaults__ = tuple(map(translated, defaults))  # type: ignore[attr-defined]

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: translated(value) for name, value in kwargs.items()}
        return original(*map(translated, args), **kwargs)

    return function


def _is_cuda(real: Any) -> property:
    def is_cuda(self: Any) -> bool:
        return bool(real.__get__(self) if is_pytorch(sys._getframe(1)) else self.is_bp)

    return property(is_cuda, doc=real.__doc__)


def _tensor_type(original: Function) -> Function:
    """`tensor.type()` returns "torch.cuda.FloatTensor" to programs; `tensor.type(name)` accepts it."""

    @functools.wraps(original)
    def function(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            args = (args[0].replace("torch.cuda.", "torch.bp.", 1), *args[1:])
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not is_pytorch(sys._getframe(1)):
            return result.replace("torch.bp.", "torch.cuda.", 1)
        return result

    return function


def _set_default_tensor_type(original: Function) -> Function:
    """A type of torch.cuda sets the default dtype and device. PyTorch accepts no such types of PrivateUse1 devices."""

    @functools.wraps(original)
    def function(t: Any) -> None:
        name = t if isinstance(t, str) else getattr(t, "__name__", "")  # torch.bp.FloatTensor has its whole name
        package, _, plain = name.rpartition(".")
        dtype = legacy.TENSORS.get(plain.removesuffix("Tensor"))
        if package in ("torch.cuda", "torch.bp") and dtype is not None:
            torch.set_default_dtype(dtype)
            torch.set_default_device("bp")
            return
        if torch.get_default_device().type == "bp":
            torch.set_default_device(None)
        original(t)

    return function


def _autocast_without_device(original: Function) -> Function:
    """`torch.is_autocast_enabled()` and `torch.set_autocast_enabled(True)` are about CUDA."""

    @functools.wraps(original)
    def function(*args: Any) -> Any:
        return original(*args) if args and isinstance(args[0], str) else original("bp", *args)

    return function


def _profiler(original: Function) -> Function:
    """ProfilerActivity.CUDA means the activities of bp."""
    of_cuda, of_bp = torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.PrivateUse1

    @functools.wraps(original)
    def function(*args: Any, activities: Iterable[Any] | None = None, **kwargs: Any) -> None:
        if activities is not None:
            activities = [of_bp if one == of_cuda else one for one in activities]
        original(*args, activities=activities, **kwargs)

    return function


def _backend_of_bp(requested: str) -> str:
    """Translates the name of a c10d backend: "nccl", or "cpu:gloo,cuda:nccl"."""
    return requested.replace("nccl", "backplane").replace("cuda:", "bp:")


def _distributed(original: Function) -> Function:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):  # init_process_group's first parameter
            args = (_backend_of_bp(args[0]), *args[1:])
        if isinstance(kwargs.get("backend"), str):
            kwargs["backend"] = _backend_of_bp(kwargs["backend"])
        return original(*args, **kwargs)

    return function


def _wrap(owner: Any, name: str, wrap: Callable[[Function], Function]) -> None:
    original = getattr(owner, name)
    function = wrap(original)
    # Functions are pickled by these names. Those of the original can be of a class that is not public.
    in_class = isinstance(owner, type)
    function.__module__ = owner.__module__ if in_class else owner.__name__
    function.__qualname__ = f"{owner.__qualname__}.{name}" if in_class else name
    setattr(owner, name, function)
    operator = torch.jit._builtins._find_builtin(original)
    if operator is not None:  # TorchScript looks functions up by identity
        torch.jit._builtins._register_builtin(function, operator)


def _install_distributed() -> None:
    from torch.distributed import device_mesh, distributed_c10d

    for name in ("init_process_group", "new_group"):
        _wrap(torch.distributed, name, _distributed)
        setattr(distributed_c10d, name, getattr(torch.distributed, name))
    torch.distributed.is_nccl_available = lambda: True
    _wrap(torch.distributed, "init_device_mesh", _any_argument)
    device_mesh.init_device_mesh = torch.distributed.init_device_mesh
    _wrap(device_mesh.DeviceMesh, "__init__", _any_argument)


def install() -> None:
    """Wraps the functions."""
    # The default device's list of functions holds the original ones, which __torch_function__ gets.
    _device_constructors()
    for table, wrap in ((DEVICE_KEYWORD, _device_keyword), (ANY_ARGUMENT, _any_argument)):
        for owner, functions in table.items():
            for name in functions:
                if hasattr(owner, name):  # releases differ
                    _wrap(owner, name, wrap)
    for owner, methods in RENAMED_METHODS.items():
        for name, counterpart in methods.items():
            setattr(owner, name, getattr(owner, counterpart))
    for owner in HAVE_IS_CUDA:
        owner.is_cuda = _is_cuda(vars(owner).get("is_cuda") or owner.is_cuda)
    for name in ("is_autocast_enabled", "set_autocast_enabled"):
        _wrap(torch, name, _autocast_without_device)
    torch.get_autocast_gpu_dtype = functools.partial(torch.get_autocast_dtype, "bp")
    torch.set_autocast_gpu_dtype = functools.partial(torch.set_autocast_dtype, "bp")
    _wrap(torch, "set_default_tensor_type", _set_default_tensor_type)
    _wrap(torch.Tensor, "type", _tensor_type)
    for owner in (torch.profiler._KinetoProfile, torch.profiler.profile):
        _wrap(owner, "__init__", _profiler)
    # Before PyTorch's own entry for CUDA, which is 20.
    torch.serialization.register_package(19, _location, _restored)
    if torch.distributed.is_available():
        _install_distributed()


def _location(storage: Any) -> str | None:
    """Checkpoints say "cuda:0", as those of the same program on CUDA."""
    return f"cuda:{storage.device.index}" if storage.device.type == "bp" else None


def _restored(storage: Any, location: str) -> Any:
    """Loads checkpoints that were saved on CUDA, or with `map_location="cuda"`."""
    device = translated(location)
    return None if device is location else torch.serialization.default_restore_location(storage, device)
