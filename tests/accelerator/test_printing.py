"""Printing bp tensors: PyTorch's format, with the device."""

from __future__ import annotations

import pytest
import torch
from dtypes import ALL_DTYPES


def as_on_bp(text: str) -> str:
    """Inserts the device into the text of a CPU tensor where PyTorch prints it: before the other properties."""
    ends = [text.find(name) for name in (", size=", ", dtype=", ", grad_fn=", ", requires_grad=") if name in text]
    end = min(ends, default=len(text) - 1)
    return f"{text[:end]}, device='bp:0'{text[end:]}"


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.float32).to(dtype)
    assert " ".join(repr(x.to("bp")).split()) == " ".join(as_on_bp(repr(x)).split())


def test_shapes_views_and_gradients() -> None:
    x = torch.arange(6.0).view(2, 3)
    for view in (lambda t: t[:0], lambda t: t[0, 0], lambda t: t.t()[::2], lambda t: t * torch.nan, lambda t: t * 1e10):
        assert " ".join(repr(view(x.to("bp"))).split()) == " ".join(as_on_bp(repr(view(x))).split())
    assert repr(torch.ones(1, device="bp:1", requires_grad=True)) == "tensor([1.], device='bp:1', requires_grad=True)"
    assert "grad_fn=<MulBackward0>" in repr(torch.ones(1, device="bp", requires_grad=True) * 2)
    assert repr(torch.empty(0, 3, device="bp")) == "tensor([], device='bp:0', size=(0, 3))"
    assert repr(torch.nn.Parameter(torch.ones(1, device="bp"))).startswith(
        "Parameter containing:\ntensor([1.], device='bp:0'"
    )


def test_conjugate_and_negative_views() -> None:
    x = torch.tensor([1 + 2j], device="bp")
    assert repr(x.conj()) == "tensor([1.-2.j], device='bp:0')"
    assert repr(x.conj().imag) == "tensor([-2.], device='bp:0')"


def test_large_tensors_are_summarized() -> None:
    x = torch.arange(2_000_000, device="bp").view(1000, 2000)
    text = repr(x)
    assert " ".join(text.splitlines()[0].split()) == "tensor([[ 0, 1, 2, ..., 1997, 1998, 1999],"
    assert text.endswith("device='bp:0')")


def test_format_str_and_lists() -> None:
    x = torch.tensor(3.25, device="bp")
    assert f"{x:.1f}" == "3.2"
    assert str(x) == "tensor(3.2500, device='bp:0')"
    assert str([x]) == "[tensor(3.2500, device='bp:0')]"
    with torch.no_grad():
        torch.set_printoptions(precision=1)
        try:
            assert str(x) == "tensor(3.2, device='bp:0')"
        finally:
            torch.set_printoptions(profile="default")
    assert str(torch.device("bp", 1)) == "bp:1"
    assert "device=bp:0" in repr(x.untyped_storage())


def test_functorch_wrappers() -> None:
    x = torch.ones(2, device="bp")
    assert "device='bp:0'" in repr(torch.func.grad(lambda t: (t**2).sum())(x))
    seen: list[str] = []
    torch.func.vmap(lambda t: seen.append(repr(t)) or t)(x)
    assert "BatchedTensor" in seen[0]
    assert "device='bp:0'" in seen[0]
