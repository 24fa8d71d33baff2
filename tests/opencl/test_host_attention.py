"""Attention where the host can access device memory: the CPU's flash kernel runs in stream order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from agreement import DEVICE
from test_host_work import needs_sight
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention as attend

from torch_backplane import plans, preferences


@contextmanager
def _on_host() -> Iterator[None]:
    needs_sight()
    with preferences.preferring("attention", "host"):
        yield


def made(length: int, dtype: torch.dtype, *, transposed: bool = False) -> list[torch.Tensor]:
    """query, key and value. `transposed`: transposed views, as models split them off one projection."""
    if transposed:
        return [torch.randn(2, length, 3, 16).to(dtype).transpose(1, 2) for _ in range(3)]
    return [torch.randn(2, 3, length, 16).to(dtype) for _ in range(3)]


def choice(*arguments: torch.Tensor, **named: object) -> int:
    return int(torch.ops.aten._fused_sdp_choice(*arguments, **named))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["plain", "causal", "mask", "bools"])
@_on_host()
def test_results_and_gradients_are_the_cpus(form: str, dtype: torch.dtype) -> None:
    plans.set_mode("check")
    for length, transposed, scale in ((8, False, None), (13, True, 0.5), (8, True, 0.25), (20, False, None)):
        given = made(length, dtype, transposed=transposed)
        masks = {"mask": torch.randn(length, length).to(dtype), "bools": torch.rand(length, length) > 0.3}
        found = []
        for device in ("cpu", DEVICE):
            leaves = [one.to(device).requires_grad_() for one in given]
            mask = masks[form].to(device) if form in masks else None
            out = attend(*leaves, attn_mask=mask, is_causal=form == "causal", scale=scale)
            found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)])
        for expected, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours.cpu(), expected, equal_nan=True)


@pytest.mark.parametrize("form", ["plain", "causal"])
def test_results_have_the_strides_of_the_operands(form: str) -> None:
    """As in torch.cuda: results have the strides of the operands, so models can merge the heads without a copy."""
    needs_sight()
    for transposed in (False, True, False):
        for library in ("generated", "host"):
            with preferences.preferring("attention", library):
                leaves = [one.to(DEVICE).requires_grad_() for one in made(9, torch.float32, transposed=transposed)]
                out = attend(*leaves, is_causal=form == "causal")
                gradients = torch.autograd.grad(out.sum(), leaves)
            assert out.stride() == leaves[0].stride()
            assert [one.stride() for one in gradients] == [one.stride() for one in leaves]


@_on_host()
def test_host_kernel_is_used() -> None:
    given = [one.to(DEVICE) for one in made(8, torch.float32)]
    assert "on the host backplane::host_attention" in plans.explain(attend, *given)
    assert choice(*given) == SDPBackend.OVERRIDEABLE.value


@pytest.mark.parametrize("form", ["dropout", "shared heads", "a mask with a gradient", "one head", "nothing"])
@_on_host()
def test_cases_without_cpu_kernel_are_composed(form: str) -> None:
    """`_fused_sdp_choice` agrees with what runs: with this few queries, attention is composed of other operators."""
    if form == "one head" and torch.__version__ >= "2.14":
        pytest.skip("PyTorch adds the batch dimension itself since torch 2.14")
    query, key, value = (one.to(DEVICE) for one in made(7, torch.float32))
    named: dict[str, object] = {}
    if form == "dropout":
        named["dropout_p"] = 0.5
    elif form == "shared heads":
        key, value, named["enable_gqa"] = key[:, :1], value[:, :1], True
    elif form == "a mask with a gradient":
        named["attn_mask"] = torch.zeros(7, 7, device=DEVICE, requires_grad=True)
    elif form == "one head":
        query, key, value = (one[0] for one in (query, key, value))
    else:
        query, key, value = (one[:0] for one in (query, key, value))
    for _ in range(2):
        out = attend(query, key, value, **named)  # type: ignore[arg-type]
        assert out.shape == query.shape
        assert choice(query, key, value, **named) == SDPBackend.MATH.value
        plan_text = plans.explain(lambda: attend(query, key, value, **named))  # type: ignore[arg-type]
        assert "host_attention" not in plan_text


@_on_host()
def test_enable_gqa_without_shared_heads_runs_on_the_host() -> None:
    given = [one.to(DEVICE) for one in made(8, torch.float32)]
    for enable_gqa in (True, False, True):
        assert choice(*given, enable_gqa=enable_gqa) == SDPBackend.OVERRIDEABLE.value
        torch.testing.assert_close(attend(*given, enable_gqa=enable_gqa), attend(*given))


@_on_host()
def test_direct_calls_that_are_unsupported_raise_and_later_calls_work() -> None:
    given = [one.to(DEVICE) for one in made(7, torch.float32)]
    fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    expected = attend(*given)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not support dropout"):
            fused(*given, None, 0.5)
        with pytest.raises(RuntimeError, match="as many heads"):
            fused(given[0], given[1][:, :1], given[2][:, :1])
        torch.testing.assert_close(fused(*given)[0], expected)
