"""`torch.backends.bp`: what torch.backends.cuda and torch.backends.cudnn are for CUDA devices.

Switches hold for all devices and all threads. Changing one makes plans anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from torch_backplane import _C, drivers, preferences, tuning
from torch_backplane._release import VERSION
from torch_backplane.drivers.libraries import FAMILIES, PlanCache, routines_of

__all__ = [
    "VERBOSE_OFF",
    "VERBOSE_ON",
    "SDPAParams",
    "allow_fp16_bf16_reduction_math_sdp",
    "blas_workspace_size",
    "can_use_flash_attention",
    "conv",
    "enable_flash_sdp",
    "enable_math_sdp",
    "enable_overrideable_sdp",
    "fft",
    "fft_plan_cache",
    "flash_sdp_enabled",
    "fp16_bf16_reduction_math_sdp_allowed",
    "is_acceptable",
    "is_available",
    "is_built",
    "is_flash_attention_available",
    "math_sdp_enabled",
    "matmul",
    "overrideable_sdp_enabled",
    "preferred_attention_library",
    "preferred_blas_library",
    "preferred_fft_library",
    "preferred_linalg_library",
    "rnn",
    "verbose",
    "version",
    "without_workspace",
]

SDPAParams = torch._C._SDPAParams


def is_built() -> bool:
    """Whether this PyTorch has the device type bp: True, as this module is what brings it."""
    return True


def is_available() -> bool:
    """Whether there is a bp device. Does not raise, and does not initialize one."""
    return torch.bp.is_available()  # type: ignore[attr-defined, no-any-return]


def version() -> str:
    """Backplane's version, such as "0.1.0"."""
    return VERSION


def preferred_blas_library(backend: str | None = None) -> str:
    """The library that computes matrix products, and with `backend` another one from now on.

    Args:
        backend: "default"; "host", PyTorch's own for the CPU, on devices whose memory it sees; "driver", one for the
            hardware, which the device's driver brings (CLBlast on OpenCL, where it is installed); "generated", our
            kernels. A device that the library cannot serve, or a dtype that it has not, goes on with the next one;
            a warning says so where no driver has brought one.

    Raises:
        ValueError: another name.
    """
    if backend is not None:
        _prefer("products", backend, "matmul", "CLBlast", "apt-get install libclblast1")
    return preferences.preferred("products")


def preferred_attention_library(backend: str | None = None) -> str:
    """The library that computes attention and its gradients, and with `backend` another one from now on.

    Args:
        backend: "default"; "host", PyTorch's own for the CPU, on processors whose memory it sees; "generated", our
            kernels. What the library does not take goes on with the other one, such as dropout; and what neither takes
            PyTorch composes (`can_use_flash_attention`).

    Raises:
        ValueError: another name.
    """
    if backend is not None:
        preferences.prefer("attention", backend)
    return preferences.preferred("attention")


def preferred_fft_library(backend: str | None = None) -> str:
    """The library that computes Fourier transforms, and with `backend` another one from now on.

    Args:
        backend: as of `preferred_blas_library`; the driver's on OpenCL is VkFFT, where pyvkfft is installed.

    Raises:
        ValueError: another name.
    """
    if backend is not None:
        _prefer("transforms", backend, "fft", "VkFFT", "pip install pyvkfft")
    return preferences.preferred("transforms")


def _prefer(candidates: str, backend: str, family: str, opencls: str, install: str) -> None:
    """Prefers a library, with a warning where it is the driver's and no device has one of this family."""
    preferences.prefer(candidates, backend)
    devices = map(drivers.device, range(torch.accelerator.device_count()))
    if backend == "driver" and not any(True for one in devices for _ in routines_of(one, family)):
        warnings.warn(
            f"no driver has brought a library of {FAMILIES[family].computes}, so others compute them; "
            f"{opencls}, for OpenCL: {install}",
            stacklevel=3,
        )


