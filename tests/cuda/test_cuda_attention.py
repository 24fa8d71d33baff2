"""Tests cuDNN's attention on emulated CUDA devices.

The library is the emulator's. It checks the graphs of operations strictly, computes them one by one, spoils workspaces,
and offers engines that must not be chosen. Without a word to the contrary, operators that fall back raise an error.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Result = Callable[..., "subprocess.CompletedProcess[str]"]
Run = Callable[..., str]

ON_DEVICE = {"TORCH_BACKPLANE_FALLBACK": "error"}

PREAMBLE = """
import itertools, warnings
import torch
from functools import partial
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_backplane import _C, plans
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message="CUDA initialization")  # a CUDA build of PyTorch looks for devices, too
torch.manual_seed(0)
bp = torch.backends.bp
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
attend = F.scaled_dot_product_attention

def made(batch, heads, shared, queries, keys, columns, value_columns, dtype=torch.float16):
    sizes = ((heads, queries, columns), (shared, keys, columns), (shared, keys, value_columns))
    return [torch.randn(batch, *size).to(dtype) for size in sizes]

def same(found, expected, dtype=None):
    assert found.device.type == "bp" and found.shape == expected.shape
    scale = expected.float().square().mean().sqrt().item() or 1.0
    torch.testing.assert_close(
        found.cpu().float(), expected.float(), rtol=0, atol=TOLERANCES[dtype or found.dtype] * scale)

def compare(*given, mask=None, **options):
    \"\"\"Compares the result and the gradients with those of the CPU's products and softmax in float32.\"\"\"
    made = []
    shares = given[0].shape[1] != given[1].shape[1]
    for device, dtype in (("bp", given[0].dtype), ("cpu", torch.float32)):
        operands = [one.detach().to(device).to(dtype).requires_grad_() for one in given]
        there = mask if mask is None else mask.to(device, torch.bool if mask.dtype == torch.bool else dtype)
        with sdpa_kernel([SDPBackend.MATH] if device == "cpu" else list(FUSED)):
            out = attend(*operands, attn_mask=there, enable_gqa=shares, **options)
            factor = torch.linspace(-1, 1, out.numel()).view(out.shape).to(given[0].dtype)
            grads = torch.autograd.grad(out, operands, factor.to(device, dtype))
        made.append((out.detach(), *grads))
    for found, expected in zip(*made, strict=True):
        same(found, expected)
    return made[0]

FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
         SDPBackend.OVERRIDEABLE)

def calls(*given, backward=False, **options):
    \"\"\"How many calls of cuDNN the plan has.\"\"\"
    there = [one.to("bp") for one in given]
    if not backward:
        return plans.explain(partial(attend, **options), *there).count("call cuDNN attention ")
    out, logarithm, _ = torch.ops.backplane.attention(*there, None, False, 0.25, None)
    def gradients(query, key, value, out, logarithm):
        wanted = [True, True, True, False]
        given = (out, query, key, value, None, out, logarithm, False, 0.25, None, None, wanted)
        return torch.ops.backplane.attention_backward(*given)[:3]
    return plans.explain(gradients, *there, out, logarithm).count("call cuDNN attention_backward ")
"""


def test_attention_calls_the_library(run: Run) -> None:
    code = """
given = made(2, 4, 4, 24, 40, 16, 16)
assert calls(*given) == 1 and calls(*given, backward=True) == 1
assert torch.ops.aten._fused_sdp_choice(*(one.to("bp") for one in given)) == SDPBackend.OVERRIDEABLE.value
for causal in (False, True):
    compare(*given, is_causal=causal)
there = [one.to("bp:3") for one in given]
same(attend(*there), attend(*(one.float() for one in given)))
# The logarithms of the denominators are what other implementations store.
out, logarithm, *_ = torch.ops.aten._scaled_dot_product_fused_attention_overrideable(*there, scale=0.3)
scores = given[0].float() @ given[1].float().mT * 0.3
assert logarithm.dtype == torch.float32 and logarithm.is_contiguous()
torch.testing.assert_close(logarithm.cpu(), scores.logsumexp(-1), rtol=1e-3, atol=1e-3)
print("done")
"""
    assert run(PREAMBLE + code, **ON_DEVICE) == "done\n"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_and_gradients(run: Run, dtype: str) -> None:
    """Sizes that are no multiples of tiles, grouped heads, other columns of values, scales."""
    code = f"""
shapes = [(1, 1, 1, 1, 9, 8, 8), (2, 4, 2, 33, 17, 16, 8), (1, 6, 1, 5, 70, 8, 24), (3, 2, 2, 20, 20, 32, 32)]
for shape, causal in itertools.product(shapes, (False, True)):
    given = made(*shape, dtype=torch.{dtype})
    assert calls(*given, is_causal=causal, enable_gqa=True) == 1
    compare(*given, is_causal=causal)
    compare(*given, is_causal=causal, scale=0.25)
