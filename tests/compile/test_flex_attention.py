"""`flex_attention` on bp, eager and compiled: equal to the CPU's, and gradients equal to those of its formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

Modification = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@dataclass
class Case:
    """Attention of queries (batch, heads, length, columns) with `kv` (heads, length, columns of values).

    `score` and `mask` make the functions of flex_attention from the captured tensors.
    """

    query: tuple[int, int, int, int]
    kv: tuple[int, int, int]
    score: Callable[..., Modification] | None = None
    mask: Callable[..., Modification] | None = None
    captured: tuple[Tensor, ...] = ()
    scale: float | None = None
    rows_without_keys: bool = False

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        batch, _, _, columns = self.query
        heads, length, value_columns = self.kv
        shapes = (self.query, (batch, heads, length, columns), (batch, heads, length, value_columns))
        return [torch.randn(shape).to(dtype) for shape in shapes]


def relative_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + (i - j) * 0.1


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() < 4


def alibi(slopes: Tensor) -> Modification:
    return lambda score, b, h, i, j: score + slopes[h] * (j - i)


def table_of_distances(table: Tensor) -> Modification:
    return lambda score, b, h, i, j: score + table[h, (i - j).clamp(-8, 8) + 8] * table[0, 0]


def soft_cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20)


def documents(numbers: Tensor) -> Modification:
    return lambda b, h, i, j: (numbers[b, i] == numbers[b, j]) & (i >= j)


CASES = {
    "plain": Case((2, 3, 40, 16), (3, 40, 16)),
    "relative bias": Case((1, 2, 33, 40), (2, 33, 40), lambda: relative_bias, scale=0.3),
    "alibi": Case((2, 4, 37, 64), (4, 37, 64), alibi, lambda *_: causal, (torch.rand(4),)),
    "soft cap, other lengths": Case((2, 2, 17, 16), (2, 50, 40), lambda: soft_cap),
    "documents": Case((2, 2, 45, 16), (2, 45, 16), None, documents, ((torch.arange(90).reshape(2, 45) // 12),)),
    "grouped heads": Case((1, 6, 21, 16), (2, 21, 16), lambda: relative_bias, lambda: causal),
    "window": Case((1, 2, 150, 16), (2, 150, 16), None, lambda: and_masks(window, causal)),
    "rows without keys": Case(
        (1, 2, 30, 16), (2, 12, 16), lambda: soft_cap, lambda: window, rows_without_keys=True
    ),
    "one query": Case((3, 4, 1, 64), (4, 77, 64), lambda: relative_bias),
    "distances": Case((2, 2, 20, 16), (2, 29, 16), table_of_distances, None, (torch.randn(2, 17),)),
}  # fmt: skip
WITH_GRADIENTS = {"alibi", "distances"}  # of the captured tensors


def attend(case: Case, inputs: list[Tensor], captured: list[Tensor], **options: Any) -> Any:
    """The call of flex_attention, as a program would write it."""
    query, key, value = inputs
    score = case.score(*captured) if case.score else None
    mask = block_mask(case, query, key, captured) if case.mask else None
    gqa = query.shape[1] != key.shape[1]
    return flex_attention(query, key, value, score, mask, case.scale, gqa, **options)


def block_mask(case: Case, query: Tensor, key: Tensor, captured: list[Tensor]) -> BlockMask:
    assert case.mask is not None
    batch = None if not captured or captured[0].is_floating_point() else query.shape[0]
    return create_block_mask(
        case.mask(*captured), batch, None, query.shape[2], key.shape[2], device=query.device, BLOCK_SIZE=64
    )


def formula(case: Case, inputs: list[Tensor], captured: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention and the logarithms of the sums, from their definition."""
    query, key, value = (one.float() for one in inputs)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) * (case.scale or 1 / math.sqrt(query.shape[-1]))
    places = [
        torch.arange(size).reshape([-1 if dim == k else 1 for k in range(4)]) for dim, size in enumerate(scores.shape)
    ]
    if case.score:
        scores = case.score(*captured)(scores, *places)
    if case.mask:
        scores = scores.masked_fill(~case.mask(*captured)(*places), -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0) if case.rows_without_keys else torch.softmax(scores, -1)
    return (weights @ value).to(inputs[0].dtype), scores.logsumexp(-1)