def preferred_linalg_library(backend: str | None = None) -> str:
    """The library of decompositions, solvers and eigenvalues, and with `backend` another one from now on.

    Args:
        backend: "default" or "host", which is PyTorch's own for the CPU: there is no other one yet.

    Raises:
        ValueError: another name.
    """
    if backend is not None:
        preferences.prefer("linear algebra", backend)
    return preferences.preferred("linear algebra")


def blas_workspace_size(size: int | None = None) -> int:
    """Bytes that a product or a convolution may take beside its operands and results, and with `size` others from now
    on; sys.maxsize where nothing limits it. Long sums of few results are divided where there is room for the parts, and
    patches of images are made of as many images at a time as there is room for, of one at least. A candidate that
    needs more leaves the call to the next one (`without_workspace`), and the last one takes what it needs: products of
    complex numbers, which kernels compute by their parts, and patches of one image. The first value is that of
    TORCH_BACKPLANE_WORKSPACE, such as 8MiB.

    Raises:
        TypeError, ValueError: `size` is no number of bytes.
        SettingError: the environment variable is not a size.
    """
    if size is not None:
        preferences.set_workspace(size)
    limit = preferences.workspace()
    return preferences.NO_LIMIT if limit is None else limit


def without_workspace() -> dict[str, int]:
    """How often planners have left out candidates that need more than `blas_workspace_size()`, by their names, such as
    {"convolutions: generated/winograd": 1}. Plans that are replayed do not count.
    """
    return preferences.without_room()


def _of_sums(dtype: torch.dtype, split_k: bool) -> property:
    name = {torch.float16: "allow_fp16", torch.bfloat16: "allow_bf16"}[dtype] + "_reduced_precision_reduction"

    def read(_: object) -> bool:
        found = preferences.divided(dtype)
        return found.divides if split_k else found.reduced

    def write(_: object, value: bool | Sequence[bool]) -> None:
        given = [value] if isinstance(value, bool) else list(value) if isinstance(value, (list, tuple)) else []
        if len(given) not in (1, 2) or not all(isinstance(one, bool) for one in given):
            raise TypeError(f"{name} is a bool, or two (allow_reduced_precision, allow_splitk), and got {value!r}")
        preferences.divide(dtype, preferences.Divided(*given))

    return property(read, None if split_k else write)


def _never(name: str) -> property:
    def write(_: object, value: bool) -> None:
        if _bool(name, value):
            _changes_nothing(name, value)

    return property(lambda _: False, write)


def _changes_nothing(name: str, value: object) -> None:
    warnings.warn(f"matmul.{name} = {value!r} changes nothing: kernels add up products in float32", stacklevel=3)


class _Products:
    """Switches of matrix products, named as torch.backends.cuda.matmul's.

    allow_fp16_reduced_precision_reduction, allow_bf16_reduced_precision_reduction: whether kernels may round the parts
        of sums that are divided among groups to float16 and bfloat16. Unlike with CUDA they may not unless one says so:
        parts are kept in float32 with what their additions have lost. Also set to two bools, the second of which says
        whether sums may be divided, which `…_split_k` tells.
    fp32_precision, allow_tf32, allow_fp16_accumulation: "ieee", False and False. Kernels compute products of float32
        in float32, and add up others in it, so that another value is a warning, and changes nothing. Where the host
        computes, PyTorch's own switch for it holds: torch.backends.mkldnn.matmul.fp32_precision.
    """

    __slots__ = ()
    allow_fp16_reduced_precision_reduction = _of_sums(torch.float16, False)
    allow_fp16_reduced_precision_reduction_split_k = _of_sums(torch.float16, True)
    allow_bf16_reduced_precision_reduction = _of_sums(torch.bfloat16, False)
    allow_bf16_reduced_precision_reduction_split_k = _of_sums(torch.bfloat16, True)

    @property
    def fp32_precision(self) -> str:
        return "ieee"

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        accepted = ("none", "ieee", "tf32", "bf16")
        if value not in accepted:
            raise ValueError(f"fp32_precision is one of {', '.join(accepted)}, and got {value!r}")
        if value not in ("none", "ieee"):
            _changes_nothing("fp32_precision", value)

    allow_tf32 = _never("allow_tf32")
    allow_fp16_accumulation = _never("allow_fp16_accumulation")


