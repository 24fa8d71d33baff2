"""Differences that are known: those that are meant, which are no findings, and those that wait to be mended."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fuzz import last_call
from fuzz.last_call import LastCall


@dataclass(frozen=True)
class Known:
    """Findings whose key and message these expressions match, of last calls of which `where` holds."""

    key: str
    message: str
    reason: str
    where: Callable[[LastCall], bool] = lambda call: True

    def covers(self, key: str, message: str, call: LastCall) -> bool:
        return bool(re.search(self.key, key) and re.search(self.message, message)) and self.where(call)


# Counted under their reasons.
MEANT: list[Known] = [
    Known(
        r"^error (RuntimeError|text): ",
        r"cannot resize variables that require grad",
        "PyTorch resizes out= of the CPU and CUDA directly, and of other devices by resize_, which refuses this",
    ),
    Known(
        r"^error text: |^error IndexError for RuntimeError: (index_add|index_select|index_put)",
        r"index -?\d+ is out of bounds for dimension with size \d+; the CPU: (Index|Runtime)Error: .*out of ",
        "found by a kernel, which tells operator and index, and does not know the call's dimension",
    ),
    Known(r"^error text: ", r"ZeroDivisionError: \w+: an integer was divided by zero", "the operator is named, too"),
    Known(
        r"^error text: v?dot out=$",
        r"1D tensors expected, but got 1D and \dD tensors; the CPU: RuntimeError: 1D tensors expected, but got 0D and ",
        "an out= that is an operand: PyTorch resizes it before it looks at operands, which loses what was in it",
    ),
    Known(
        r"^no error: native_group_norm$",
        r"Expected X.is_contiguous\(memory_format\)",
        "torch.cuda takes any strides",
    ),
    Known(
        r"^no error: (index_select|index_reduce)$",
        r"INDICES element is out of DATA bounds|index out of range in self",
        "of nothing, where torch.cuda looks at no index",
    ),
    Known(
        r"^error RuntimeError: [\w.]+ out=$",
        r"more than one element of the written-to tensor refers to a single memory location",
        "PyTorch writes to an expanded tensor of the right shape as often as it has elements: which is last is open",
    ),
    Known(
        r"^no error: [\w.]+ out=$",
        r"some elements of the input tensor and the written-to tensor refer to a single memory location",
        "everything is read before it is written, or there is nothing: computed as without out=",
    ),
    Known(
        r"^error RuntimeError: \w+ out=$",
        r"shapes cannot be multiplied|size mismatch",
        "out= is an operand, which is resized before it is read",
    ),
    Known(
        r"^(argument )?values: special\.\w*bessel_\w+( out=)?$",
        r"\de-0[4-9], expected -?\d\.\d+e-0[4-9] .*torch.float32",
        "waves of numbers beyond 10^6, whose phase float32 does not hold",
    ),
    Known(
        r"^values: nn.functional.soft_margin_loss( backward)?$",
        r"expected (inf|nan) .*torch.float16",
        "PyTorch's steps overflow in half precision; here they are float32's",
    ),
    Known(r"^shape: unique$", r"\(\d+,[ \d,]*\), expected \(\d+,", "the same along a dimension"),
    Known(
        r"^values: nn.functional.binary_cross_entropy_with_logits$",
        r"torch.float(16|32)",
        "of half precision and float32, where the CPU rounds what comes between to half precision",
    ),
    Known(
        r"^error text: nn.functional.binary_cross_entropy$",
        r"all elements of (input|target) should be",
        "of both, and the CPU comes to one of them first",
    ),
    Known(
        r"^error text: (ldexp_?|frexp|where|histc|fmod|abs|v?dot)( out=)?$",
        r"(can't be cast|more than one element|(the )?same dtype|but expected Float|inconsistent tensor size)",
        "two things are wrong, and the other one is named, or the operator's name is in the text",
    ),
    Known(
        r"^layout: (nn\.functional\.(max_pool1d|logsigmoid)|pad)$",
        r"",
        "the CPU has a kernel of its own, and torch.cuda's result is laid out as bp's",
    ),
    Known(
        r"^layout: ",
        r"^\w+: strides ",
        "the CPU copies operands of another dtype first, and expanded ones lose their strides; torch.cuda converts "
        "what it reads",
        last_call.converts_an_expanded,
    ),
    Known(
        r"^layout: ",
        r"^\w+: strides ",
        "results of operators on lists have their operands' strides, as torch.cuda's, where a size is 1, too; the "
        "CPU's have others there, by which other operators choose a layout",
        last_call.of_results_of_lists_with_a_size_of_one,
    ),
    Known(
        r"^((argument|other) )?values: special\.\w+_polynomial_\w+( out=)?$",
        r"",
        "of NaN the CPU returns a number that it has not set",
        last_call.of_nan,
    ),
    Known(
        r"^values: .*backward$",
        r"expected nan at ",
        "gradients of elu and hardswish at NaN: of one tensor the CPU returns NaN for most and numbers for the last",
        last_call.after_elu_or_hardswish,
    ),
    Known(
        r"^values: (torch\.|masked\.)?prod( out=)?$",
        r"nan, expected|expected nan",
        "zeros, and numbers whose product is infinite: the order decides, on the CPU by the layout, too",
        last_call.is_infinite_beside_zeros,
    ),
    Known(r"^values: unique$", r"nan.* at \(\d+, \d", "rows with NaN have no order"),
    Known(
        r"^values: interpolate$",
        r"(nan|inf)",
        "where the weight of an infinite neighbour is 0: as torch.cuda's formula",
    ),
    Known(
        r"^dtype: (native_batch_norm|_native_batch_norm_legit)$",
        r"torch.float32, expected torch.(b?float16)",
        "empty statistics, in the dtype that sums are taken in, as torch.cuda's",
    ),
    Known(
        r"^dtype: native_layer_norm$",
        r"torch.float32, expected torch.(bfloat16|float16)",
        "the statistics, in the dtype that sums are taken in, as torch.cuda's",
    ),
    Known(
        r"^(no error|error text|error NotImplementedError for RuntimeError): ",
        r"(ctx != nullptr|materialize_fn_ == nullptr) INTERNAL ASSERT FAILED",
        "PyTorch, of a lazy clone that out= has resized",
    ),
    Known(
        r"^values: (nn\.functional\.)?(native_)?(batch|group|instance|layer)_norm( backward)?$",
        r"inf.* expected|expected (-?inf|nan)",
        "PyTorch multiplies the mean by the weight, either of which is infinite; differences of infinities",
    ),
    Known(
        r"^no error: view_dtype$",
        r"self.stride\(-1\) must be 1 to view",
        "of a tensor without elements, whose strides are those of PyTorch's meta functions in Python",
    ),
    Known(
        r"^values: (F|nn\.functional)\.(elu|celu|selu|relu6|hardtanh|hardswish|hardshrink|softshrink|pad) backward$",
        r"nan|: -?0\.0, expected|expected -?0\.0 ",
        "of NaN: the CPU's vectors pass no gradient on, and what is less than a vector does, as torch.cuda does",
    ),
    Known(
        r"^crash \(status -\d+\): (triu|tril) out=$",
        r"",
        "PyTorch's CPU kernel, which a host device runs, writes outside of matrices that are not one step apart",
        last_call.writes_batches_with_gaps_on_the_host,
    ),
    Known(
        r"^((argument|other) )?values: special.airy_ai( out=)?$",
        r"(-?\d+\.\d{4})\d*, expected \1",
        "below -2 the CPU's has 8 digits",
    ),
    Known(
        r"^values: special.airy_ai( out=)?$",
        r"torch.float32",
        "waves of numbers below -1000, whose phase float32 does not hold",
        last_call.far_below_zero,
    ),
    Known(
        r"^(argument )?values: graph (double )?backward$",
        r"expected -?\d{10}|expected -?\d\.\d+e\+|: -?\d{10}|: -?\d\.\d+e\+",
        "small differences of what F.normalize of zeros multiplies by 10^12",
        last_call.normalizes_zeros,
    ),
    Known(
        r"^((argument|other) )?values: (linalg\.vector_norm|norm)( out=)?$",
        r"torch.float32",
        "the root of an order near 0 multiplies roundings by one over it, and whether the CPU takes it varies",
        last_call.of_an_order_near_zero,
    ),
    Known(
        r"^argument values: logsumexp out=$",
        r"(-?\d+\.\d)\d*, expected \1.*torch.float(32|64)",
        "PyTorch rounds the exponentials of halves to halves, and the sum is another dtype's",
        last_call.of_halves,
    ),
    Known(
        r"^values: digamma backward$",
        r"(-?\d+\.\d)\d*, expected \1.*torch.float32",
        "the CPU loses digits near the poles; float64 cannot judge what needs its graph",
    ),
    Known(
        r"^((argument|other) )?values: special.(modified_)?bessel_\w+( out=)?$",
        r"(-?\d+\.\d{4})\d*, expected \1",
        "near a zero of the function its numbers have few digits, and those of large arguments as well",
    ),
    Known(
        r"^error text: histc$",
        r"bins must be > 0; the CPU: .*bins must be > 0",
        "of integers, which the CPU has no kernel for",
    ),
    Known(
        r"^no error: nn\.functional\.nll_loss backward$",
        r"grad_input must be contiguous",
        "the CPU makes its result like the input, and then refuses it",
    ),
    Known(
        r"^error text: mv out=$",
        r"addmv input tensors must have the same dtype",
        "out= is compared with the call without it, which has another dtype for its result",
    ),
    Known(
        r"^no error: index_put$",
        r"masked_fill_ only supports boolean masks, but got mask with dtype unsigned char",
        "x[mask] = number fills where the number is on the CPU, as PyTorch makes it for the CPU and for CUDA alone",
    ),
    Known(
        r"^values: unique$",
        r"\d+, expected \d+ at .*torch.int64",
        "of several NaN, each of which is another number, nothing says which one comes first",
        last_call.several_nans,
    ),
    Known(
        r"^error text: ",
        r"RuntimeError: unsupported operation: (more than one element|some elements) of",
        "two things are wrong, and the other one is named",
    ),
    Known(
        r"^error text: ",
        r"setStorage: sizes (.*), strides .* out of bounds.*; the CPU: .*setStorage: sizes \1, strides",
        "in zeros of the tensor's own elements, so that offsets and bytes of its memory are others",
    ),
    Known(
        r"^error text: \w+ out=$",
        r"requires? grad.*; the CPU: .*requires grad",
        "the same",
    ),
    Known(
        r"^error (text|RuntimeError for \w+): [\w.]+ out=$",
        r"^.*RuntimeError: unsupported operation: some elements of the input tensor.*; the CPU",
        "an operand that would have to be resized is refused in other words",
    ),
    Known(
        r"^no error: ",
        r"Trying to resize storage that is not resizable",
        "memory that NumPy knows, which is the CPU's alone",
    ),
    Known(
        r"^no error: isin( out=)?$",
        r"view size is not compatible with input tensor's size and stride",
        "the CPU takes no test elements that have gaps",
    ),
    Known(
        r"^((argument |other )?(values|layout|shape)|no error|error \w+ for \w+|error text): [\w.]+ out=$",
        r"",
        "one tensor for several results, in the order of which nothing is promised",
        last_call.one_tensor_for_all_results,
    ),
    Known(
        r"^(argument |other )?values: ([\w.]+ out=|\w+_|index_put)$",
        r"",
        "into a tensor with several elements in one place: which is last is open",
        last_call.written_overlaps_itself,
    ),
    Known(
        r"^error RuntimeError: (fill_|fill_diagonal_)$",
        r"value cannot be converted to type c10::Half without overflow",
        "one element, which PyTorch fills on the CPU by itself, without this check of its kernels; torch.cuda has it",
        last_call.of_one_element,
    ),
    Known(
        r"^error RuntimeError: index_put$",
        r"value cannot be converted to type c10::Half without overflow",
        "the number is made a tensor of one element first, of which the same holds",
    ),
    Known(
        r"^no error: ",
        r"needs_dynamic_casting<.*INTERNAL ASSERT FAILED",
        "an assertion of PyTorch's own, in its CPU kernel",
    ),
    Known(
        r"^error RuntimeError: [\w.]+ out=$",
        r"unsupported operation: some elements of the input tensor",
        "a result that is an operand of another shape: PyTorch resizes it, and goes on with what is left",
    ),
    Known(
        r"^error RuntimeError: overlap torch\.(sum|mean|prod|norm|amax|amin|any|all)$",
        r"unsupported operation: more than one element of the written-to tensor",
        "PyTorch writes all results to one place",
    ),
]

# Findings of the command; `make test` lets them pass, and nothing else. Whoever mends one takes it out.
OPEN: list[Known] = []


def reason_for(key: str, message: str, lines: Sequence[str], on: str) -> str | None:
    """Why this difference is meant, which the last of these lines makes on devices of a driver; None where it is a
    finding.
    """
    call = LastCall(lines, on)
    return next((known.reason for known in MEANT if known.covers(key, message, call)), None)


def is_open(key: str, message: str, lines: Sequence[str], on: str) -> bool:
    call = LastCall(lines, on)
    return any(known.covers(key, message, call) for known in OPEN)
