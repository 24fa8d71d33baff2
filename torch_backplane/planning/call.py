"""`Call`: one call of an operator, as passed to its planner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from torch_backplane import _C
from torch_backplane.planning import runtime, shape_rules, tracing
from torch_backplane.planning import strides as layouts
from torch_backplane.planning.registry import full_name
from torch_backplane.planning.symbols import Untraceable

# In these dtypes kernels compute bit for bit what PyTorch computes, so a kernel can convert its result as it stores it.
_STORED_AS_COMPUTED = (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int64, torch.bool)

# PyTorch computes these in the dtype of `out=`; they have no `dtype` argument.
_COMPUTED_AS_OUT = ("aten::var.correction_out", "aten::std.correction_out", "aten::logsumexp.out")

# Exceptions: if the `dtype` argument is None, PyTorch computes all other operators in the dtype of `out=`.
_DTYPE_BY_ARGUMENT = ("aten::linalg_vector_norm.out",)

# PyTorch's kernels reject an `out=` of another dtype. Their meta functions do not check it.
OF_ONE_DTYPE = (
    "aten::_batch_norm_with_update.out", "aten::_native_batch_norm_legit.no_stats_out",
    "aten::_native_batch_norm_legit.out", "aten::binary_cross_entropy.out",
    "aten::binary_cross_entropy_backward.grad_input", "aten::frexp.Tensor_out",
    "aten::hardswish.out", "aten::hardtanh.out", "aten::huber_loss_backward.out", "aten::kthvalue.values",
    "aten::log_sigmoid_backward.grad_input", "aten::log_sigmoid_forward.output", "aten::median.dim_values",
    "aten::nanmedian.dim_values", "aten::native_batch_norm.out", "aten::norm.dtype_out", "aten::norm.out",
    "aten::where.self_out",
)  # fmt: skip

# PyTorch resizes an `out=` of these without a warning.
_RESIZED_SILENTLY = (
    "aten::addbmm.out", "aten::arange.start_out", "aten::bernoulli.out", "aten::eye.m_out", "aten::eye.out",
    "aten::linspace.out", "aten::log_sigmoid_forward.output", "aten::logspace.out", "aten::multinomial.out",
    "aten::narrow_copy.out", "aten::range.out",
)  # fmt: skip

# PyTorch considers the gradient's strides last when it chooses the strides of the result.
_GRADIENT_LAST = (
    "aten::_prelu_kernel_backward", "aten::binary_cross_entropy_backward", "aten::huber_loss_backward",
    "aten::mse_loss_backward", "aten::smooth_l1_loss_backward",
)  # fmt: skip

# Their C++ meta functions select the first slice of a tensor, which fails if the tensor is empty.
_SELECTS = ("aten::index_add", "aten::index_reduce")

_OVERLAP = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
    "memory location. Please clone() the tensor before performing the operation."
)


class Form:
    """The facts about an overload that are the same for every call, read from its schema and its functional form's.

    Args:
        overload: the overload.
        functional: the functional form of its group; `overload` itself if that is functional.
    """

    def __init__(self, overload: OpOverload, functional: OpOverload) -> None:
        schema = overload._schema
        self.overload, self.functional = overload, functional
        self.name = full_name(overload)  # such as "aten::add.Tensor"
        self.functional_name = full_name(functional)
        self.kernel_name = functional._schema.name.partition("::")[2]
        self.argument_names = [one.name for one in functional._schema.arguments]
        self.has_structured_meta: bool = _C.has_structured_meta(self.name)
        self.is_functional = overload is functional
        self.rule, self.functional_rule = (shape_rules.rule_of(one, functional) for one in (overload, functional))
        arguments = list(enumerate(schema.arguments))
        self.outs = [position for position, one in arguments if one.is_out]
        self.inputs = [position for position, one in arguments if not one.is_out]
        self.input_names = [one.name for one in schema.arguments if not one.is_out]
        self.dtype_positions = [position for position, one in arguments if one.name == "dtype" and not one.is_out]
        self.is_in_place = overload is not functional and not self.outs
        # Some operators also write to arguments that they do not return, such as running statistics.
        aliases = [result.alias_info for result in schema.returns if result.alias_info is not None]
        returned = {alias for info in aliases for alias in info.before_set}
        self.written = self.outs or [
            position
            for position, argument in arguments
            if argument.alias_info is not None
            and argument.is_write
            and (not schema.returns or argument.alias_info.before_set & returned)
        ]


class Call:
    """A call of an overload.

    Args:
        form: the overload.
        arguments: in the order of the schema: bp tensors, `Number`s, lists of these, and plain values.
    """

    def __init__(self, form: Form, arguments: tuple[Any, ...]) -> None:
        self.form = form
        self.overload = form.overload
        self.functional = form.functional
        self.arguments = arguments
        self.inputs = self._inputs() if form.outs else arguments
        self._tensors: list[torch.Tensor] | None = None
        self._outputs: list[Any] | None = None
        self._stand_ins: list[tuple[torch.Tensor, torch.Tensor]] = []  # (computed to, given)
        self._metas: dict[str, tuple[Any, ...]] = {}

    def _inputs(self) -> tuple[Any, ...]:
        """The arguments without `out=`. As in PyTorch, a `dtype` argument that is None becomes the dtype of `out=`."""
        form = self.form
        found = list(self.arguments)
        if form.name not in _DTYPE_BY_ARGUMENT:
            for position in form.dtype_positions:
                if found[position] is None:
                    found[position] = found[form.outs[0]].dtype
        return tuple(found[position] for position in form.inputs)

    @property
    def name(self) -> str:
        """The overload's full name, such as "aten::add.Tensor"."""
        return self.form.name

    @property
    def written(self) -> list[torch.Tensor]:
        """The tensors that the caller passed for the results: `out=`, or the tensors that are changed in place."""
        return [self.arguments[position] for position in self.form.written]

    @property
    def is_in_place(self) -> bool:
        """Whether the overload is the in-place form of `functional`."""
        return self.form.is_in_place

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments, including those in lists, in order."""
        if self._tensors is None:
            self._tensors = tensors_of(self.arguments)
        return self._tensors

    @property
    def device(self) -> torch.device:
        """The tensors' device, or for factories the device argument; always with an index."""
        if self.tensors:
            return self.tensors[0].device
        named = None
        for value in flatten(self.arguments):
            if isinstance(value, torch.device):
                named = value
        index = named.index if named is not None else None
        return torch.device("bp", torch.accelerator.current_device_index() if index is None else index)

    def meta(self, overload: OpOverload | None = None) -> tuple[Any, ...]:
        """Computes the shapes, strides and dtypes of the results with PyTorch's meta kernel.

        Args:
            overload: the overload whose meta kernel to run; the call's own by default.

        Returns:
            A meta tensor for each result; None for a result that the operator does not make.

        Raises:
            Exception: PyTorch's own error, if the operator does not accept the arguments.
        """
        if overload is None:
            overload = self.overload
        name = self._name_of(overload)  # overloads are slow as keys
        found = self._metas.get(name)
        if found is None:
            found = self._metas[name] = self._run_meta(overload)
        return found

    def _name_of(self, overload: OpOverload) -> str:
        form = self.form
        if overload is form.overload:
            return form.name
        return form.functional_name if overload is form.functional else full_name(overload)

    def _run_meta(self, overload: OpOverload) -> tuple[Any, ...]:
        tracer = tracing.current()
        own = overload is self.overload
        values = self.arguments if own else self.inputs
        if tracer is not None:
            if own and self.form.outs and not self.form.is_functional:
                self._check_fits()
            if own and self.form.has_structured_meta:
                self._check_memory(tracer)
            ask = partial(self._meta_of, overload)
            return shape_rules.results(tracer, overload, self.functional, as_meta(values), ask)
        if self._is_structured(overload) or not (own or overload is self.functional):
            return self._meta_of(overload, _C.as_metas(values))
        return shape_rules.recalled(self.form, own, values, lambda: self._meta_of(overload, _C.as_metas(values)))

    def _check_fits(self) -> None:
        """Ends the trace if `out=` would be resized, before PyTorch's functions warn about it: the planner warns."""
        with _disable_current_modes():
            made = self._meta_of(self.functional, [shape_rules.concrete(value) for value in as_meta(self.inputs)])
        for given, one in zip(self.written, made, strict=False):
            if one is not None and [layouts.number_now(size) for size in given.shape] != list(one.shape):
                raise Untraceable("a tensor to write to has another shape than the result")

    def _check_memory(self, tracer: tracing.Tracer) -> None:
        """Ends the trace if tensors share memory in a way for which PyTorch's meta kernel may raise an error."""
        tensors = tensors_of(self.inputs)
        tracer.check_overlaps(self.written, tensors)
        apart = torch.Tag.pointwise not in self.functional.tags and not self.is_in_place
        if apart and any(same_storage(given, tensor) for given in self.written for tensor in tensors):
            raise Untraceable("a result shares memory with an operand")

    def _is_structured(self, overload: OpOverload) -> bool:
        if overload is self.overload:
            return self.form.has_structured_meta
        return _C.has_structured_meta(self._name_of(overload))

    def _meta_of(self, overload: OpOverload, values: Sequence[Any]) -> tuple[Any, ...]:
        name = self._name_of(overload)
        if self._is_structured(overload) and not (name.startswith(_SELECTS) and has_empty(values)):
            # Bypass the dispatcher: it calls Python meta functions, which accept more than PyTorch's kernels do.
            try:
                return _C.structured_meta(name, *values)
            except RuntimeError as error:
                if "on the same device" not in str(error):
                    raise
                # PyTorch's clamp rejects a zero-dimensional CPU tensor together with tensors of another device.
                return _C.structured_meta(name, *(without_device(value) for value in values))
        if overload is self.overload and self.form.outs:
            values = self._without_resized_results(values)
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for value, argument in zip(values, overload._schema.arguments, strict=True):
            if argument.kwarg_only:
                named[argument.name] = value
            else:
                positional.append(value)
        try:
            results = overload(*positional, **named)
        except Exception as error:
            numbers = (one for one in flatten(self.arguments) if isinstance(one, _C.Number))
            if isinstance(error, NotImplementedError) and any(one.tensor is not None for one in numbers):
                raise _C.RunOnCPU("no meta kernel accepts its zero-dimensional CPU tensor") from error
            # PyTorch's Python meta kernels have error messages of their own, and reject some calls that its other
            # kernels accept. The CPU kernel raises the right error.
            if name.startswith("aten::") and not isinstance(error, (NotImplementedError, _C.RunOnCPU)):
                raise _C.Refused(f"PyTorch's meta kernel raises: {error}") from error
            raise
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    def _without_resized_results(self, values: Sequence[Any]) -> list[Any]:
        """The values, with an empty tensor in place of each `out=` that will be resized.

        PyTorch's Python meta functions warn about a non-empty one, in other words than its kernels. If the overload is
        its own functional form, no other overload gives the shapes, and every `out=` is replaced.
        """
        values = list(values)
        if not self.form.is_functional and tracing.current() is not None:
            return values  # `_check_fits` has checked the shapes
        results = [None] * len(self.form.outs) if self.form.is_functional else self.meta(self.functional)
        for position, result in zip(self.form.outs, results, strict=False):
            given = values[position]
            if result is None or given.shape != result.shape:
                values[position] = given.new_empty(0)
        return values

    def outputs(
        self,
        like: Sequence[Any] | None = None,
        *,
        elementwise: bool = False,
        expanded: bool = False,
        contiguous: bool = False,
    ) -> list[Any]:
        """Returns the tensors to write the results to.

        The functional form gets new tensors as the meta kernel describes them. The in-place and `out=` variants get
        the caller's tensors, resized where PyTorch resizes them.

        A planner computes what the functional form computes. If an `out=` has another dtype than the functional form's
        result, or shares memory with an input, a temporary tensor takes its place, and `finish` copies it to `out=`.

        Args:
            like: tensors with the results' shapes, strides and dtypes, if PyTorch's meta kernel is missing or differs
                from its CPU kernel.
            elementwise: the kernel reads an element, if at all, only where it writes it, and converts the result as it
                stores it, so temporary tensors are rarely needed. As in PyTorch, tensors are checked for internal
                overlap before they are resized, otherwise afterwards.
            expanded: allow internal overlap in the caller's tensors. Otherwise it raises PyTorch's error.
            contiguous: make new and resized tensors contiguous, where PyTorch's meta kernel follows the inputs' layout.

        Returns:
            A tensor for each result; None for a result that the operator does not make.
        """
        if self._outputs is None:
            if contiguous:
                like = [result.new_empty(result.shape) for result in self.meta(self.functional)]
            written = self.written
            if self.is_in_place and (like is not None or not self.form.has_structured_meta):
                # Check first: meta kernels of in-place forms have other messages than the CPU kernel, or no check.
                check_same_shapes(written, self.meta(self.functional) if like is None else like)
            made = self.meta() if like is None else like
            if elementwise and like is None and not self.is_in_place and not self.form.has_structured_meta:
                # Not all of PyTorch's meta functions choose the strides that its kernels choose.
                tensors = tensors_of(self.inputs)
                if self.form.functional_name in _GRADIENT_LAST:
                    tensors = [*tensors[1:], tensors[0]]
                # With several results, TensorIterator also considers those that the caller passed.
                fitting = [given for given, one in zip(written, made, strict=False) if given.shape == one.shape]
                tensors = [*fitting, *tensors] if len(written) > 1 else tensors
                made = [elementwise_result(tensors, one.dtype) if one is not None else None for one in made]
            if written and len(written) == len(made):
                for given, result in zip(written, made, strict=True):
                    if given.shape != result.shape:
                        if any(given is value for value in flatten(self.inputs)):
                            _refuse_to_resize(given, result, elementwise)
                        if elementwise and not expanded:
                            runtime.check_overlaps([given], [])
                        runtime.not_replayable("it resizes a tensor that it was given")
                        warned = like is None and self.form.has_structured_meta  # its meta function has warned
                        if not warned and self.name not in _RESIZED_SILENTLY:
                            _C.warn_of_resize(given, result.shape)
                        given.resize_(result.shape)
                        given.as_strided_(result.shape, result.stride())
                if not expanded:
                    runtime.check_overlaps(written, [])
                self._outputs = self._with_stand_ins(written, like, elementwise)
            else:
                self._outputs = new_like(made, self.device)
        return self._outputs

    def _with_stand_ins(
        self, written: list[torch.Tensor], like: Sequence[Any] | None, elementwise: bool
    ) -> list[torch.Tensor]:
        if self.overload is self.functional:
            return written
        results = list(like or self.meta(self.functional))
        for position, (given, result) in enumerate(zip(written, results, strict=True)):
            converts = given.dtype != result.dtype and self.name not in _COMPUTED_AS_OUT
            if converts and (self.name in OF_ONE_DTYPE or not torch.can_cast(result.dtype, given.dtype)):
                raise _C.Refused("a result of another dtype")  # for PyTorch's error
            if elementwise:
                converts = converts and result.dtype not in _STORED_AS_COMPUTED
            shares = not elementwise and not self.is_in_place and shares_memory(given, self.inputs)
            if converts or shares:
                self._stand_ins.append((torch.empty_like(given, dtype=result.dtype if converts else None), given))
                results[position] = self._stand_ins[-1][0]
            else:
                results[position] = given
        return results

    def finish(self, returned: Any) -> Any:
        """Copies temporary results to the caller's tensors, and replaces them in what the planner returned."""
        if not self._stand_ins:
            return returned
        for computed, given in self._stand_ins:
            given.copy_(computed)
        if isinstance(returned, (tuple, list)):
            return type(returned)(self.finish_one(one) for one in returned)
        return self.finish_one(returned)

    def finish_one(self, returned: Any) -> Any:
        return next((given for computed, given in self._stand_ins if computed is returned), returned)

    def check_each_once(self) -> None:
        """Raises PyTorch's error for internal overlap in a tensor that is written, before any tensor is resized.

        PyTorch's elementwise operators check in this order. `outputs(elementwise=True)` includes the check.
        """
        runtime.check_overlaps(self.written, [])

    def check_apart(self) -> None:
        """Raises PyTorch's error if an `out=` shares memory with an input or overlaps itself.

        For operators whose kernels read inputs at other positions than they write. The meta functions of structured
        operators and `run_pointwise` include the check.
        """
        if not self.is_in_place and self.overload is not self.functional:
            for given in self.written:
                check_apart(given, self.inputs)


