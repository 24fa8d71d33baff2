"""`torch.cuda` and `torch.backends.cuda` as the program sees them: the names of CUDA's modules, implemented by bp's."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch

from torch_backplane import accelerator, backends
from torch_backplane.as_cuda import names
from torch_backplane.as_cuda.callers import is_pytorch


class Absent:
    """Stands for a function or class without a counterpart on bp. The name exists, as on CUDA; using it raises.

    Raises:
        NotImplementedError: it is called, or an attribute of it is read.
    """

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        reason = self._reason or "docs/torch-bp.md lists what torch.bp has"
        raise NotImplementedError(f"{self._name} has no counterpart on bp: {reason}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self()


class Switch(NamedTuple):
    """A module attribute that can be assigned."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


class Counterpart(NamedTuple):
    """What the names of a module of PyTorch mean on bp.

    Args:
        module: where to look names up; None if nothing in the module has a counterpart.
        renamed: names that are other names there.
        values: names with values of their own.
        switches: names that can be assigned.
        absent: returns why a name has no counterpart.
    """

    module: types.ModuleType | None
    renamed: Mapping[str, str]
    values: Mapping[str, Any]
    switches: Mapping[str, Switch]
    absent: Callable[[str], str]


class View(types.ModuleType):
    """Replaces a module of PyTorch. Programs see bp's counterpart of it, PyTorch's own code sees the module itself.

    What a program assigns is an attribute of the view, for all.
    """

    def __init__(self, real: types.ModuleType, counterpart: Counterpart) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update(_real=real, _counterpart=counterpart, __spec__=real.__spec__, __package__=real.__package__)

    def __getattr__(self, name: str) -> Any:
        real: types.ModuleType = self.__dict__["_real"]
        if is_pytorch(sys._getframe(1)) or (name.startswith("__") and name.endswith("__")):
            return getattr(real, name)
        bp: Counterpart = self.__dict__["_counterpart"]
        if name in bp.switches:
            return bp.switches[name].get()
        if name in bp.values:
            return bp.values[name]
        if bp.module is not None and hasattr(bp.module, bp.renamed.get(name, name)):
            return getattr(bp.module, bp.renamed.get(name, name))
        return self._without_counterpart(getattr(real, name), name)

    def _without_counterpart(self, value: Any, name: str) -> Any:
        """Functions and classes of the module raise when they are used. What else it contains does not need CUDA."""
        reason = self.__dict__["_counterpart"].absent(name)
        is_exception = isinstance(value, type) and issubclass(value, BaseException)
        home = ".".join(self.__name__.split(".")[:2])  # torch.cuda or torch.backends
        is_own = str(getattr(value, "__module__", "")).startswith(home)
        if not callable(value) or is_exception or not (is_own or reason):
            return value
        return Absent(f"{self.__name__}.{name}", reason)

    def __setattr__(self, name: str, value: Any) -> None:
        switch = self.__dict__["_counterpart"].switches.get(name)
        if switch is None:
            super().__setattr__(name, value)
        elif is_pytorch(sys._getframe(1)):
            setattr(self.__dict__["_real"], name, value)
        else:
            switch.set(value)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_real"])


# --- torch.cuda


def _views_of_cuda() -> Iterator[View]:
    """Views of torch.cuda and all of its public submodules."""
    cuda = torch.cuda
    found = [("", cuda)]
    for one in pkgutil.walk_packages(cuda.__path__, "torch.cuda."):
        path = one.name.removeprefix("torch.cuda.")
        if not any(part.startswith("_") for part in path.split(".")):
            found.append((path, importlib.import_module(one.name)))
    for path, module in found:
        yield View(module, _counterpart_of_cuda(path))


def _counterpart_of_cuda(path: str) -> Counterpart:
    """What the names of torch.cuda (path "") or a submodule such as "memory" or "amp.grad_scaler" mean."""
    whole = path.partition(".")[0]  # torch.bp.amp is a single module
    module = getattr(accelerator, whole, None) if path else accelerator
    return Counterpart(
        module=module if isinstance(module, types.ModuleType) else None,
        renamed=names.RENAMED,
        values={},
        switches={},
        absent=lambda name: names.why_absent(f"{path}.{name}" if path else name),
    )


# --- torch.backends


def _both(name: str) -> Switch:
    """A switch of cuDNN, which computes convolutions and recurrent layers. bp has one switch for each."""

    def assign(value: bool) -> None:
        setattr(backends.conv, name, value)
        setattr(backends.rnn, name, value)

    return Switch(lambda: getattr(backends.conv, name) and getattr(backends.rnn, name), assign)


def _of_conv(name: str) -> Switch:
    """A switch of cuDNN that recurrent layers do not have: their products have those of `matmul`."""
    return Switch(lambda: getattr(backends.conv, name), lambda value: setattr(backends.conv, name, value))


def _keep_deterministic(value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"torch.backends.cudnn.deterministic must be a bool, but got {value!r}")


_CUDNN_SWITCHES = {
    "allow_tf32": _of_conv("allow_tf32"),
    "benchmark": _both("benchmark"),
    "deterministic": Switch(lambda: True, _keep_deterministic),  # convolutions always are
    "enabled": _both("enabled"),
    "fp32_precision": _of_conv("fp32_precision"),
}


def _set_cudnn_flags(**flags: bool | None) -> dict[str, Any]:
    """Sets the switches of torch.backends.cudnn that are not None, and returns the previous values of these."""
    given = {name: value for name, value in flags.items() if value is not None}
    before = {name: _CUDNN_SWITCHES[name].get() for name in given}
    for name, value in given.items():
        _CUDNN_SWITCHES[name].set(value)
    return before


@contextmanager
def _cudnn_flags(
    enabled: bool = False,
    benchmark: bool = False,
    benchmark_limit: int | None = None,
    deterministic: bool = False,
    allow_tf32: bool | None = None,
) -> Iterator[None]:
    """torch.backends.cudnn.flags. There is nothing to limit: all candidates are timed."""
    before = _set_cudnn_flags(enabled=enabled, benchmark=benchmark, deterministic=deterministic, allow_tf32=allow_tf32)
    try:
        yield
    finally:
        _set_cudnn_flags(**before)


def _views_of_backends() -> Iterator[View]:
    kept = {name: getattr(torch.backends.cuda, name) for name in names.KEPT_BACKENDS}
    yield View(
        torch.backends.cuda,
        Counterpart(backends, names.RENAMED_BACKENDS, kept, {}, lambda name: names.ABSENT_BACKENDS.get(name, "")),
    )
    values = {
        "conv": backends.conv,
        "flags": _cudnn_flags,
        "is_acceptable": backends.is_acceptable,
        "is_available": backends.is_available,
        "rnn": backends.rnn,
        "version": lambda: None,  # as without cuDNN
    }
    yield View(
        torch.backends.cudnn,
        Counterpart(None, {}, values, _CUDNN_SWITCHES, lambda name: "torch.backends.bp has the switches of bp"),
    )


def install() -> None:
    """Replaces the modules, as attributes and for import statements."""
    for view in [*_views_of_cuda(), *_views_of_backends()]:
        sys.modules[view.__name__] = view
        parent, _, name = view.__name__.rpartition(".")
        setattr(sys.modules[parent], name, view)
