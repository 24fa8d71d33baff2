"""`torch.backends.bp`: the choice of libraries for heavy operators, like torch.backends.cuda and torch.backends.cudnn.

The settings apply to all bp devices and all threads, and immediately: changing one invalidates recorded plans.
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
    "cudnn_sdp_enabled",
    "enable_cudnn_sdp",
    "enable_flash_sdp",
    "enable_math_sdp",
    "enable_overrideable_sdp",
    "fft",
    "fft_plan_cache",
    "flash_sdp_enabled",
    "fp16_bf16_reduction_math_sdp_allowed",
    "inductor_backend",
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
    """Return whether PyTorch supports the device type bp. Always True, as Backplane provides this module."""
    return True


def is_available() -> bool:
    """Return whether there is a bp device. Does not initialize torch.bp, and raises no error for malformed settings."""
    return torch.bp.is_available()  # type: ignore[attr-defined, no-any-return]


def version() -> str:
    """Return Backplane's version, such as "0.1.0"."""
    return VERSION


def preferred_blas_library(backend: str | None = None) -> str:
    """Return the preferred library for matrix products, or set it.

    If the preferred library does not support a device, dtype or call, the one with the least expected cost is used.

    Args:
        backend: the library to prefer from now on; None changes nothing.

            - "default": the library with the least expected cost.
            - "host": PyTorch's CPU library, on devices whose memory the host can access.
            - "driver": a library that the device's driver provides: CLBlast on OpenCL, cuBLAS and cuBLASLt on CUDA. If
              no driver provides one, a warning is given.
            - "cublas", "cublaslt", "clblast": this library, if a device has it.
            - "generated": Backplane's kernels.

    Returns:
        The preferred library.

    Raises:
        ValueError: `backend` is none of these.
    """
    if backend is not None:
        _prefer("products", backend, "matmul")
    return preferences.preferred("products").rpartition("/")[2]


def preferred_attention_library(backend: str | None = None) -> str:
    """Return the preferred library for attention and its gradients, or set it.

    Calls that the preferred library does not support, for example with dropout, use another one. If none supports
    a call, PyTorch composes it of products and a softmax (see `can_use_flash_attention`).

    Args:
        backend: the library to prefer from now on; None changes nothing. "default": the library with the least expected
            cost. "host": PyTorch's CPU library, on processors whose memory the host can access. "driver": a library
            that the device's driver provides: cuDNN on CUDA. If no driver provides one, a warning is given.
            "generated": Backplane's kernels.

    Returns:
        The preferred library.

    Raises:
        ValueError: `backend` is none of these.
    """
    if backend is not None:
        _prefer("attention", backend, "attention")
    return preferences.preferred("attention")


def preferred_fft_library(backend: str | None = None) -> str:
    """Return the preferred library for Fourier transforms, or set it.

    Args:
        backend: as for `preferred_blas_library`. The driver's library is VkFFT on OpenCL, if pyvkfft is installed, and
            cuFFT on CUDA.

    Returns:
        The preferred library.

    Raises:
        ValueError: `backend` is not a library for Fourier transforms.
    """
    if backend is not None:
        _prefer("transforms", backend, "fft")
    return preferences.preferred("transforms")


# How to install the libraries of Backplane's drivers, by family.
_INSTALL = {
    "matmul": "CLBlast for OpenCL (apt-get install libclblast1) or cuBLAS for CUDA (pip install nvidia-cublas)",
    "fft": "VkFFT for OpenCL (pip install pyvkfft) or cuFFT for CUDA (pip install nvidia-cufft)",
    "attention": "cuDNN for CUDA (pip install nvidia-cudnn-cu13)",
    "lu": "cuSOLVER for CUDA (pip install nvidia-cusolver)",
}


