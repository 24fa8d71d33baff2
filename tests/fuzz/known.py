"""Known differences from the CPU: accepted ones, which are not findings, and bugs that are not fixed yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fuzz import last_call
from fuzz.last_call import LastCall


@dataclass(frozen=True)
class Known:
    """Matches findings by regular expressions for key and message, and by a condition on the last call (`where`)."""

    key: str
    message: str
    reason: str
    where: Callable[[LastCall], bool] = lambda call: True

    def covers(self, key: str, message: str, call: LastCall) -> bool:
        return bool(re.search(self.key, key) and re.search(self.message, message)) and self.where(call)


# Accepted differences, which are counted by reason.
ACCEPTED: list[Known] = [
    Known(
        r"^error (RuntimeError|text): ",
        r"cannot resize variables that require grad",
        "PyTorch resizes out= directly on CPU and CUDA, but with resize_ on other devices, which raises this error",
    ),
    Known(
        r"^error text: |^error IndexError for RuntimeError: (index_add|index_select|index_put)",
        r"index -?\d+ is out of bounds for dimension with size \d+; the CPU: (Index|Runtime)Error: .*out of ",
        "the error comes from a kernel, which reports operator and index, but not the dimension",
    ),
    Known(r"^error text: ", r"ZeroDivisionError: \w+: an integer was divided by zero", "it also names the operator"),
    Known(
        r"^error text: v?dot out=$",
        r"1D tensors expected, but got 1D and \dD tensors; the CPU: RuntimeError: 1D tensors expected, but got 0D and ",
        "out= is an operand: PyTorch resizes it before it checks the operands, so its elements are lost",
    ),
    Known(
        r"^no error: native_group_norm$",
        r"Expected X.is_contiguous\(memory_format\)",
        "torch.cuda accepts all strides",
    ),
    Known(
        r"^no error: histc( out=)?$",
        r"value cannot be converted to type \w+ without overflow",
        "as on CUDA, which converts the limits to the tensor's integer dtype first",
    ),
    Known(
        r"^no error: (index_select|index_reduce)$",
        r"INDICES element is out of DATA bounds|index out of range in self",
        "no elements: torch.cuda checks no index either",
    ),
    Known(
        r"^error RuntimeError: [\w.]+ out=$",
        r"more than one element of the written-to tensor refers to a single memory location",
        "PyTorch writes every element of an expanded out=; which value is written last is unspecified",
    ),
    Known(
        r"^no error: [\w.]+ out=$",
        r"some elements of the input tensor and the written-to tensor refer to a single memory location",
        "bp reads all operands before it writes out=, or there are no elements: the result is that without out=",
    ),
    Known(
        r"^error RuntimeError: \w+ out=$",
        r"shapes cannot be multiplied|size mismatch",
        "out= is an operand and is resized before it is read",
    ),
    Known(
        r"^(argument )?values: special\.\w*bessel_\w+( out=)?$",
        r"\de-0[4-9], expected -?\d\.\d+e-0[4-9] .*torch.float32",
        "the functions oscillate; float32 cannot represent the phase of arguments above 10^6",
    ),
    Known(
        r"^values: nn.functional.soft_margin_loss( backward)?$",
        r"expected (inf|nan) .*torch.float16",
        "PyTorch's intermediate results overflow in half precision; bp computes in float32",
    ),
    Known(r"^shape: unique$", r"\(\d+,[ \d,]*\), expected \(\d+,", "along a dimension: rows with NaN have no order"),
    Known(
        r"^values: nn.functional.binary_cross_entropy_with_logits$",
        r"torch.float(16|32)",
        "mixed half precision and float32: the CPU rounds intermediate results to half precision",
    ),
    Known(
        r"^error text: nn.functional.binary_cross_entropy$",
        r"all elements of (input|target) should be",
        "both are out of range, and the CPU reports the other one",
    ),
    Known(
        r"^error text: (ldexp_?|frexp|where|histc|fmod|abs|v?dot)( out=)?$",
        r"(can't be cast|more than one element|(the )?same dtype|but expected Float|inconsistent tensor size)",
        "two errors apply and the other one is reported, or the message contains the operator's name",
    ),
    Known(
        r"^layout: (nn\.functional\.(max_pool1d|logsigmoid)|pad)$",
        r"",
        "the CPU has a separate kernel; the strides are those of torch.cuda",
    ),
    Known(
        r"^layout: ",
        r"^\w+: strides ",
        "the CPU first copies operands of another dtype, so expanded operands lose their strides; torch.cuda converts "
        "elements when it reads them",
        last_call.converts_an_expanded,
    ),
    Known(
        r"^layout: ",
        r"^\w+: strides ",
        "results of foreach operators keep the operands' strides for sizes of 1, as in torch.cuda; the CPU's strides "
        "differ there, and other operators choose a layout by them",
        last_call.of_results_of_lists_with_a_size_of_one,
    ),
    Known(
        r"^((argument|other) )?values: special\.\w+_polynomial_\w+( out=)?$",
        r"",
        "for NaN the CPU returns an uninitialized value",
        last_call.of_nan,
    ),
    Known(
        r"^values: .*backward$",
        r"expected nan at ",
        "gradients of elu and hardswish at NaN: the CPU returns NaN for most elements and numbers for the last ones",
        last_call.after_elu_or_hardswish,
    ),
    Known(
        r"^values: (torch\.|masked\.)?prod( out=)?$",
        r"nan, expected|expected nan",
        "zeros, and factors whose product overflows: the order decides, which on the CPU also depends on the layout",
        last_call.is_infinite_beside_zeros,
    ),
    Known(r"^values: unique$", r"nan.* at \(\d+, \d", "rows with NaN have no order"),
    Known(
        r"^values: interpolate$",
        r"(nan|inf)",
        "an infinite neighbour with weight 0: bp uses the formula of torch.cuda",
    ),
    Known(
        r"^dtype: (native_batch_norm|_native_batch_norm_legit)$",
        r"torch.float32, expected torch.(b?float16)",
        "empty statistics have the dtype of the sums, as in torch.cuda",
    ),
    Known(
        r"^dtype: native_layer_norm$",
        r"torch.float32, expected torch.(bfloat16|float16)",
        "statistics have the dtype of the sums, as in torch.cuda",
    ),
    Known(
        r"^(no error|error text|error NotImplementedError for RuntimeError): ",
        r"(ctx != nullptr|materialize_fn_ == nullptr) INTERNAL ASSERT FAILED",
        "an assertion in PyTorch, for a lazy clone that out= has resized",
    ),
    Known(
        r"^values: (nn\.functional\.)?(native_)?(batch|group|instance|layer)_norm( backward)?$",
        r"inf.* expected|expected (-?inf|nan)",
        "PyTorch multiplies mean and weight, one of which is infinite, and subtracts infinities",
    ),
    Known(
        r"^no error: view_dtype$",
        r"self.stride\(-1\) must be 1 to view",
        "a tensor without elements, whose strides come from PyTorch's Python meta functions",
    ),
    Known(
        r"^values: (F|nn\.functional)\.(elu|celu|selu|relu6|hardtanh|hardswish|hardshrink|softshrink|pad) backward$",
        r"nan|: -?0\.0, expected|expected -?0\.0 ",
        "NaN: the CPU's vectorized loop passes on no gradient; its scalar loop does, as torch.cuda does",
    ),
    Known(
        r"^crash \(status -\d+\): (triu|tril) out=$",
        r"",
        "PyTorch's CPU kernel, which host devices run, writes out of bounds of batches with gaps",
        last_call.writes_batches_with_gaps_on_the_host,
    ),
    Known(
        r"^((argument|other) )?values: special.airy_ai( out=)?$",
        r"(-?\d+\.\d{4})\d*, expected \1",
        "below -2, the CPU's results have only 8 correct digits",
    ),
    Known(
        r"^values: special.airy_ai( out=)?$",
        r"torch.float32",
        "the function oscillates; float32 cannot represent the phase of arguments below -1000",
        last_call.far_below_zero,
    ),
    Known(
        r"^(argument )?values: graph (double )?backward$",
        r"expected -?\d{10}|expected -?\d\.\d+e\+|: -?\d{10}|: -?\d\.\d+e\+",
        "F.normalize of zeros multiplies small differences by 10^12",
        last_call.normalizes_zeros,
    ),
    Known(
        r"^((argument|other) )?values: (linalg\.vector_norm|norm)( out=)?$",
        r"torch.float32",
        "for an order near 0, the root multiplies rounding errors by 1/order, and the CPU does not always take it",
        last_call.of_an_order_near_zero,
    ),
    Known(
        r"^argument values: logsumexp out=$",
        r"(-?\d+\.\d)\d*, expected \1.*torch.float(32|64)",
        "PyTorch rounds the exponentials of 16-bit inputs to their dtype, but sums in another dtype",
        last_call.of_halves,
    ),
    Known(
        r"^values: digamma backward$",
        r"(-?\d+\.\d)\d*, expected \1.*torch.float32",
        "the CPU is inaccurate near the poles; there is no float64 reference for values that need the graph",
    ),
    Known(
        r"^((argument|other) )?values: special.(modified_)?bessel_\w+( out=)?$",
        r"(-?\d+\.\d{4})\d*, expected \1",
        "results near a zero of the function, and for large arguments, have few correct digits",
    ),
    Known(
        r"^error text: histc$",
        r"bins must be > 0; the CPU: .*bins must be > 0",
        "integers, for which the CPU has no kernel",
    ),
    Known(
        r"^no error: nn\.functional\.nll_loss backward$",
        r"grad_input must be contiguous",
        "the CPU allocates grad_input with the strides of the input, and then rejects it",
    ),
    Known(
        r"^error text: mv out=$",
        r"addmv input tensors must have the same dtype",
        "out= is checked against the result of the call without it, which has another dtype",
    ),
    Known(
        r"^no error: index_put$",
        r"masked_fill_ only supports boolean masks, but got mask with dtype unsigned char",
        "x[mask] = number uses masked_fill_ if the number is on the CPU, where PyTorch puts it only for CPU and CUDA",
    ),
    Known(
        r"^values: unique$",
        r"\d+, expected \d+ at .*torch.int64",
        "several NaN are different elements, whose order is unspecified",
        last_call.several_nans,
    ),
    Known(
        r"^error text: ",
        r"RuntimeError: unsupported operation: (more than one element|some elements) of",
        "two errors apply, and the other one is reported",
    ),
    Known(
        r"^error text: ",
        r"setStorage: sizes (.*), strides .* out of bounds.*; the CPU: .*setStorage: sizes \1, strides",
        "the error comes from a CPU call on zeros with only the tensor's elements: offsets and storage sizes differ",
    ),
    Known(
        r"^error text: \w+ out=$",
        r"requires? grad.*; the CPU: .*requires grad",
        "two errors apply, and the other one is reported",
    ),
    Known(
        r"^error (text|RuntimeError for \w+): [\w.]+ out=$",
        r"^.*RuntimeError: unsupported operation: some elements of the input tensor.*; the CPU",
        "an operand that would have to be resized raises another message",
    ),
    Known(
        r"^no error: ",
        r"Trying to resize storage that is not resizable",
        "memory shared with NumPy, which only CPU tensors have",
    ),
    Known(
        r"^no error: isin( out=)?$",
        r"view size is not compatible with input tensor's size and stride",
        "the CPU does not support test elements with gaps",
    ),
    Known(
        r"^((argument |other )?(values|layout|shape)|no error|error \w+ for \w+|error text): [\w.]+ out=$",
        r"",
        "one tensor for several results: the order of the writes is unspecified",
        last_call.one_tensor_for_all_results,
    ),
    Known(
        r"^(argument |other )?values: ([\w.]+ out=|\w+_|index_put)$",
        r"",
        "writes to a tensor with overlapping elements: which value is written last is unspecified",
        last_call.written_overlaps_itself,
    ),
    Known(
        r"^error RuntimeError: (fill_|fill_diagonal_)$",
        r"value cannot be converted to type c10::Half without overflow",
        "one element, which PyTorch fills on the CPU without this check; torch.cuda has the check",
        last_call.of_one_element,
    ),
    Known(
        r"^error RuntimeError: index_put$",
        r"value cannot be converted to type c10::Half without overflow",
        "the number first becomes a tensor of one element, which PyTorch fills on the CPU without this check",
    ),
    Known(
        r"^no error: ",
        r"needs_dynamic_casting<.*INTERNAL ASSERT FAILED",
        "an assertion in PyTorch's CPU kernel",
    ),
    Known(
        r"^error RuntimeError: [\w.]+ out=$",
        r"unsupported operation: some elements of the input tensor",
        "out= is an operand with another shape: PyTorch resizes it and continues with the changed operand",
    ),
    Known(
        r"^error RuntimeError: overlap torch\.(sum|mean|prod|norm|amax|amin|any|all)$",
        r"unsupported operation: more than one element of the written-to tensor",
        "PyTorch writes all results to one memory location",
    ),
]

# Bugs that `make fuzz` reports and `make test` ignores. Remove an entry with its fix.
OPEN: list[Known] = []


def reason_for(key: str, message: str, lines: Sequence[str], on: str) -> str | None:
    """Returns why the difference is accepted, or None if it is a finding.

    Args:
        lines: the program; its last line shows the difference.
        on: the driver of the devices.
    """
    call = LastCall(lines, on)
    return next((known.reason for known in ACCEPTED if known.covers(key, message, call)), None)


def is_open(key: str, message: str, lines: Sequence[str], on: str) -> bool:
    call = LastCall(lines, on)
    return any(known.covers(key, message, call) for known in OPEN)
