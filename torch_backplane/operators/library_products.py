"""Matrix products by the libraries of the device's driver (the families matmul and linear)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torch_backplane.planning import Activation, LibraryCall, allowed, runtime, try_library

_ALIGNMENT = 16  # bytes


class Finish(NamedTuple):
    """What a routine of the family linear computes in addition to a product.

    Args:
        bias: a contiguous vector, one number for each column of the result.
        activation: what is computed of the sums.
    """

    bias: torch.Tensor
    activation: Activation


def finish(
    out: torch.Tensor, added: torch.Tensor, beta: Any, activation: Activation = Activation.NONE
) -> Finish | None:
    """What a library may compute together with a product; None if what is added is no bias, or if no library does.

    Args:
        out: the result.
        added: what is added to the product.
        beta: its factor.
        activation: what is computed of the sums.
    """
    if beta != 1 or added.dim() != 1 or LibraryCall(out.device, "linear", out.dtype).why_not() is not None:
        return None
    is_bias = added.shape[0] == out.shape[-1] and added.stride(0) == 1
    return Finish(added, activation) if is_bias else None


def activate(out: torch.Tensor, finish: Finish) -> torch.Tensor:
    """Computes the activation of sums by a separate kernel."""
    return out.relu_() if finish.activation == Activation.RELU else out


class Product(NamedTuple):
    """A product, as its candidates get it.

    Args:
        out: the result.
        a, b: the operands; None if only the result is known.
        finish: what a library may compute in addition.
    """

    out: torch.Tensor
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    finish: Finish | None = None

    def matmul(self, key: str = "", form: int = 0) -> LibraryCall:
        """The call of the family matmul.

        Args:
            key: of the only library that may run it; "" for any.
            form: the number of the algorithm.
        """
        return self._call("matmul", key, lambda: _integers(self, form))

    def linear(self, key: str = "", form: int = 0) -> LibraryCall | None:
        """The call of the family linear, which also computes the finish; None if there is none."""
        finish = self.finish
        if finish is None or _has_columns(self.out):
            return None
        return self._call("linear", key, lambda: _integers(self, form) | {"activation": int(finish.activation)})

    def calls(self, key: str = "", form: int = 0) -> list[LibraryCall]:
        """Both calls, that of linear first."""
        return [one for one in (self.linear(key, form), self.matmul(key, form)) if one is not None]

    def selected(self, form: str) -> LibraryCall:
        """The first call that a library accepts: of the library that the form names, else of any."""
        asked = dict.fromkeys((_parsed(form), ("", 0)))
        calls = [call for key, number in asked for call in self.calls(key, number)]
        return next((call for call in calls if call.why_not() is None), calls[-1])

    def _call(self, family: str, key: str, integers: Callable[[], dict[str, int]]) -> LibraryCall:
        is_known = self.a is not None
        return LibraryCall(self.out.device, family, self.out.dtype, integers if is_known else None, key)


def why_not(out: torch.Tensor, *operands: Any) -> str | None:
    """Why no library computes products with this result, in words that follow «it»; None if one does.

    Like the functions below, it gets what `Product` has.
    """
    if out.dim() not in (2, 3):
        return "takes matrices and batches of matrices"
    return Product(out, *operands).matmul().why_not()


def cost(*product: Any) -> int | None:
    """The routine's cost (`planning.costs`); None if the library does not state it."""
    return Product(*product).matmul().cost()


def workspace(form: str, *product: Any) -> int:
    """Bytes of the routine's workspace, and of copies of operands and of a result of which neither rows nor columns are
    contiguous.
    """
    of = Product(*product)
    copied = [one for one in of[:3] if one is not None and not _has_rows(one) and not _has_rows(one.mT)]
    return sum(one.numel() * one.itemsize for one in copied) + of.selected(form).workspace()


def forms(*product: Any) -> list[str]:
    """The libraries other than the one that computes the call, and more algorithms of each, such as "cublaslt/2"."""
    of = Product(*product)
    if of.a is None or 0 in of.a.shape:
        return []
    found: dict[str, int] = {}
    for call in of.calls():
        for key, count in call.forms():
            found.setdefault(key, count)
    first = next(iter(found), "")
    names = [one for key, count in found.items() for one in (key, *(f"{key}/{n}" for n in range(1, count)))]
    return [one for one in names if one != first]