def _prefer(candidates: str, backend: str, family: str) -> None:
    """Prefers a library. Warns if it is "driver" and no device's driver has one for this family."""
    devices = map(drivers.device, range(torch.accelerator.device_count()))
    keys = [*dict.fromkeys(library.key for one in devices for library, _ in routines_of(one, family))]
    preferences.prefer(candidates, backend, keys if candidates == "products" else ())
    if backend == "driver" and not keys:
        warnings.warn(
            f"no driver provides a library for {FAMILIES[family].computes}, so other libraries compute them; install "
            f"{_INSTALL[family]}",
            stacklevel=3,
        )


def preferred_linalg_library(backend: str | None = None) -> str:
    """Return the preferred library for decompositions and solvers of linear systems, or set it.

    Args:
        backend: the library to prefer from now on; None changes nothing.

            - "default": "driver" on GPUs if it computes the call, else "host".
            - "host": PyTorch's CPU library. If the host cannot access the memory, operands and results are copied.
            - "driver": the libraries that the device's driver provides: cuSOLVER on CUDA, and cuBLAS for triangular
              systems. If no driver provides one for decompositions, a warning is given.

    Returns:
        The preferred library.

    Raises:
        ValueError: `backend` is none of these.
    """
    if backend is not None:
        _prefer("decompositions and solvers", backend, "lu")
    return preferences.preferred("decompositions and solvers")


def inductor_backend(backend: str | None = None) -> str:
    """Return in which language torch.compile generates kernels for bp devices, or set it.

    Functions that are compiled already keep their kernels; `torch.compiler.reset()` removes them.

    Args:
        backend: the language of kernels from now on; None changes nothing. "dialect": the language of the device, such
            as CUDA C++ or OpenCL C. "triton": Triton. It must be installed, and the devices must be those of the CUDA
            driver; otherwise compiling raises a RuntimeError that says what is missing.

    Returns:
        "dialect", which is the default, or "triton". The environment variable TORCH_BACKPLANE_INDUCTOR_BACKEND sets
        another default.

    Raises:
        ValueError: `backend` is none of these.
    """
    if backend is not None:
        preferences.set_inductor_backend(backend)
    return preferences.inductor_backend()


def blas_workspace_size(size: int | None = None) -> int:
    """Return the workspace limit of matrix products and convolutions, or set it.

    Kernels use workspace to divide long sums of few results among groups, and to process several images of a
    convolution at a time. A candidate that needs more than the limit is skipped (see `without_workspace`). The last
    candidate takes what it needs even beyond the limit: for the parts of complex products, and for one image of a
    convolution.

    Args:
        size: the limit in bytes for each operator call, from now on; None changes nothing.

    Returns:
        The limit in bytes; sys.maxsize if there is none, which is the default. The environment variable
        TORCH_BACKPLANE_WORKSPACE sets another default, such as 8MiB.

    Raises:
        TypeError: `size` is not an int.
        ValueError: `size` is negative.
        SettingError: the environment variable is not a size.
    """
    if size is not None:
        preferences.set_workspace(size)
    limit = preferences.workspace()
    return preferences.NO_LIMIT if limit is None else limit


