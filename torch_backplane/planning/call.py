"""One call of an operator, as its planner sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from torch_backplane import _C


class Call:
    """An overload and its arguments, in the order of the schema: bp tensors, `Number`s, lists and plain values.

    `functional` is the overload of the same group that makes its results; it is `overload` itself where that does.
    """

    def __init__(self, overload: OpOverload, functional: OpOverload, arguments: tuple[Any, ...]) -> None:
        self.overload = overload
        self.functional = functional
        self.arguments = arguments
        self._outputs: list[Any] | None = None
        self._metas: dict[OpOverload, tuple[Any, ...]] = {}

    @property
    def name(self) -> str:
        """Such as "aten::add.Tensor"."""
        schema = self.overload._schema
        return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The arguments without those that are only written, `out=` and its like."""
        schema = self.overload._schema.arguments
        return tuple(value for value, one in zip(self.arguments, schema, strict=True) if not one.is_out)

    @property
    def written(self) -> list[torch.Tensor]:
        """The tensors that were given for the results: those of `out=`, else those that are changed in place."""
        schema = self.overload._schema
        arguments = list(zip(self.arguments, schema.arguments, strict=True))
        outs = [value for value, argument in arguments if argument.is_out]
        if outs:
            return outs
        # Some operators write to others, too, such as running statistics, which are no results.
        aliases = [result.alias_info for result in schema.returns if result.alias_info is not None]
        returned = {alias for info in aliases for alias in info.before_set}
        return [
            value
            for value, argument in arguments
            if argument.alias_info is not None
            and argument.is_write
            and (not schema.returns or argument.alias_info.before_set & returned)
        ]

    @property
    def is_in_place(self) -> bool:
        """Whether it is the in-place form of `functional`."""
        return self.overload is not self.functional and not any(one.is_out for one in self.overload._schema.arguments)

    @property
    def device(self) -> torch.device:
        """The tensors' device, or the one that a factory is asked for; with its index."""
        named = None
        for value in flatten(self.arguments):
            if isinstance(value, torch.Tensor):
                return value.device
            if isinstance(value, torch.device):
                named = value
        index = named.index if named is not None else None
        return torch.device("bp", torch.accelerator.current_device_index() if index is None else index)

    def meta(self, overload: OpOverload | None = None) -> tuple[Any, ...]:
        """What PyTorch's meta kernel says of the results: meta tensors, None for a tensor that is not made.

        Raises PyTorch's own errors for arguments that the operator does not take.
        """
        overload = overload or self.overload
        if overload not in self._metas:
            self._metas[overload] = self._ask_meta(overload)
        return self._metas[overload]

    def _ask_meta(self, overload: OpOverload) -> tuple[Any, ...]:
        values = self.arguments if overload is self.overload else self.inputs
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for value, argument in zip(values, overload._schema.arguments, strict=True):
            if argument.kwarg_only:
                named[argument.name] = as_meta(value)
            else:
                positional.append(as_meta(value))
        try:
            results = overload(*positional, **named)
        except Exception as error:
            # Where the meta kernel is a decomposition in Python, it may refuse in words of its own making: assertions,
            # and a tuple of strings for a message. The CPU's kernel has PyTorch's.
            if isinstance(error, AssertionError) or str(error).startswith("('"):
                raise _C.RunOnCPU(f"PyTorch's decomposition refuses it: {error}") from error
            raise
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    def outputs(self, like: Sequence[Any] | None = None) -> list[Any]:
        """A bp tensor for each tensor that the operator returns: new ones as the meta kernel says, or, for the in-place
        and `out=` forms, those that were given, resized where PyTorch resizes. None where the operator makes none.

        Args:
            like: tensors of the results' shapes, strides and dtypes, where PyTorch's meta kernel is missing or says
                something else than its CPU kernel.
        """
        if self._outputs is None:
            written = self.written
            if self.is_in_place:
                # First: the meta kernels of in-place forms have other words than PyTorch's CPU, or take any shape.
                check_same_shapes(written, self.meta(self.functional) if like is None else like)
            made = self.meta() if like is None else like
            if written and len(written) == len(made):
                for given, result in zip(written, made, strict=True):
                    if given.shape != result.shape:
                        _C.check_overlaps([given], [])
                        _C.not_replayable("it resizes a tensor that it was given")
                        given.resize_(result.shape)
                        given.as_strided_(result.shape, result.stride())
                self._outputs = written
            else:
                self._outputs = [new_like(result, self.device) for result in made]
        return self._outputs


def check_same_shapes(changed: Sequence[torch.Tensor], results: Sequence[Any]) -> None:
    """Raises PyTorch's error where a tensor that is changed in place has not the shape of its result."""
    if len(changed) != len(results):
        return
    for given, result in zip(changed, results, strict=True):
        if given.shape != result.shape:
            shape, wanted = list(given.shape), list(result.shape)
            raise RuntimeError(f"output with shape {shape} doesn't match the broadcast shape {wanted}")


def check_apart(out: torch.Tensor, inputs: Iterable[Any]) -> None:
    """Raises PyTorch's error where `out` shares memory with an input, or one of its elements with another one.

    For operators that read inputs elsewhere than they write; `run_pointwise` checks for itself.
    """
    tensors = [value for value in flatten(inputs) if isinstance(value, torch.Tensor) and value.device == out.device]
    _C.check_overlaps([out], tensors)
    for tensor in tensors:
        if out.numel() and tensor.numel() and out.data_ptr() == tensor.data_ptr():
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
                "memory location. Please clone() the tensor before performing the operation."
            )


def new_like(meta: Any, device: torch.device) -> torch.Tensor | None:
    """An uninitialized tensor with the sizes, strides and dtype of a meta tensor; None for None."""
    if meta is None:
        return None
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)


def as_meta(value: Any) -> Any:
    """An argument as the meta kernels take it."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, _C.Number):
        return example(value)
    if isinstance(value, (list, tuple)):
        return [as_meta(element) for element in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, torch.Generator):
        return None
    return value


def example(number: _C.Number) -> Any:
    """What takes the number's part in type promotion: its value in this call, or the CPU tensor that it came in."""
    return number.example if number.tensor is None else number.tensor


def flatten(values: Any) -> Iterator[Any]:
    """Each value of nested lists and tuples."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flatten(value)
        else:
            yield value