print("done")
"""
    assert run(PREAMBLE + code, **ON_DEVICE) == "done\n"


def test_masks(run: Run) -> None:
    """Masks of all shapes; queries that are left with no key give 0."""
    code = """
given = made(2, 4, 2, 12, 19, 16, 16)
every = [torch.randn(12, 19), torch.randn(1, 4, 12, 19), torch.randn(2, 1, 12, 19), torch.randn(2, 4, 12, 19),
         torch.randn(2, 1, 1, 19), torch.randn(12, 1), torch.rand(12, 19) > 0.4, torch.rand(2, 1, 1, 19) > 0.3]
for mask in every:
    assert calls(*given, attn_mask=mask.to("bp", torch.bool if mask.dtype == torch.bool else torch.float16),
                 enable_gqa=True) == 1
    compare(*given, mask=mask)
for mask in (torch.rand(2, 1, 12, 19) > 0.3, torch.randn(12, 19)):
    mask[..., 3, :] = False if mask.dtype == torch.bool else -torch.inf
    out, *gradients = compare(*given, mask=mask)
    assert not out[:, :, 3].any() and not gradients[0][:, :, 3].any()
# What the library does not compute: a mask's gradient, dropout, other dtypes, columns that are no multiple of 8.
mask = torch.randn(12, 19, dtype=torch.float16, device="bp", requires_grad=True)
there = [one.to("bp") for one in given]
(gradient,) = torch.autograd.grad(attend(*there, attn_mask=mask, enable_gqa=True).float().sum(), [mask])
assert gradient.isfinite().all()
assert calls(*given, dropout_p=0.5, enable_gqa=True) == 0
assert calls(*(one.float() for one in given), enable_gqa=True) == 0
odd = made(1, 2, 2, 6, 7, 12, 12)
assert calls(*odd) == 0
compare(*odd)
single = made(1, 2, 2, 1, 1, 8, 8)
assert calls(*single) == 1 and calls(*single, backward=True) == 0
compare(*single)
print("done")
"""
    assert run(PREAMBLE + code, **ON_DEVICE) == "done\n"


def test_layouts_and_sizes_that_change(run: Run) -> None:
    """Strided and unaligned operands, and gradients of any layout."""
    code = """
for batch, length, heads, columns in ((2, 10, 4, 16), (1, 23, 2, 8), (3, 7, 1, 24)):
    packed = torch.randn(batch, length, 3 * heads * columns).half()
    q, k, v = (one.view(batch, length, heads, columns).transpose(1, 2) for one in packed.chunk(3, -1))
    found = compare(q, k, v, is_causal=True)
    assert found[0].stride() == torch.empty_like(q).stride()
    there = packed.to("bp").requires_grad_()
    parts = (one.view(batch, length, heads, columns).transpose(1, 2) for one in there.chunk(3, -1))
    out = attend(*parts, is_causal=True)
    assert out.stride() == torch.empty_like(q).stride()
    out.sum().backward()  # the gradient is expanded
    reference = packed.float().requires_grad_()
    parts = (one.view(batch, length, heads, columns).transpose(1, 2) for one in reference.chunk(3, -1))
    attend(*parts, is_causal=True).sum().backward()
    same(there.grad, reference.grad)
    wide = torch.randn(batch, heads, length, columns + 3).half()
    for one in (wide[..., 3:], wide[..., 1:-2], wide[..., :-3].flip(2), wide[..., :-3].contiguous().mT.contiguous().mT):
        compare(one, k, v)
        compare(q, one, one)
    compare(q, k[:, :1].expand(-1, heads, -1, -1), v)
print("done")
"""
    assert run(PREAMBLE + code, **ON_DEVICE) == "done\n"


def test_switches_and_workspace(run: Run) -> None:
    code = """
given = made(2, 2, 2, 9, 12, 16, 16)
there = [one.to("bp") for one in given]
expected = attend(*(one.float() for one in given))
assert calls(*given) == 1
for chosen, uses in ((SDPBackend.CUDNN_ATTENTION, 1), (SDPBackend.FLASH_ATTENTION, 0),
                     (SDPBackend.EFFICIENT_ATTENTION, 0), (SDPBackend.OVERRIDEABLE, 0), (SDPBackend.MATH, 0)):
    with sdpa_kernel(chosen):
        assert calls(*given) == uses, chosen
        same(attend(*there), expected)
assert bp.cudnn_sdp_enabled()
bp.enable_cudnn_sdp(False)
assert not torch.backends.cuda.cudnn_sdp_enabled() and calls(*given) == 0 and calls(*given, backward=True) == 0
bp.enable_cudnn_sdp(True)
same(attend(*there), expected)
for library, uses in (("generated", 0), ("driver", 1), ("host", 1), ("default", 1)):
    bp.preferred_attention_library(library)
    assert calls(*given) == uses and calls(*given, backward=True) == uses, library
    compare(*given)