def without_workspace() -> dict[str, int]:
    """Return how often planners skipped candidates that need more than `blas_workspace_size()`.

    Returns:
        Counts by candidate, such as {"convolutions: generated/winograd": 1}. Replays of plans do not count.
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
            raise TypeError(f"{name} must be a bool, or (allow_reduced_precision, allow_splitk), but got {value!r}")
        preferences.divide(dtype, preferences.Divided(*given))

    return property(read, None if split_k else write)


def _fp32_precision(family: str) -> property:
    return property(
        lambda _: preferences.float32_precision(family),
        lambda _, value: preferences.set_float32_precision(family, value),
    )


def _allow_tf32(family: str) -> property:
    def write(_: object, value: bool) -> None:
        preferences.set_float32_precision(family, "tf32" if _bool("allow_tf32", value) else "ieee")

    return property(lambda _: preferences.float32_precision(family) == "tf32", write)


class _Products:
    """Settings of matrix products, with the names of torch.backends.cuda.matmul.

    Attributes:
        allow_fp16_reduced_precision_reduction, allow_bf16_reduced_precision_reduction: whether kernels that divide a
            sum among groups can round the partial sums to float16 or bfloat16. Unlike in CUDA, the default is False:
            partial sums are kept in float32 together with their rounding errors. Can also be set to a pair of bools,
            (allow_reduced_precision, allow_splitk); the second says whether sums can be divided. If not, libraries
            that can divide sums are not used.
        allow_fp16_reduced_precision_reduction_split_k, allow_bf16_reduced_precision_reduction_split_k: whether sums can
            be divided. Read-only.
        fp32_precision: "tf32" if libraries can round the operands of float32 and complex64 products to TF32, which has
            10 bits after the point, else "ieee". Until it is set, and after "none" was, it is what PyTorch allows
            CUDA: torch.set_float32_matmul_precision("high") allows it. cuBLAS uses it on GPUs of compute capability
            8.0 or later. Generated kernels compute float32 in float32. For products that the host computes, use
            torch.backends.mkldnn.matmul.fp32_precision.
        allow_tf32: whether `fp32_precision` is "tf32".
        allow_fp16_accumulation: whether libraries can accumulate float16 products in float16; False by default. cuBLAS
            does. Generated kernels accumulate in float32.
    """

    __slots__ = ()
    allow_fp16_reduced_precision_reduction = _of_sums(torch.float16, False)
    allow_fp16_reduced_precision_reduction_split_k = _of_sums(torch.float16, True)
    allow_bf16_reduced_precision_reduction = _of_sums(torch.bfloat16, False)
    allow_bf16_reduced_precision_reduction_split_k = _of_sums(torch.bfloat16, True)

    fp32_precision = _fp32_precision("products")
    allow_tf32 = _allow_tf32("products")
    allow_fp16_accumulation = property(
        lambda _: preferences.half_sums(),
        lambda _, value: preferences.allow_half_sums(_bool("allow_fp16_accumulation", value)),
    )


matmul = _Products()


def is_acceptable(tensor: torch.Tensor) -> bool:
    """Return whether a library can compute convolutions of a tensor, given `conv.enabled`, its device and its dtype.

    False for tensors on other devices, and on host devices, which always use PyTorch's CPU kernels.

    Args:
        tensor: the input of the convolution.
    """
    if tensor.device.type != "bp" or not conv.enabled or tensor.get_device() not in drivers.with_kernels():
        return False
    from torch_backplane.operators.convolution import convolutions  # only declared after discovery

    return convolutions.has_library_for(tensor)


class _Switches:
    """Settings of a family of operators, with the names of torch.backends.cudnn.

    Attributes:
        enabled: whether libraries can compute the operators. If False, generated kernels do.
        benchmark: whether the first call for a dtype, sizes and layout times all candidates, and later calls use the
            fastest. The results are not saved; `torch.bp.tunable` saves them in a file.
    """

    __slots__ = ("_family",)
    _family: str

    def __init__(self, family: str) -> None:
        object.__setattr__(self, "_family", family)

    @property
    def enabled(self) -> bool:
        """Whether libraries can compute the operators; True by default."""
        return preferences.preferred(self._family) != "generated"

    @enabled.setter
    def enabled(self, value: bool) -> None:
        preferences.prefer(self._family, self._library(_bool("enabled", value)))

    def _library(self, enabled: bool) -> str:
        """The family's preference for this value of `enabled`. A preferred library stays preferred."""
        if not enabled:
            return "generated"
        return preferences.preferred(self._family) if self.enabled else preferences.DEFAULT

    @property
    def benchmark(self) -> bool:
        """Whether candidates are timed at the first call; False by default."""
        return tuning.context.benchmarks(self._family)

    @benchmark.setter
    def benchmark(self, value: bool) -> None:
        tuning.context.benchmark(self._family, _bool("benchmark", value))

    @contextmanager
    def flags(self, enabled: bool = True, benchmark: bool = False) -> Iterator[None]:
        """Context manager that sets `enabled` and `benchmark`, and restores them on exit."""
        _bool("enabled", enabled)
        before, self.benchmark = self.benchmark, benchmark
        try:
            with preferences.preferring(self._family, self._library(enabled)):
                yield
        finally:
            self.benchmark = before


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, but got {value!r}")
    return value


