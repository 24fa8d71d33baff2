"""Accepted differences from PyTorch's CPU, each with its reason. They are reported separately and fail nothing.

Entries match as narrowly as possible, so that any other difference is still a finding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from torch_backplane.conformance import ties


class Accepted(NamedTuple):
    """Accepts findings of some kinds for some operators, dtypes and calls."""

    operators: str  # regular expression for the whole name
    kinds: tuple[str, ...]
    reason: str
    dtypes: tuple[str, ...] = ()  # empty: any
    calls: str = ""  # regular expression for the whole description of the call: a number, a form or a variant
    words: str = ""  # regular expression searched for in the message

    def covers(self, operator: str, dtype: str, kind: str, call: str, message: str) -> bool:
        return (
            kind in self.kinds
            and (not self.dtypes or dtype in self.dtypes)
            and re.fullmatch(self.operators, operator) is not None
            and (not self.calls or re.fullmatch(self.calls, call) is not None)
            and (not self.words or re.search(self.words, message) is not None)
        )


def reason(table: Sequence[Accepted], operator: str, dtype: str, kind: str, call: str, message: str) -> str | None:
    """Return the reason why a finding is accepted, or None if it is not."""
    return next((one.reason for one in table if one.covers(operator, dtype, kind, call, message)), None)


_HALF = ("float16", "bfloat16")
_FILLED = "as on CUDA, which fills a tensor and refuses numbers out of the dtype's range"
_INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
_NOT_EXACT = (*_HALF, "float32", "float64", "complex64")

# For the database. The call is a variant (check.py).
DATABASE: tuple[Accepted, ...] = (
    Accepted(
        r"native_layer_norm|native_batch_norm|_native_batch_norm_legit|_batch_norm_with_update", ("dtype",),
        "as on CUDA, where statistics of half-precision inputs are float32", _HALF,
        words=r"^result\[[12]\]: torch\.float32, expected torch\.b?float16$",
    ),
)  # fmt: skip

# For `--numbers`. The call is "parameter=number", followed by " with empty tensors" if they are empty.
NUMBERS: tuple[Accepted, ...] = (
    Accepted(
        r"_add_relu.*", ("no error",), "only the CPU has a kernel, and it fails an internal assertion for uint8",
        ("uint8",), words="INTERNAL ASSERT",
    ),
    Accepted(
        r"_add_relu.*", ("values",), "the CPU returns 0 where the sum is NaN; here the result is NaN",
        ("float32", "float64"), r"\w+=nan",
    ),
    Accepted(
        r"addr_?(\.out)?", ("no error",),
        "as on CUDA, which composes the result of other operators (`math_addr`) and accepts every number",
        _NOT_EXACT, words="without overflow",
    ),
    Accepted(
        r"addmv_?(\.out)?", ("no error",), "as on CUDA, where alpha and beta of a float16 product are float32",
        ("float16",), words="without overflow",
    ),
    Accepted(
        r"arange\.start.*", ("values",), "as on CUDA, which rounds start + i·step once", _HALF,
    ),
    Accepted(
        r"(_foreach_)?(sub|subtract|rsub)_?\..*", ("error", "values"),
        "PyTorch negates alpha: -2³¹ fits int32 where 2³¹ does not, and -(-2⁶³) is -2⁶³", ("int32", *_NOT_EXACT),
        r"alpha=(2147483648|-9223372036854775808).*",
    ),
    Accepted(
        r"(_foreach_)?pow_?\..*", ("values",),
        "as on CUDA, which converts the exponent to float32 first: 1e-50 becomes 0, and 0 to the power of 0 is 1",
        ("bool", "float32"), r"exponent=1e-50",
    ),
    Accepted(
        r"(_foreach_)?pow\.Scalar\w*", ("values",), "powers beyond complex64; rounding decides which parts are inf",
        ("complex64",), r"self=-?1e\+20",
    ),
    Accepted(
        r"hardtanh_?(\.out)?", ("error",), "the CPU converts limits for integers to int64 first: 255.9 becomes 255",
        ("uint8",), r"\w+=255\.9.*",
    ),
    Accepted(
        r"histc(\.out)?", ("no error",), "as on CUDA, which converts the limits to the tensor's integer dtype first",
        _INTEGERS, words="max must be larger than min",
    ),
    Accepted(r"scalar_tensor(\.out)?", ("error",), _FILLED, _HALF),
    Accepted(
        r"special_zeta\.self_scalar.*", ("values",), "for huge s, the CPU's sum of powers of q is NaN instead of 0",
        words=r"nan",
    ),
    Accepted(
        r"linspace(\.out)?", ("values",), "the CPU returns infinity or NaN, depending on its vectorized code",
        ("complex64",), r"(start|end)=-?inf.*",
    ),
    Accepted(
        r"multi_margin_loss(\.out)?", ("values",), "for zero rows, the CPU returns uninitialized memory",
        calls=r".* with empty tensors",
    ),
)  # fmt: skip

# For `--forms`. The operator is an overload, and the call is the name of a form (forms.py).
FORMS: tuple[Accepted, ...] = (
    Accepted(r"scalar_tensor(\.out)?", ("error",), _FILLED, words="without overflow"),
    Accepted(r"addbmm_", ("error",), "the CPU resizes self in place", words="doesn't match the broadcast shape"),
    Accepted(
        r"(kthvalue|topk)(\..*)?", ("values",), ties.REASON,
        words=r"result\[1\]",
    ),
    Accepted(r"topk(\..*)?", ("values",), "the order of unsorted results is unspecified", calls=r"sorted = False"),
    Accepted(
        r"_(log_)?softmax_backward_data(\.out)?", ("no error",),
        "as on CUDA, where softmax can convert half precision to float32, and its backward converts back",
        calls=r"input_dtype = torch\.float16",
    ),
    Accepted(
        r"(adaptive_)?max_pool\dd(_with_indices)?_backward(\.grad_input)?", ("values",),
        "as max_pool2d on CUDA, which looks up an index only in windows that contain it; these indices are outside",
        calls=r"(self|kernel_size|stride|padding|dilation) (wider|larger|negative|zero)",
    ),
    Accepted(
        r"polygamma(\.out)?", ("values",),
        "the CPU rounds πx to float32 (or float64) before the sine, so it has no poles and is inexact near them",
        calls=r"(self|all float32) as int(16|64)|out as float64",
    ),
    Accepted(
        r"special_(bessel_[jy][01]|airy_ai)(\.out)?", ("values",),
        "the CPU is inexact: compared with the integral, J0(-5.01) is off by 4e-7 on the CPU, and by 1e-16 here",
        calls=r"(x|self|out|all float32) as float64",
    ),
    Accepted(
        r"special_bessel_[jy][01](\.out)?", ("values",), "beyond 10^6, float32 cannot represent the phase of the wave",
        calls=r"all float32 as uint32",  # negative numbers become large ones
    ),
    Accepted(
        r"native_(layer|batch)_norm|_native_batch_norm_legit(\.no_stats)?|_batch_norm_with_update", ("dtype",),
        "as on CUDA, where statistics of half-precision inputs are float32",
        calls=r"all float32 as float16", words=r"^result\[[12]\]: torch\.float32, expected torch\.float16$",
    ),
    Accepted(
        r"(_native_batch_norm_legit|_batch_norm_with_update)(\..*)?", ("values",),
        "the CPU and CUDA overwrite the input with running statistics before they read it; here it is read first",
        calls=r"running_(mean|var) (begins with|is one element after) input",
    ),
    Accepted(
        r"segment_reduce", ("values",), "the CPU's kernel, which also runs here, reads out of bounds",
        calls=r"data with (an extra dimension|two extra dimensions)",
    ),
    Accepted(
        r"_embedding_bag(_dense|_per_sample_weights)?_backward", ("values",),
        "the CPU's kernel, which also runs here, reads out of bounds",
        calls=r"grad shorter|offsets (longer|wider|shorter|empty)",
    ),
    Accepted(
        r"lu_unpack\.out", ("mutation",), "the input is overwritten while it is read, in an unspecified order",
        calls=r"out begins with LU_data",
    ),
    Accepted(
        r"baddbmm_", ("values",), "an operand is overwritten while it is read, in an unspecified order",
        calls=r"self (begins with|is one element after) batch[12]",
    ),
    Accepted(
        r"grid_sampler_[23]d(_backward)?", ("values",), "for an invalid mode, the CPU writes arbitrary values or none",
        calls=r"(interpolation|padding)_mode = (-1|-3|100)",
    ),
    Accepted(
        r"gelu_backward(\.grad_input)?", ("no error",),
        "the CPU's oneDNN path neither promotes nor broadcasts; CUDA and the CPU's other path do",
        words=r"itensor_view_from_dense|primitive descriptor",
    ),
    Accepted(
        r"binary_cross_entropy_backward(\.grad_input)?", ("shape",),
        "for one element, the CPU squeezes its inputs and does not resize the result",
        calls=r"(grad_output|target|self|out) (with (an extra dimension|two extra dimensions)|empty|flat( with gaps)?)",
    ),
    Accepted(
        r"nansum(\.out)?", ("no error",), "as on CUDA, which sums complex numbers",
        calls=r"(self|all float32) as complex64",
    ),
    Accepted(
        r"_fft_r2c(\.out)?", ("no error",), "as on CUDA, which transforms half precision",
        calls=r"(self|all float32) as float16",
    ),
    Accepted(
        r"_fft_(r2c|c2r|c2c)(\.out)?", ("no error",), "zero transforms, for which MKL reports an error",
        calls=r"(self|out) (shorter|empty)", words="MKL FFT error",
    ),
    Accepted(
        r"rrelu_with_noise(_|\.out)?", ("error",), "the CPU writes to an out of another dtype as if it had self's",
        calls=r"out as \w+",
    ),
    Accepted(
        r"rrelu_with_noise\.out", ("shape",), "the CPU neither resizes out nor checks that it is large enough",
        calls=r"out (with an extra dimension|without dimensions|too (large|small)|in two rows)",
    ),
)  # fmt: skip