before = bp.blas_workspace_size()
bp.blas_workspace_size(64)  # less than the emulated library's
assert calls(*given) == 0
same(attend(*there), expected)
assert bp.without_workspace()["attention: driver"]
bp.blas_workspace_size(before)
torch.use_deterministic_algorithms(True)
assert calls(*given) == 1 and calls(*given, backward=True) == 0
compare(*given)
torch.use_deterministic_algorithms(False)
assert calls(*given, backward=True) == 1
print("done")
"""
    assert run(PREAMBLE + code, **ON_DEVICE) == "done\n"


def test_training_and_graphs(run: Run) -> None:
    code = """
def losses(device, dtype, capture):
    torch.manual_seed(1)
    model = torch.nn.MultiheadAttention(32, 4, batch_first=True).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(2, 11, 32).to(device, dtype)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(11).to(device, dtype)
    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = model(x, x, x, attn_mask=mask, need_weights=False)[0].float().square().mean()
        loss.backward()
        optimizer.step()
        return loss
    found = [step().item() for _ in range(3)]
    if not capture:
        return found + [step().item() for _ in range(3)]
    graph = torch.bp.Graph()
    torch.bp.synchronize()
    with torch.bp.graph(graph):
        loss = step()
    for _ in range(3):
        graph.replay()
        found.append(loss.item())
    return found

expected = losses("cpu", torch.float32, False)
for capture in (False, True):
    torch.testing.assert_close(losses("bp", torch.float16, capture), expected, rtol=2e-2, atol=1e-3)
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


def test_compiled_graphs_call_the_library(run: Run) -> None:
    code = """
from torch.profiler import ProfilerActivity, profile
warnings.filterwarnings("ignore", category=DeprecationWarning)  # of PyTorch's own modules
def model(q, k, v):
    return attend(q * 2, k, v, is_causal=True).relu()
compiled = torch.compile(model)
for length in (8, 8, 13):
    given = made(1, 2, 2, length, length, 16, 16)
    found = []
    for device, dtype, function in (("bp", torch.float16, compiled), ("cpu", torch.float32, model)):
        operands = [one.to(device, dtype).requires_grad_() for one in given]
        out = function(*operands)
        found.append([out.detach(), *torch.autograd.grad(out.sum(), operands)])
    for ours, theirs in zip(*found, strict=True):
        same(ours, theirs)
there = [one.to("bp").requires_grad_() for one in given]
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as profiled:
    compiled(*there).sum().backward()
    torch.bp.synchronize()
names = [one.name for one in profiled.events()]
assert names.count("cuDNN attention") == 1 and names.count("cuDNN attention_backward") == 1, names
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


@pytest.mark.parametrize("function", ["cudnnCreate", "cudnnBackendFinalize", "cudnnBackendExecute", "cudnnSetStream"])
def test_a_library_that_fails(run: Run, function: str) -> None:
    """Generated kernels compute then, with a warning that names the library and the status."""
    code = """
given = made(1, 2, 2, 9, 12, 16, 16)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compare(*given)
    torch.bp.synchronize()
assert len(caught) == 2, [str(one.message) for one in caught]
for one, computes in zip(caught, ("attention", "gradients of attention"), strict=True):
    assert str(one.message).startswith(f"{computes} no longer use cuDNN on bp:0, which failed: "), one.message
    assert "5000" in str(one.message) and "CUDNN_STATUS_EXECUTION_FAILED" in str(one.message), one.message
compare(*given)
assert calls(*given) == 0 and calls(*given, backward=True) == 0
print("done")
"""
    faults = ",".join(f"{function}:{number}:5000" for number in range(1, 400))
    assert run(PREAMBLE + code, **ON_DEVICE, CUDA_EMULATOR_FAULTS=faults) == "done\n"


@pytest.mark.parametrize(
    "settings", [{"TORCH_BACKPLANE_CUDNN_LIBRARY": "none"}, {"CUDNN_EMULATOR_VERSION": "91500"}], ids=["none", "old"]
)
def test_no_library(run: Run, settings: dict[str, str]) -> None:
    """Without cuDNN, and with a version that is too old, generated kernels compute attention."""
    code = """
given = made(1, 2, 2, 9, 12, 16, 16)
assert calls(*given) == 0 and calls(*given, backward=True) == 0
compare(*given)
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # one of the names of the fused attention
    compare(*given)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    bp.preferred_attention_library("driver")
assert "no driver provides a library for attention" in str(caught[0].message), caught
print("done")
"""
    assert run(PREAMBLE + code, **ON_DEVICE, **settings) == "done\n"