def check_same_shapes(changed: Sequence[torch.Tensor], results: Sequence[Any]) -> None:
    """Raises PyTorch's error if a tensor that is changed in place has another shape than its result."""
    if len(changed) != len(results):
        return
    for given, result in zip(changed, results, strict=True):
        if given.shape != result.shape:
            _refuse_to_resize(given, result, elementwise=True)


def _refuse_to_resize(operand: torch.Tensor, result: Any, elementwise: bool) -> NoReturn:
    """Raises PyTorch's error for an operand that is also a result but has another shape."""
    if elementwise:
        shape, wanted = list(operand.shape), list(result.shape)
        raise RuntimeError(f"output with shape {shape} doesn't match the broadcast shape {wanted}")
    raise RuntimeError(_OVERLAP)


def check_apart(out: torch.Tensor, inputs: Iterable[Any]) -> None:
    """Raises PyTorch's error if `out` shares memory with an input or overlaps itself.

    For operators that read inputs at other positions than they write. `run_pointwise` includes the check.
    """
    tensors = [tensor for tensor in tensors_of(inputs) if tensor.device == out.device]
    runtime.check_overlaps([out], tensors)
    for tensor in tensors:
        if tensor is out or (out.numel() and tensor.numel() and runtime.same_start(out, tensor)):
            raise RuntimeError(_OVERLAP)


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two tensors are views of one storage."""
    return runtime.storage_of(one) == runtime.storage_of(other)


def has_empty(values: Iterable[Any]) -> bool:
    """Whether one of the values is a tensor without elements."""
    return any(isinstance(value, torch.Tensor) and value.numel() == 0 for value in values)


def shares_memory(out: torch.Tensor, inputs: Iterable[Any]) -> bool:
    """Whether the extent of `out` in memory intersects that of a tensor in `inputs`."""
    for value in tensors_of(inputs):
        if value.device == out.device and same_storage(value, out):
            (begin, end), (first, last) = extent(out), extent(value)
            if value.numel() and out.numel() and first < end and begin < last:
                return True
    return False


def extent(tensor: torch.Tensor) -> tuple[Any, Any]:
    """The tensor's extent in its storage: the offset of its first byte, and the offset after its last byte."""
    elements = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = tensor.storage_offset()
    return first * tensor.itemsize, (first + elements) * tensor.itemsize


