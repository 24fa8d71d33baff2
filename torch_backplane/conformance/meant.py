"""Differences from PyTorch's CPU that are meant, each with its reason: the sweeps count them apart from what is wrong.

An entry says as narrowly as it can where it holds, so that whatever else differs is a finding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from torch_backplane.conformance import ties


class Meant(NamedTuple):
    """The operators, dtypes and calls of which these kinds of findings are meant, and why."""

    operators: str  # a regular expression for the whole name
    kinds: tuple[str, ...]
    reason: str
    dtypes: tuple[str, ...] = ()  # any
    calls: str = ""  # a regular expression for what is special about the call: a number, a form, a variant
    words: str = ""  # one that is found in the message

    def covers(self, operator: str, dtype: str, kind: str, call: str, message: str) -> bool:
        return (
            kind in self.kinds
            and (not self.dtypes or dtype in self.dtypes)
            and re.fullmatch(self.operators, operator) is not None
            and (not self.calls or re.fullmatch(self.calls, call) is not None)
            and (not self.words or re.search(self.words, message) is not None)
        )


def reason(table: Sequence[Meant], operator: str, dtype: str, kind: str, call: str, message: str) -> str | None:
    """Why a finding is meant; None where it is not."""
    return next((one.reason for one in table if one.covers(operator, dtype, kind, call, message)), None)


_HALF = ("float16", "bfloat16")
_FILLED = "as torch.cuda, which fills a tensor: what is beyond a dtype is refused"
_INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
_NOT_EXACT = (*_HALF, "float32", "float64", "complex64")

# Of the database, where the call is a variant.
DATABASE: tuple[Meant, ...] = (
    Meant(
        r"native_layer_norm|native_batch_norm|_native_batch_norm_legit|_batch_norm_with_update", ("dtype",),
        "as torch.cuda, whose statistics of half precision are float32", _HALF,
        words=r"^result\[[12]\]: torch\.float32, expected torch\.b?float16$",
    ),
)  # fmt: skip

# Of `--numbers`, where the call is «parameter=number», followed by « of no elements» where tensors have none.
NUMBERS: tuple[Meant, ...] = (
    Meant(
        r"_add_relu.*", ("no error",), "PyTorch's CPU, the only one to have it, asserts that bytes are int8",
        ("uint8",), words="INTERNAL ASSERT",
    ),
    Meant(
        r"_add_relu.*", ("values",), "the CPU's relu of a sum that is not a number is 0; here it stays one",
        ("float32", "float64"), r"\w+=nan",
    ),
    Meant(
        r"addr_?(\.out)?", ("no error",),
        "as torch.cuda, which multiplies and adds tensors here (`math_addr`) and refuses no number",
        _NOT_EXACT, words="without overflow",
    ),
    Meant(
        r"addmv_?(\.out)?", ("no error",), "as torch.cuda, whose numbers of a float16 product are float32",
        ("float16",), words="without overflow",
    ),
    Meant(
        r"arange\.start.*", ("values",), "as torch.cuda, which rounds start + i·step once", _HALF,
    ),
    Meant(
        r"(_foreach_)?(sub|subtract|rsub)_?\..*", ("error", "values"),
        "PyTorch takes -alpha: 2³¹, no int32, is one then, and -2⁶³ stays as it is", ("int32", *_NOT_EXACT),
        r"alpha=(2147483648|-9223372036854775808).*",
    ),
    Meant(
        r"(_foreach_)?pow_?\..*", ("values",),
        "as torch.cuda, which makes an exponent of 1e-50 float32's 0 first: 0 to the power of it is 1",
        ("bool", "float32"), r"exponent=1e-50",
    ),
    Meant(
        r"(_foreach_)?pow\.Scalar\w*", ("values",), "powers beyond complex64, whose parts are infinite by rounding",
        ("complex64",), r"self=-?1e\+20",
    ),
    Meant(
        r"hardtanh_?(\.out)?", ("error",), "the CPU makes the limits of integers int64 first, so 255.9 is 255",
        ("uint8",), r"\w+=255\.9.*",
    ),
    Meant(
        r"histc(\.out)?", ("no error",), "as torch.cuda, where the limits are made the tensor's integers first",
        _INTEGERS, words="max must be larger than min",
    ),
    Meant(r"scalar_tensor(\.out)?", ("error",), _FILLED, _HALF),
    Meant(
        r"special_zeta\.self_scalar.*", ("values",), "the CPU's sum of q to the power of -s is NaN for huge s, not 0",
        words=r"nan",
    ),
    Meant(
        r"linspace(\.out)?", ("values",), "the CPU has infinity or NaN by what its vectors make of infinity times 0",
        ("complex64",), r"(start|end)=-?inf.*",
    ),
    Meant(
        r"multi_margin_loss(\.out)?", ("values",), "of no rows the CPU returns memory that nothing was written to",
        calls=r".* of no elements",
    ),
)  # fmt: skip

# Of `--forms`, where the operator is an overload and the call a form.
FORMS: tuple[Meant, ...] = (
    Meant(r"scalar_tensor(\.out)?", ("error",), _FILLED, words="without overflow"),
    Meant(r"addbmm_", ("error",), "the CPU resizes self in place", words="doesn't match the broadcast shape"),
    Meant(
        r"(kthvalue|topk)(\..*)?", ("values",), ties.REASON,
        words=r"result\[1\]",
    ),
    Meant(r"topk(\..*)?", ("values",), "the order is left open", calls=r"sorted = False"),
    Meant(
        r"_(log_)?softmax_backward_data(\.out)?", ("no error",),
        "as torch.cuda, whose softmax makes float32 of half precision, and its gradients of float32's",
        calls=r"input_dtype = torch\.float16",
    ),
    Meant(
        r"(adaptive_)?max_pool\dd(_with_indices)?_backward(\.grad_input)?", ("values",),
        "as torch.cuda's max_pool2d, which looks for an index in the windows that it can be of; these are of others",
        calls=r"(self|kernel_size|stride|padding|dilation) (wider|larger|negative|zero)",
    ),
    Meant(
        r"polygamma(\.out)?", ("values",),
        "the CPU rounds πx to float32 (or float64) before it takes the sine: no poles, and few digits near them",
        calls=r"(self|all float32) as int(16|64)|out as float64",
    ),
    Meant(
        r"special_(bessel_[jy][01]|airy_ai)(\.out)?", ("values",),
        "the CPU has few digits: by its integral, J0(-5.01) is what it is here to 1e-16, and 4e-7 off there",
        calls=r"(x|self|out|all float32) as float64",
    ),
    Meant(
        r"special_bessel_[jy][01](\.out)?", ("values",), "of numbers beyond 10^6, where float32 has no phase of a wave",
        calls=r"all float32 as uint32",  # of negative numbers
    ),
    Meant(
        r"native_(layer|batch)_norm|_native_batch_norm_legit(\.no_stats)?|_batch_norm_with_update", ("dtype",),
        "as torch.cuda, whose statistics of half precision are float32",
        calls=r"all float32 as float16", words=r"^result\[[12]\]: torch\.float32, expected torch\.float16$",
    ),
    Meant(
        r"(_native_batch_norm_legit|_batch_norm_with_update)(\..*)?", ("values",),
        "the CPU, as torch.cuda, normalizes what its running statistics were written over; here that is read first",
        calls=r"running_(mean|var) (begins with|is one behind) input",
    ),
    Meant(
        r"segment_reduce", ("values",), "the CPU's kernel, which is used here, reads beyond its memory",
        calls=r"data with (another dimension|two more)",
    ),
    Meant(
        r"_embedding_bag(_dense|_per_sample_weights)?_backward", ("values",),
        "the CPU's kernel, which is used here, reads beyond its memory",
        calls=r"grad shorter|offsets (longer|wider|shorter|of nothing)",
    ),
    Meant(
        r"lu_unpack\.out", ("mutation",), "the input is written over while it is read, in no promised order",
        calls=r"out begins with LU_data",
    ),
    Meant(
        r"baddbmm_", ("values",), "an operand is written over while it is read, in no promised order",
        calls=r"self (begins with|is one behind) batch[12]",
    ),
    Meant(
        r"grid_sampler_[23]d(_backward)?", ("values",), "the CPU writes anything, or nothing, in a mode there is not",
        calls=r"(interpolation|padding)_mode = (-1|-3|100)",
    ),
    Meant(
        r"gelu_backward(\.grad_input)?", ("no error",),
        "the CPU's way by oneDNN neither promotes nor broadcasts; torch.cuda's, and the CPU's other one, do",
        words=r"itensor_view_from_dense|primitive descriptor",
    ),
    Meant(
        r"binary_cross_entropy_backward(\.grad_input)?", ("shape",),
        "of one element, the CPU squeezes what it is given, and resizes no result",
        calls=r"(grad_output|target|self|out) (with another dimension|with two more|of nothing|flat|flat in gaps)",
    ),
    Meant(
        r"nansum(\.out)?", ("no error",), "as torch.cuda, which sums complex numbers",
        calls=r"(self|all float32) as complex64",
    ),
    Meant(
        r"_fft_r2c(\.out)?", ("no error",), "as torch.cuda, which transforms half precision",
        calls=r"(self|all float32) as float16",
    ),
    Meant(
        r"_fft_(r2c|c2r|c2c)(\.out)?", ("no error",), "no transforms, of which MKL makes an error",
        calls=r"(self|out) (shorter|of nothing)", words="MKL FFT error",
    ),
    Meant(
        r"rrelu_with_noise(_|\.out)?", ("error",), "the CPU writes to another dtype as if it were self's",
        calls=r"out as \w+",
    ),
    Meant(
        r"rrelu_with_noise\.out", ("shape",), "the CPU does not resize a result, nor look whether it is large enough",
        calls=r"out (with another dimension|without dimensions|too (large|small)|in two rows)",
    ),
)  # fmt: skip