def on(device: str, tensors: Any, gradients: bool) -> list[Tensor]:
    return [one.detach().to(device).requires_grad_(gradients and one.is_floating_point()) for one in tensors]


def agree(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_device=False)


FORMS = {"eager": lambda function: function, "compiled": torch.compile}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str, form: str) -> None:
    case = CASES[name]
    inputs = case.inputs()
    with torch.no_grad():
        expected = attend(case, inputs, list(case.captured), return_aux=AuxRequest(lse=True))
    theirs, their_captured = on("cpu", inputs, True), on("cpu", case.captured, name in WITH_GRADIENTS)
    out, logarithms = formula(case, theirs, their_captured)
    agree(expected[0], out.detach(), 1e-4)  # the formula of this file is right

    ours, our_captured = on("bp", inputs, True), on("bp", case.captured, name in WITH_GRADIENTS)
    function = FORMS[form](lambda *given: attend(case, *given, return_aux=AuxRequest(lse=True, max_scores=True)))
    found, aux = function(ours, our_captured)
    agree((found, aux.lse), (expected[0], expected[1].lse), 1e-4)
    assert aux.max_scores.shape == aux.lse.shape

    gradient, of_logarithms = torch.randn_like(out), torch.randn_like(logarithms)
    with_keys = torch.where(logarithms.isinf(), 0, logarithms)
    torch.autograd.backward([out, with_keys], [gradient, of_logarithms])
    our_with_keys = torch.where(aux.lse.isinf(), 0, aux.lse)
    torch.autograd.backward([found, our_with_keys], [gradient.to("bp"), of_logarithms.to("bp")])
    for given, reference in zip([*ours, *our_captured], [*theirs, *their_captured], strict=True):
        if reference.grad is not None:
            agree(given.grad, reference.grad, 1e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype, form: str) -> None:
    case = CASES["alibi"]
    inputs = case.inputs(dtype)
    theirs = on("cpu", [one.float() for one in inputs], True)
    out, _ = formula(case, theirs, list(case.captured))
    ours = on("bp", inputs, True)
    found = FORMS[form](lambda given: attend(case, given, on("bp", case.captured, False)))(ours)
    assert found.dtype == dtype
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-4}[dtype]
    agree(found.float(), out, tolerance)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    found.backward(gradient.to("bp", dtype))
    for given, reference in zip(ours, theirs, strict=True):
        assert given.grad.dtype == dtype
        agree(given.grad.float(), reference.grad, 5 * tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype, form: str) -> None:
    query, key, value = on("bp", CASES["plain"].inputs(), True)
    with torch.autocast("bp", dtype):
        found = FORMS[form](flex_attention)(query, key, value, relative_bias)
    assert found.dtype == dtype
    expected = flex_attention(*(one.detach().cpu().to(dtype) for one in (query, key, value)), relative_bias)
    agree(found, expected, 2e-2)
    found.sum().backward()
    assert query.grad.dtype == torch.float32