class _Convolutions(_Switches):
    """Settings of convolutions.

    Attributes:
        fp32_precision: "tf32" if libraries can round the operands of float32 convolutions to TF32, else "ieee". Until
            it is set, and after "none" was, it is what PyTorch allows CUDA, which is "tf32" by default. cuDNN uses it
            on GPUs of compute capability 8.0 or later. Generated kernels compute float32 in float32.
        allow_tf32: whether `fp32_precision` is "tf32".
    """

    __slots__ = ()
    fp32_precision = _fp32_precision("convolutions")
    allow_tf32 = _allow_tf32("convolutions")

    @contextmanager
    def flags(self, enabled: bool = True, benchmark: bool = False, allow_tf32: bool | None = None) -> Iterator[None]:
        """Context manager that sets `enabled`, `benchmark` and `allow_tf32`, and restores them on exit.

        If `allow_tf32` is None, it is not changed.
        """
        given = None if allow_tf32 is None else "tf32" if _bool("allow_tf32", allow_tf32) else "ieee"
        with super().flags(enabled, benchmark), preferences.computing_float32_in("convolutions", given):
            yield


conv = _Convolutions("convolutions")
rnn = _Switches("recurrent layers")
fft = _Switches("transforms")


class _PlanCache:
    """The plan cache of the driver's library for Fourier transforms, like torch.backends.cuda.cufft_plan_cache.

    `fft_plan_cache` is the cache of the current device, `fft_plan_cache[device]` that of another one.

    Attributes:
        size: number of plans in the cache; 0 if the device has no such library.
        max_size: capacity of the cache; 0 if the device has no such library. If it is reduced, the least recently used
            plans are dropped.
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
        """The number of plans in the cache."""
        cache = self._cache()
        return 0 if cache is None else cache.size()

    @property
    def max_size(self) -> int:
        """The capacity of the cache, in plans."""
        cache = self._cache()
        return 0 if cache is None else cache.max_size()

    @max_size.setter
    def max_size(self, most: int) -> None:
        cache = self._cache()
        if isinstance(most, bool) or not isinstance(most, int):
            raise TypeError(f"max_size must be an int, but got {most!r}")
        if most < 0:
            raise ValueError(f"max_size must not be negative, but got {most}")
        if cache is None:
            raise RuntimeError("this device has no plan cache: its driver provides no library of Fourier transforms")
        cache.set_max_size(most)

    def clear(self) -> None:
        """Drop all plans of the cache."""
        cache = self._cache()
        if cache is not None:
            most = cache.max_size()
            cache.set_max_size(0)
            cache.set_max_size(most)


fft_plan_cache = _PlanCache()


VERBOSE_OFF, VERBOSE_ON = 0, 1


class verbose:
    """Context manager that prints each library call for bp devices, in all threads.

    For a CPU kernel it prints the operator, its operands and its duration. For a function of a driver's library it
    prints the numbers and the duration of the submission. Calls that execute after the context is left are not printed.

    Args:
        level: VERBOSE_ON or VERBOSE_OFF, as for torch.backends.mkl.verbose.

    Raises:
        ValueError: `level` is none of these.
    """

    def __init__(self, level: int = VERBOSE_ON) -> None:
        if level not in (VERBOSE_OFF, VERBOSE_ON):
            raise ValueError(f"level must be VERBOSE_OFF (0) or VERBOSE_ON (1), but got {level!r}")
        self.level = level

    def __enter__(self) -> verbose:
        self._before = _C.is_verbose()
        _C.set_verbose(self.level == VERBOSE_ON)
        return self

    def __exit__(self, *exception: object) -> None:
        _C.set_verbose(self._before)


# Attention. These are PyTorch's global switches; torch.nn.attention.sdpa_kernel sets them, too. A bp device has one
# fused attention, which SDPBackend.FLASH_ATTENTION, EFFICIENT_ATTENTION, CUDNN_ATTENTION and OVERRIDEABLE all select.
# A driver's library computes it only if CUDNN_ATTENTION is enabled.


def cudnn_sdp_enabled() -> bool:
    """Return whether a driver's library, such as cuDNN, may compute fused attention (SDPBackend.CUDNN_ATTENTION)."""
    return torch._C._get_cudnn_sdp_enabled()