matmul = _Products()


def is_acceptable(tensor: torch.Tensor) -> bool:
    """Whether a library may compute convolutions of this tensor, as `conv.enabled` and its device and dtype are; else
    kernels do. False of tensors elsewhere, and on host devices, where all is PyTorch's for the CPU.
    """
    if tensor.device.type != "bp" or not conv.enabled or tensor.get_device() not in drivers.with_kernels():
        return False
    from torch_backplane.operators.convolution import convolutions  # declared once a device is found

    return convolutions.has_library_for(tensor)


class _Switches:
    """Those of a family of operators, as torch.backends.cudnn's. Both are bools.

    enabled: whether libraries may compute them, where they take a call; else kernels do.
    benchmark: whether libraries and kernels are timed at the first call of a dtype, sizes and layout, and the quickest
        computes from then on. It is forgotten with the process: `torch.bp.tunable` writes it down.
    """

    __slots__ = ("_family",)
    _family: str

    def __init__(self, family: str) -> None:
        object.__setattr__(self, "_family", family)

    @property
    def enabled(self) -> bool:
        return preferences.preferred(self._family) != "generated"

    @enabled.setter
    def enabled(self, value: bool) -> None:
        preferences.prefer(self._family, self._library(_bool("enabled", value)))

    def _library(self, enabled: bool) -> str:
        """The one that is preferred stays so, if it is one."""
        if not enabled:
            return "generated"
        return preferences.preferred(self._family) if self.enabled else preferences.DEFAULT

    @property
    def benchmark(self) -> bool:
        return tuning.context.benchmarks(self._family)

    @benchmark.setter
    def benchmark(self, value: bool) -> None:
        tuning.context.benchmark(self._family, _bool("benchmark", value))

    @contextmanager
    def flags(self, enabled: bool = True, benchmark: bool = False) -> Iterator[None]:
        """With these switches, and as they were afterwards."""
        _bool("enabled", enabled)
        before, self.benchmark = self.benchmark, benchmark
        try:
            with preferences.preferring(self._family, self._library(enabled)):
                yield
        finally:
            self.benchmark = before


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is a bool, and got {value!r}")
    return value


conv = _Switches("convolutions")
rnn = _Switches("recurrent layers")
fft = _Switches("transforms")


class _PlanCache:
    """What the library of transforms that a device's driver has brought keeps for calls like those before, as
    torch.backends.cuda.cufft_plan_cache: that of the current device, and `fft_plan_cache[device]`.

    size: how many plans are kept; 0 where there is no library.
    max_size: how many may be. With fewer than there are, those go that were not used for the longest time.
    """

    def __init__(self, device: torch.device | int | str | None = None) -> None:
        self._device = device

    def __getitem__(self, device: torch.device | int | str) -> _PlanCache:
        return _PlanCache(device)

    def _cache(self) -> PlanCache | None:
        index = torch._utils._get_device_index(self._device, optional=True)
        caches = (routine.cache for _, routine in routines_of(drivers.device(index), "fft"))
        return next((one for one in caches if one is not None), None)

    @property
    def size(self) -> int:
        cache = self._cache()
        return 0 if cache is None else cache.size()

    @property
    def max_size(self) -> int:
        cache = self._cache()
        return 0 if cache is None else cache.max_size()

    @max_size.setter
    def max_size(self, most: int) -> None:
        cache = self._cache()
        if isinstance(most, bool) or not isinstance(most, int):
            raise TypeError(f"max_size is a whole number of plans, and got {most!r}")
        if most < 0:
            raise ValueError(f"max_size is 0 or more, and got {most}")
        if cache is None:
            raise RuntimeError("this device has no library of Fourier transforms, whose plans could be kept")
        cache.set_max_size(most)

    def clear(self) -> None:
        """Have all of them go."""
        cache = self._cache()
        if cache is not None:
            most = cache.max_size()
            cache.set_max_size(0)
            cache.set_max_size(most)