def test_lengths_can_be_dynamic() -> None:
    def windowed(query: Tensor, key: Tensor, value: Tensor, cap: int) -> Tensor:
        mask = create_block_mask(window, None, None, query.shape[2], key.shape[2], device=query.device)
        return flex_attention(query, key, value, lambda score, b, h, i, j: cap * torch.tanh(score / cap), mask)

    compiled = torch.compile(windowed, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for length, cap in ((33, 5), (50, 7), (120, 5)):
        inputs = [torch.randn(2, 2, length, 16) for _ in range(3)]
        ours = on("bp", inputs, True)
        found = compiled(*ours, cap)
        theirs = on("cpu", inputs, True)
        case = Case((2, 2, length, 16), (2, length, 16), lambda: _capped(cap), lambda: window)  # noqa: B023
        out, _ = formula(case, theirs, [])
        agree(found, out, 1e-4)
        out.sum().backward()
        found.sum().backward()
        for given, reference in zip(ours, theirs, strict=True):
            agree(given.grad, reference.grad, 1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def _capped(cap: int) -> Modification:
    return lambda score, b, h, i, j: cap * torch.tanh(score / cap)


@pytest.mark.slow
def test_constants_in_the_functions() -> None:
    """An index that is a number is a tensor in the graph of score_mod."""

    def attend_with(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score * table[1] + torch.where(i == j, table[h], torch.tensor(2.5, device=score.device))

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) | (table[0] < j)

        mask = create_block_mask(mask_mod, None, None, query.shape[2], key.shape[2], device=query.device)
        return flex_attention(query, key, value, score_mod, mask)

    inputs, table = CASES["plain"].inputs(), torch.tensor([5.0, 0.5, 2.0])
    expected = attend_with(*inputs, table)
    ours = on("bp", [*inputs, table], False)
    agree(attend_with(*ours), expected, 1e-4)
    agree(torch.compile(attend_with)(*ours), expected, 1e-4)
    ours[0].requires_grad_()
    agree(torch.compile(attend_with)(*ours), expected, 1e-4)


@pytest.mark.parametrize("create", [create_block_mask, torch.compile(create_block_mask)], ids=["eager", "compiled"])
def test_block_masks_equal_the_cpus(create: Callable[..., BlockMask]) -> None:
    numbers = torch.arange(300) // 70

    def on_device(device: str) -> BlockMask:
        owners = numbers.to(device)
        prefix_or_document = or_masks(lambda b, h, i, j: j < 20 * h, lambda b, h, i, j: owners[i] == owners[j])
        creating = create_block_mask if device == "cpu" else create
        return creating(prefix_or_document, None, 3, 300, 300, device=device, BLOCK_SIZE=32)

    found, expected = on_device("bp"), on_device("cpu")
    for ours, theirs in zip(found.as_tuple(), expected.as_tuple(), strict=True):
        if isinstance(theirs, Tensor):
            assert ours.device.type == "bp"
            torch.testing.assert_close(ours, theirs, check_device=False)
    assert found.sparsity() == expected.sparsity()
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), check_device=False)
    moved = expected.to("bp")
    torch.testing.assert_close(moved.kv_indices, found.kv_indices)
    torch.testing.assert_close(found[:, 1:].kv_num_blocks, expected[:, 1:].kv_num_blocks, check_device=False)


def test_layouts() -> None:
    """The layout of the result follows that of the query, as for other devices."""
    inputs = [torch.randn(2, 30, 3, 16).transpose(1, 2) for _ in range(3)]
    expected = torch.compile(flex_attention, backend="eager")(*inputs)
    ours = on("bp", inputs, False)
    for function in (flex_attention, torch.compile(flex_attention)):
        found = function(*ours)
        agree(found, expected, 1e-4)
        assert found.stride() == expected.stride()


def test_keys_that_all_sequences_share() -> None:
    query, key, value = torch.randn(3, 2, 20, 16), torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    gradients = []
    for function in (flex_attention, torch.compile(flex_attention)):
        ours = on("bp", (query, key, value), True)
        mask = create_block_mask(causal, 3, None, 20, 20, device="bp")
        found = function(*ours, block_mask=mask)
        expected = flex_attention(query, key, value, block_mask=mask.to("cpu"))
        agree(found, expected, 1e-4)
        gradients.append(torch.autograd.grad(found.square().sum(), ours))
    agree(gradients[1], gradients[0], 1e-4)


