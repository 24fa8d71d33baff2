"""`flex_attention` on bp, eager and compiled: equal to the CPU's, and gradients equal to those of its formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from flex_cases import (
    CASES,
    WITH_GRADIENTS,
    Case,
    agree,
    alibi,
    attend,
    capped,
    causal,
    formula,
    on,
    relative_bias,
    window,
)
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention, or_masks
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from torch_backplane import drivers
from torch_backplane.planning.launch import dialect_of

pytestmark = pytest.mark.filterwarnings("ignore")
needs_kernels = pytest.mark.skipif(not drivers.device(0).properties.dialect, reason="the devices have no dialect")

@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    before = prefer()
    yield
    prefer(before)


def prefer(library: str | None = None) -> str:
    """Prefers a library for attention until the test ends. Returns the present one."""
    return torch.backends.bp.preferred_attention_library(library)  # type: ignore[attr-defined, no-any-return]


def in_one_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled with generated kernels for attention of any size, as its gradients are."""
    if not drivers.device(0).properties.dialect:
        pytest.skip("host devices generate no kernels")
    prefer("generated")
    return torch.compile(function)


FORMS = {"eager": lambda function: function, "compiled": torch.compile, "one pass": in_one_pass}


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


@pytest.mark.parametrize("library", ["default", "generated"])
def test_lengths_can_be_dynamic(library: str) -> None:
    def windowed(query: Tensor, key: Tensor, value: Tensor, cap: int) -> Tensor:
        mask = create_block_mask(window, None, None, query.shape[2], key.shape[2], device=query.device)
        return flex_attention(query, key, value, lambda score, b, h, i, j: cap * torch.tanh(score / cap), mask)

    prefer(library)
    compiled = torch.compile(windowed, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for length, cap in ((33, 5), (50, 7), (120, 5)):
        inputs = [torch.randn(2, 2, length, 16) for _ in range(3)]
        ours = on("bp", inputs, True)
        found = compiled(*ours, cap)
        theirs = on("cpu", inputs, True)
        case = Case((2, 2, length, 16), (2, length, 16), lambda: capped(cap), lambda: window)  # noqa: B023
        out, _ = formula(case, theirs, [])
        agree(found, out, 1e-4)
        out.sum().backward()
        found.sum().backward()
        for given, reference in zip(ours, theirs, strict=True):
            agree(given.grad, reference.grad, 1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def code_of(function: Callable[..., Any], *given: Any) -> tuple[Any, str]:
    """The result, and the wrappers of the graphs."""
    with config.patch(force_disable_caches=True):
        result, codes = run_and_get_code(in_one_pass(function), *given)
    return result, "\n".join(codes)


def is_in_one_pass(code: str) -> bool:
    return "torch.ops.backplane.flex_attention.default" in code


def gradients_of(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[list[Any], str]:
    """The gradients of the function's compiled form, and the wrappers of its graphs."""
    ours = on("bp", inputs, True)
    compiled = in_one_pass(function)

    def train() -> list[Any]:
        compiled(*ours).backward(grad.to("bp"))
        return [one.grad for one in ours]

    with config.patch(force_disable_caches=True):
        gradients, codes = run_and_get_code(train)
    return gradients, "\n".join(codes)


def has_gradients_in_one_pass(code: str) -> bool:
    return "torch.ops.backplane.flex_attention_backward.default" in code


def expected_gradients(inputs: Sequence[Tensor], grad: Tensor, allowed: Tensor) -> list[Any]:
    theirs = on("cpu", inputs, True)
    scaled_dot_product_attention(*theirs, attn_mask=allowed).backward(grad)
    return [one.grad for one in theirs]


@pytest.mark.skipif(torch.__version__ < "2.12", reason="PyTorch's flex_attention refuses floats that change")
@pytest.mark.parametrize("form", ["compiled", "one pass"])
def test_captured_floats_can_change(form: str) -> None:
    def attend_with(query: Tensor, key: Tensor, value: Tensor, cap: float) -> Tensor:
        return flex_attention(query, key, value, capped(cap))

    function = FORMS[form](attend_with)
    for cap in (5.5, 7.25, 2.1, 3.0625):
        inputs = [torch.randn(1, 2, 40, 16) for _ in range(3)]
        found = function(*on("bp", inputs, False), cap)
        out, _ = formula(Case((1, 2, 40, 16), (2, 40, 16), lambda: capped(cap)), inputs, [])  # noqa: B023
        agree(found, out, 1e-4)


@needs_kernels
def test_graphs_refuse_fake_tensors() -> None:
    """Dynamo compiles parts of PyTorch's tracing after graph breaks, as for captured floats that change in training."""

    def with_scalar(x: Tensor, scalar: Tensor) -> Tensor:
        return x * scalar

    compiled = torch.compile(with_scalar)
    x, scalar = torch.randn(3, device="bp"), torch.tensor(2.0)
    agree(compiled(x, scalar), x.cpu() * 2, 1e-5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(TypeError, match="got fake tensors"):
        compiled(mode.from_tensor(x), mode.from_tensor(scalar))


@pytest.mark.parametrize("masked", [True, False])
def test_blocks_that_the_mask_excludes_are_not_read(masked: bool) -> None:
    """A product with NaN would be NaN, also with a weight of 0."""
    query, key, value = (torch.randn(1, 2, 256, 16) for _ in range(3))
    key[:, :, 64:128], value[:, :, 64:128] = torch.nan, torch.nan

    def without_second_block(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((j < 64) | (j >= 128)) & ((i >= j) | (not masked))

    mask = create_block_mask(without_second_block, None, None, 256, 256, device="bp", BLOCK_SIZE=64)
    found, code = code_of(flex_attention, *on("bp", (query, key, value), False), None, mask)
    assert is_in_one_pass(code)
    kept = [torch.cat([one[:, :, :64], one[:, :, 128:]], 2) for one in (key, value)]
    places = torch.cat([torch.arange(64), torch.arange(128, 256)])
    allowed = (torch.arange(256)[:, None] >= places) if masked else None
    agree(found, scaled_dot_product_attention(query, *kept, attn_mask=allowed), 1e-4)


def test_gradients_do_not_read_blocks_that_the_mask_excludes() -> None:
    inputs = [torch.randn(1, 2, 256, 16) for _ in range(3)]
    for one in inputs:
        one[:, :, 64:128] = torch.nan

    def without_second_block(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((i < 64) | (i >= 128)) & ((j < 64) | (j >= 128))

    mask = create_block_mask(without_second_block, None, None, 256, 256, device="bp", BLOCK_SIZE=64)
    grad = torch.randn(1, 2, 256, 16)
    found, code = gradients_of(lambda *given: flex_attention(*given, block_mask=mask), inputs, grad)
    assert has_gradients_in_one_pass(code)
    kept = [torch.cat([one[:, :, :64], one[:, :, 128:]], 2) for one in (*inputs, grad)]
    expected = expected_gradients(kept[:3], kept[3], torch.ones(192, 192, dtype=torch.bool))
    for ours, theirs in zip(found, expected, strict=True):
        agree(torch.cat([ours[:, :, :64], ours[:, :, 128:]], 2), theirs, 1e-4)
        assert not ours[:, :, 64:128].any()


def test_only_listed_blocks_count() -> None:
    """Full blocks are not masked. This mask lists as full, or not at all, what its function decides otherwise."""
    query, key, value = (torch.randn(2, 2, 96, 16) for _ in range(3))
    full = torch.tensor([[0, 2, 1], [1, 0, 2], [2, 1, 0]], dtype=torch.int32).reshape(1, 1, 3, 3)
    counts, full_counts = torch.zeros(1, 1, 3, dtype=torch.int32), torch.tensor([[[2, 1, 2]]], dtype=torch.int32)
    tensors = [one.to("bp") for one in (counts, torch.zeros_like(full), full_counts, full)]
    mask = BlockMask.from_kv_blocks(
        *tensors, BLOCK_SIZE=32, mask_mod=lambda b, h, i, j: i < 0, seq_lengths=(96, 96)
    )
    function = lambda *given: flex_attention(*given, block_mask=mask)  # noqa: E731
    found, code = code_of(function, *on("bp", (query, key, value), False))
    assert is_in_one_pass(code)
    allowed = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 1, 1]], dtype=torch.bool)
    allowed = allowed.repeat_interleave(32, 0).repeat_interleave(32, 1)
    agree(found, scaled_dot_product_attention(query, key, value, attn_mask=allowed), 1e-4)
    grad = torch.randn_like(query)
    gradients, code = gradients_of(function, (query, key, value), grad)
    assert has_gradients_in_one_pass(code)
    agree(gradients, expected_gradients((query, key, value), grad, allowed), 1e-4)


def test_changed_masks_are_data() -> None:
    """Masks of the same shape need no other graph."""
    query, key, value = (torch.randn(2, 2, 100, 16) for _ in range(3))

    def attend_to(owners: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        same = lambda b, h, i, j: owners[b, i] == owners[b, j]  # noqa: E731
        mask = create_block_mask(same, 2, None, 100, 100, device=query.device, BLOCK_SIZE=32)
        return flex_attention(query, key, value, block_mask=mask)

    function = in_one_pass(attend_to)
    torch._dynamo.utils.counters.clear()
    for length in (20, 33, 70, 20):
        owners = torch.stack([torch.arange(100) // length, torch.arange(100).flip(0) // length])
        found = function(owners.to("bp"), *on("bp", (query, key, value), False))
        allowed = owners[:, None, :, None] == owners[:, None, None]
        agree(found, scaled_dot_product_attention(query, key, value, attn_mask=allowed), 1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("trains", [False, True])
def test_memory_is_linear_in_the_length(trains: bool) -> None:
    query, key, value = on("bp", [torch.randn(1, 1, 4096, 16) for _ in range(3)], trains)
    mask = create_block_mask(window, None, None, 4096, 4096, device="bp")
    function = in_one_pass(flex_attention)

    def call() -> None:
        found = function(query, key, value, relative_bias, mask)
        if trains:
            torch.autograd.grad(found, (query, key, value), torch.ones_like(found))

    call()
    torch.bp.synchronize()  # type: ignore[attr-defined]
    before = torch.bp.memory_allocated()  # type: ignore[attr-defined]
    torch.bp.reset_peak_memory_stats()  # type: ignore[attr-defined]
    call()
    used = torch.bp.max_memory_allocated() - before  # type: ignore[attr-defined]
    assert 0 < used < (8 if trains else 4) * query.nbytes


def test_gradients_of_the_logarithms_alone() -> None:
    inputs = CASES["soft cap, other lengths"].inputs()
    theirs = on("cpu", inputs, True)
    _, logarithms = formula(CASES["soft cap, other lengths"], theirs, [])
    grad = torch.randn_like(logarithms)
    logarithms.backward(grad)

    def logarithms_of(*given: Tensor) -> Tensor:
        return attend(CASES["soft cap, other lengths"], list(given), [], return_aux=AuxRequest(lse=True))[1].lse

    found, code = gradients_of(logarithms_of, inputs, grad)
    assert has_gradients_in_one_pass(code)
    agree(found[:2], [one.grad for one in theirs[:2]], 1e-4)
    assert not found[2].any()


def test_what_stays_composed() -> None:
    query, key, value = on("bp", [torch.randn(1, 2, 30, 16) for _ in range(3)], False)
    vectors = torch.randn(30, 8, device="bp")

    def products(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (vectors[i] * vectors[j]).sum()

    found, code = code_of(lambda *given: flex_attention(*given, products), query, key, value)
    assert not is_in_one_pass(code)
    bias = vectors.cpu() @ vectors.cpu().T
    agree(found, scaled_dot_product_attention(query.cpu(), key.cpu(), value.cpu(), attn_mask=bias), 1e-4)
    _, code = code_of(lambda *given: flex_attention(*given, relative_bias), query, key, value)
    assert is_in_one_pass(code)


@pytest.mark.parametrize("learned", [False, True])
def test_gradients_are_composed_if_a_captured_tensor_needs_one(learned: bool) -> None:
    inputs, slopes = [torch.randn(1, 4, 30, 16) for _ in range(3)], torch.rand(4)
    grad, captured = torch.randn_like(inputs[0]), on("bp", [slopes], learned)[0]
    given = [*inputs, slopes] if learned else inputs
    found, code = gradients_of(lambda q, k, v, a=captured: flex_attention(q, k, v, alibi(a)), given, grad)
    assert is_in_one_pass(code)
    assert has_gradients_in_one_pass(code) != learned
    theirs, their_slopes = on("cpu", inputs, True), slopes.clone().requires_grad_()
    distances = torch.arange(30) - torch.arange(30)[:, None]
    bias = their_slopes[:, None, None] * distances
    scaled_dot_product_attention(*theirs, attn_mask=bias).backward(grad)
    agree(found, [one.grad for one in (*theirs, their_slopes)][: len(given)], 1e-4)


@needs_kernels
@pytest.mark.parametrize(
    ("heads", "length", "masked", "expected"),
    [(1, 64, True, False), (1, 4096, True, False), (1, 4096, False, False), (8, 4096, True, True)],
)
def test_cpus_compute_in_one_pass_when_there_are_many_scores(
    heads: int, length: int, masked: bool, expected: bool
) -> None:
    if dialect_of(0).target.simt:
        expected = True
    query = torch.randn(1, heads, length, 16, device="bp")
    mask = create_block_mask(window, None, None, length, length, device="bp") if masked else None
    with config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(torch.compile(flex_attention), query, query, query, None, mask)
    assert is_in_one_pass("\n".join(codes)) == expected


def test_captured_indices_out_of_range() -> None:
    query = torch.randn(1, 2, 30, 16, device="bp")
    table = torch.randn(20, device="bp")
    function = in_one_pass(lambda query: flex_attention(query, query, query, lambda s, b, h, i, j: s + table[i]))
    function(query)
    with pytest.raises(IndexError, match=r"flex_attention: index \d+ is out of bounds for dimension with size 20"):
        torch.bp.synchronize()  # type: ignore[attr-defined]

    def from_the_end(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[-1 - j % 20]

    negative = in_one_pass(lambda query: flex_attention(query, query, query, from_the_end))
    expected = scaled_dot_product_attention(
        *[query.cpu()] * 3, attn_mask=table.cpu().flip(0)[torch.arange(30) % 20].expand(30, 30)
    )
    agree(negative(query), expected, 1e-4)


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


@pytest.mark.parametrize("form", ["compiled", "one pass"])
def test_keys_that_all_sequences_share(form: str) -> None:
    query, key, value = torch.randn(3, 2, 20, 16), torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    gradients = []
    for function in (flex_attention, FORMS[form](flex_attention)):
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


@pytest.mark.parametrize("form", ["compiled", "one pass"])
def test_kernels_that_do_not_exist_are_refused(form: str) -> None:
    x = torch.randn(1, 2, 20, 16, device="bp")
    for backend in ("FLASH", "TRITON", "TRITON_DECODE"):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=f"BACKEND='{backend}'.*bp"):
            FORMS[form](lambda x, named=backend: flex_attention(x, x, x, kernel_options={"BACKEND": named}))(x)