fft_plan_cache = _PlanCache()


VERBOSE_OFF, VERBOSE_ON = 0, 1


class verbose:
    """A context in which each call of a library for a bp device is printed as it is made: the host's operator with its
    operands and how long it took, the function of a driver's library with its numbers and how long it took to give to
    the queue. It holds for all threads. Calls that the queue has not come to when the context is left are not printed.

    Args:
        level: VERBOSE_ON or VERBOSE_OFF, as for torch.backends.mkl.verbose.

    Raises:
        ValueError: another level.
    """

    def __init__(self, level: int = VERBOSE_ON) -> None:
        if level not in (VERBOSE_OFF, VERBOSE_ON):
            raise ValueError(f"level is VERBOSE_OFF (0) or VERBOSE_ON (1), and got {level!r}")
        self.level = level

    def __enter__(self) -> verbose:
        self._before = _C.is_verbose()
        _C.set_verbose(self.level == VERBOSE_ON)
        return self

    def __exit__(self, *exception: object) -> None:
        _C.set_verbose(self._before)


# Attention. PyTorch's switches are global; torch.nn.attention.sdpa_kernel sets them, too. A bp device has one fused
# attention, which SDPBackend.FLASH_ATTENTION, EFFICIENT_ATTENTION, CUDNN_ATTENTION and OVERRIDEABLE all select.


def flash_sdp_enabled() -> bool:
    """Whether attention may be fused, as SDPBackend.FLASH_ATTENTION."""
    return torch._C._get_flash_sdp_enabled()


def enable_flash_sdp(enabled: bool) -> None:
    """Allow or forbid it."""
    torch._C._set_sdp_use_flash(enabled)


def overrideable_sdp_enabled() -> bool:
    """Whether attention may be fused, as SDPBackend.OVERRIDEABLE."""
    return torch._C._get_overrideable_sdp_enabled()


def enable_overrideable_sdp(enabled: bool) -> None:
    """Allow or forbid it."""
    torch._C._set_sdp_use_overrideable(enabled)


def math_sdp_enabled() -> bool:
    """Whether attention may be composed of products and a softmax, as SDPBackend.MATH."""
    return torch._C._get_math_sdp_enabled()


def enable_math_sdp(enabled: bool) -> None:
    """Allow or forbid it. Where nothing is left, scaled_dot_product_attention raises a RuntimeError that says why."""
    torch._C._set_sdp_use_math(enabled)


def fp16_bf16_reduction_math_sdp_allowed() -> bool:
    """Whether composed attention may keep half precision between its steps."""
    return torch._C._get_math_sdp_allow_fp16_bf16_reduction()


def allow_fp16_bf16_reduction_math_sdp(enabled: bool) -> None:
    """Allow or forbid it."""
    torch._C._set_math_sdp_allow_fp16_bf16_reduction(enabled)


def is_flash_attention_available() -> bool:
    """Whether there is a device that `can_use_flash_attention` may be True of."""
    return is_available()


def can_use_flash_attention(params: SDPAParams, debug: bool = False) -> bool:
    """Whether attention of these arguments is fused.

    Args:
        params: SDPAParams(query, key, value, mask or None, dropout, is_causal, enable_gqa), of bp tensors.
        debug: warn of the reason where it is not.

    Raises:
        ValueError: the query is no bp tensor.
    """
    if params.query.device.type != "bp":
        raise ValueError(f"this is for bp tensors, and got a query of {params.query.device}")
    reason = _C.why_attention_is_composed(
        params.query,
        params.key,
        params.value,
        params.attn_mask,
        params.dropout,
        params.enable_gqa,
    )
    if reason and debug:
        warnings.warn(f"attention is not fused: {reason}", stacklevel=2)
    return not reason