def new_like(metas: Sequence[Any], device: torch.device) -> list[Any]:
    """Returns uninitialized tensors with the sizes, strides and dtypes of the meta tensors; None for None."""
    if tracing.current() is None:
        return _C.new_like(metas, device.index)
    return [
        None if one is None else runtime.empty_strided(one.shape, one.stride(), one.dtype, device)
        for one in metas
    ]


def elementwise_result(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Returns a meta tensor with the broadcast shape of `tensors` and the strides that TensorIterator chooses."""
    if tracing.current() is None and tensors:
        return _C.elementwise_result(tensors, dtype)
    shape = runtime.broadcast_shapes(*(tensor.shape for tensor in tensors))
    strides = layouts.iterator(shape, [(tensor.shape, tensor.stride()) for tensor in tensors])
    return runtime.empty_strided(shape, strides, dtype, "meta")


def as_meta(value: Any) -> Any:
    """Converts an argument for a meta kernel."""
    if isinstance(value, torch.Tensor):
        return runtime.empty_strided(value.shape, value.stride(), value.dtype, "meta")
    if isinstance(value, _C.Number):
        return example(value)
    if isinstance(value, (list, tuple)):
        return [as_meta(element) for element in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, torch.Generator):
        return None
    return value


def check(condition: bool, reason: str) -> None:
    """Leaves the call to the CPU, whose kernel raises PyTorch's error, unless `condition` holds.

    Args:
        condition: what PyTorch requires.
        reason: what is wrong if it does not hold.

    Raises:
        Refused: the condition does not hold.
    """
    if not condition:
        raise _C.Refused(reason)


def check_same_dtype(call: Call, dtype: torch.dtype) -> None:
    """Leaves the call to the CPU, whose kernel raises PyTorch's error, if a tensor to write to has another dtype."""
    check(all(given.dtype == dtype for given in call.written), "a result of another dtype")


def example(number: _C.Number) -> Any:
    """The value that represents the number in type promotion: its value in this call, or the CPU tensor it is from."""
    return number.example if number.tensor is None else number.tensor


def without_device(value: Any) -> Any:
    """Replaces a zero-dimensional CPU tensor with a meta tensor."""
    return value.to("meta") if isinstance(value, torch.Tensor) and not value.dim() else value


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """All tensors among the values, including those in nested lists and tuples."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value)
    return found


def flatten(values: Any) -> Iterator[Any]:
    """Yields each value of nested lists and tuples."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flatten(value)
        else:
            yield value