def has_form(form: str, *product: Any) -> bool:
    """Whether the library that a form names computes the call."""
    return any(call.why_not() is None for call in Product(*product).calls(*_parsed(form)))


def multiply(
    product: Product,
    c: torch.Tensor | None,
    beta: Any,
    alpha: Any,
    form: str = "",
) -> None:
    """out = beta * c + alpha * a @ b, for matrices or batches of matrices, none of which is empty.

    Args:
        product: the operands and the result. If there is a finish, c was expanded from its bias.
        c: what is added; None if nothing is.
        beta, alpha: the factors.
        form: the library and the algorithm, as `forms` names them; "" for the first library that accepts the call.
    """
    is_linear = product.selected(form).family == "linear"
    if is_linear and try_library(partial(_multiply, product, None, (alpha,), form)):
        return
    _multiply(product._replace(finish=None), c, (alpha, 0 if c is None else beta), form)
    if product.finish is not None:
        activate(product.out, product.finish)


def _multiply(product: Product, c: torch.Tensor | None, factors: Sequence[Any], form: str) -> None:
    """Calls the library. `factors` are the numbers of the routine."""
    out, a, b, finish = product
    assert a is not None
    assert b is not None
    if _has_columns(out):
        out, a, b, c = out.mT, b.mT, a.mT, None if c is None else c.mT
    has_rows = _has_rows(out)
    result = out if has_rows else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    if c is not None:
        result.copy_(c)
    a, b = (one if _has_rows(one) or _has_rows(one.mT) else one.contiguous() for one in (a, b))
    bias = [] if finish is None else [finish.bias]
    Product(result, a, b, finish).selected(form).run([result, a, b, *bias], factors)
    if not has_rows:
        out.copy_(result)


def _parsed(form: str) -> tuple[str, int]:
    """The library's key and the number of the algorithm of a form such as "cublaslt/2", "cublas" or ""."""
    key, _, number = form.partition("/")
    return key, int(number or 0)


def _integers(product: Product, form: int) -> dict[str, int]:
    """The integers of the routine, for the operands or for the copies that `multiply` will make of them."""
    c, a, b, finish = product
    assert a is not None
    assert b is not None
    if _has_columns(c):
        c, a, b = c.mT, b.mT, a.mT
    rows, columns = c.shape[-2:]
    found = {"batch": c.shape[0] if c.dim() == 3 else 1, "rows": rows, "columns": columns, "depth": a.shape[-1]}
    in_place = [] if finish is None else [finish.bias]
    for name, one in (("c", c), ("a", a), ("b", b)):
        is_transposed = not _has_rows(one) and _has_rows(one.mT)
        is_copied = not _has_rows(one) and not is_transposed
        found[f"{name}_row"] = one.shape[-1] if is_copied else one.stride(-1 if is_transposed else -2)
        found[f"{name}_transposed"] = int(is_transposed)
        step = one.shape[-2] * one.shape[-1] if is_copied else one.stride(0)
        found[f"{name}_step"] = step if one.dim() == 3 else 0
        in_place += [] if is_copied else [one]
    del found["c_transposed"]  # a result with contiguous columns is computed as its transpose
    is_aligned = all(runtime.is_aligned(one, _ALIGNMENT) for one in in_place)
    found["alignment"] = _ALIGNMENT if is_aligned else c.itemsize
    return found | {"allowed": int(allowed("products", c.dtype)), "form": form}


def _has_rows(matrix: torch.Tensor) -> bool:
    """Whether each row is contiguous and ends before the next one."""
    return bool(matrix.stride(-1) == 1 and matrix.stride(-2) >= matrix.shape[-1])


def _has_columns(matrix: torch.Tensor) -> bool:
    """Whether columns, and not rows, are contiguous. Then outᵀ = bᵀ aᵀ is a product with contiguous rows."""
    return bool(matrix.stride(-1) != 1 and matrix.stride(-2) == 1)