def enable_cudnn_sdp(enabled: bool) -> None:
    """Enable or disable fused attention under the name SDPBackend.CUDNN_ATTENTION.

    Fused attention is used if one of the names that select it is enabled. If this one is disabled, no library of the
    driver computes it.

    Args:
        enabled: whether to enable it.
    """
    torch._C._set_sdp_use_cudnn(enabled)


def flash_sdp_enabled() -> bool:
    """Return whether fused attention is enabled under the name SDPBackend.FLASH_ATTENTION."""
    return torch._C._get_flash_sdp_enabled()


def enable_flash_sdp(enabled: bool) -> None:
    """Enable or disable fused attention under the name SDPBackend.FLASH_ATTENTION.

    Fused attention is used if one of the names that select it is enabled.

    Args:
        enabled: whether to enable it.
    """
    torch._C._set_sdp_use_flash(enabled)


def overrideable_sdp_enabled() -> bool:
    """Return whether fused attention is enabled under the name SDPBackend.OVERRIDEABLE."""
    return torch._C._get_overrideable_sdp_enabled()


def enable_overrideable_sdp(enabled: bool) -> None:
    """Enable or disable fused attention under the name SDPBackend.OVERRIDEABLE.

    Fused attention is used if one of the names that select it is enabled.

    Args:
        enabled: whether to enable it.
    """
    torch._C._set_sdp_use_overrideable(enabled)


def math_sdp_enabled() -> bool:
    """Return whether attention can be composed of products and a softmax (SDPBackend.MATH)."""
    return torch._C._get_math_sdp_enabled()


def enable_math_sdp(enabled: bool) -> None:
    """Enable or disable attention composed of products and a softmax (SDPBackend.MATH).

    If no enabled implementation supports a call, scaled_dot_product_attention raises a RuntimeError with the reason.

    Args:
        enabled: whether to enable it.
    """
    torch._C._set_sdp_use_math(enabled)


def fp16_bf16_reduction_math_sdp_allowed() -> bool:
    """Return whether composed attention can keep intermediate results in float16 or bfloat16."""
    return torch._C._get_math_sdp_allow_fp16_bf16_reduction()


def allow_fp16_bf16_reduction_math_sdp(enabled: bool) -> None:
    """Set whether composed attention can keep intermediate results in float16 or bfloat16.

    Args:
        enabled: whether to allow it.
    """
    torch._C._set_math_sdp_allow_fp16_bf16_reduction(enabled)


def is_flash_attention_available() -> bool:
    """Return whether there is a bp device, which fused attention needs."""
    return is_available()


def can_use_flash_attention(params: SDPAParams, debug: bool = False) -> bool:
    """Return whether fused attention computes a call of scaled_dot_product_attention.

    Args:
        params: SDPAParams(query, key, value, mask or None, dropout, is_causal, enable_gqa), with bp tensors.
        debug: whether to give a warning with the reason if it does not.

    Raises:
        ValueError: the query is not a bp tensor.
    """
    if params.query.device.type != "bp":
        raise ValueError(f"the query must be a bp tensor, but is on {params.query.device}")
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