@pytest.mark.slow
def test_checkpoints_and_captured_tensors_of_other_dtypes() -> None:
    def attend_with(query: Tensor, table: Tensor, keep: Tensor) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(keep[b, i, j], score, score + table[h, i - j + 20])

        return flex_attention(query * 1.5, query, query, score_mod).sin()

    def with_checkpoint(*given: Tensor) -> Tensor:
        return checkpoint(attend_with, *given, use_reentrant=False)

    query, table, keep = torch.randn(2, 2, 20, 16), torch.randn(2, 40).bfloat16(), torch.rand(2, 20, 20) > 0.3
    found = []
    for function in (attend_with, torch.compile(with_checkpoint)):
        given = on("bp", (query, table, keep), True)
        result = function(*given)
        gradients = torch.autograd.grad(result.square().sum(), given[:2])
        assert gradients[1].dtype == torch.bfloat16
        found.append((result.detach(), gradients[0], gradients[1].float()))
    agree(found[1], found[0], 2e-2)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = torch.nn.LayerNorm(32), torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.slopes = torch.nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        query, key, value = self.project(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        attention = flex_attention(query, key, value, alibi(self.slopes), mask)
        return x + self.out(attention.transpose(1, 2).flatten(2))


def test_a_model_trains_as_on_the_cpu() -> None:
    model = torch.nn.ModuleList([Block(), Block()])
    x = torch.randn(2, 40, 32)

    def loss(blocks: torch.nn.ModuleList, x: Tensor, mask: BlockMask) -> Tensor:
        for block in blocks:
            x = block(x, mask)
        return x.square().mean()

    def case_of(block: Block) -> Case:
        return Case((2, 2, 40, 16), (2, 40, 16), alibi, lambda *_: causal, (block.slopes,))

    value = x
    for block in model:
        inputs = block.project(block.norm(value)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        out, _ = formula(case_of(block), list(inputs), [block.slopes])
        value = value + block.out(out.transpose(1, 2).flatten(2))
    expected = value.square().mean()
    expected.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters()}

    model.zero_grad()
    model.to("bp")
    mask = create_block_mask(causal, None, None, 40, 40, device="bp")
    found = torch.compile(loss, fullgraph=True)(model, x.to("bp"), mask)
    agree(found, expected.detach(), 1e-4)
    found.backward()
    for name, one in model.named_parameters():
        agree(one.grad, gradients[name], 1e-4)


def wrong_calls(device: str) -> dict[str, Callable[[], Any]]:
    def numbers(*shape: int, **options: Any) -> Tensor:
        return torch.randn(shape, device=device, **options)

    longer = numbers(2, 2, 30, 16)
    x, mask = numbers(2, 2, 20, 16), create_block_mask(causal, None, None, 20, 20, device=device)
    return {
        "dimensions": lambda: flex_attention(x[0], x[0], x[0]),
        "embeddings": lambda: flex_attention(x, numbers(2, 2, 20, 8), x),
        "heads": lambda: flex_attention(x, x[:, :1], x[:, :1]),
        "groups": lambda: flex_attention(numbers(2, 3, 20, 16), x, x, enable_gqa=True),
        "batches": lambda: flex_attention(x, x[:1], x[:1]),
        "short mask": lambda: flex_attention(longer, longer, longer, None, mask),
        "long mask": lambda: flex_attention(x[:, :, :10], x, x, None, mask),
        "both requests": lambda: flex_attention(x, x, x, return_lse=True, return_aux=AuxRequest(lse=True)),
        "backend": lambda: flex_attention(x, x, x, kernel_options={"BACKEND": "NONSENSE"}),
        "sliced mask": lambda: flex_attention(x, x, x, None, mask[:, :, :1]),
    }  # fmt: skip


@pytest.mark.parametrize("name", wrong_calls("cpu"))
def test_errors_are_pytorchs(name: str) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011
        wrong_calls("cpu")[name]()
    with pytest.raises(type(expected.value)) as found:
        wrong_calls("bp")[name]()
    assert str(found.value).replace("bp:0", "cpu") == str(expected.value)


def test_masks_of_another_device_are_refused() -> None:
    x, mask = torch.randn(1, 2, 20, 16, device="bp"), create_block_mask(causal, None, None, 20, 20, device="cpu")
    with pytest.raises(RuntimeError, match="block_mask to be on the same device but got bp:0 and cpu"):
        flex_attention(x, x, x, None, mask)


def test_kernels_that_do_not_exist_are_refused() -> None:
    x = torch.randn(1, 2, 20, 16, device="bp")
    for backend in ("FLASH", "TRITON", "TRITON_DECODE"):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=f"BACKEND='{backend}'.*bp"):
            torch.compile(flex_attention)(x, x, x, kernel_options={"BACKEND": backend})
