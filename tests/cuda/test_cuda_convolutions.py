"""Tests cuDNN's convolutions on emulated CUDA devices.

The library is the emulator's. It checks arguments, spoils workspaces, and offers engines that must not be chosen.
Without a word to the contrary, operators that fall back raise an error.
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
from library_programs import error_of
from functools import partial
from torch.nn import functional as F
from torch_backplane import _C, plans
warnings.simplefilter("error")
torch.manual_seed(0)
bp = torch.backends.bp
LAYOUTS = {3: [torch.contiguous_format], 4: [torch.contiguous_format, torch.channels_last],
           5: [torch.contiguous_format, torch.channels_last_3d]}

def tolerance(dtype):
    return {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]

def same(found, expected):
    assert found.device.type == "bp" and found.dtype == expected.dtype and found.shape == expected.shape
    strides = [[one.stride(d) for d in range(one.dim()) if one.size(d) > 1] for one in (found, expected)]
    # Some of PyTorch's CPU kernels for float64 return other layouts.
    assert strides[0] == strides[1] or found.dtype == torch.float64, (found.shape, strides)
    close = tolerance(found.dtype)
    torch.testing.assert_close(found.cpu(), expected, rtol=close, atol=close)

def leaf(tensor, device):
    return tensor.detach().to(device).requires_grad_()

def compare(function, *given):
    \"\"\"Compares values and gradients with those of the CPU.\"\"\"
    made = []
    for device in ("cpu", "bp"):
        operands = [leaf(one, device) for one in given]
        out = function(*operands)
        factor = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
        grads = torch.autograd.grad((out * factor.to(device)).sum(), operands)
        made.append((out.detach(), *grads))
    for found, expected in zip(made[1], made[0], strict=True):
        same(found, expected)

def calls(function, *given):
    \"\"\"How many calls of cuDNN the plan has.\"\"\"
    return plans.explain(function, *(one.to("bp") for one in given)).count("call cuDNN convolution ")
"""


def test_float32_is_computed_in_tf32_while_it_is_allowed(run: Run) -> None:
    code = """
x, w = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)

def in_tf32(device, convert):
    given = [leaf(convert(one), device) for one in (x, w)]
    out = F.conv2d(*given, padding=1)
    return [out.detach(), *torch.autograd.grad((out * out.detach()).sum(), given)]

def seen():
    errors = [(found.cpu() - exact).abs().max().item() / exact.abs().max().item()
              for found, exact in zip(in_tf32("bp", torch.Tensor.float), in_tf32("cpu", torch.Tensor.double))]
    assert all(1e-5 < one < 1e-2 for one in errors) or all(one < 1e-6 for one in errors), errors
    return errors[0] > 1e-5

found = [seen(), seen()]  # by default, as in PyTorch
for allowed in (False, True, False):
    bp.conv.allow_tf32 = allowed
    found.append(seen())
bp.conv.fp32_precision = "none"
torch.backends.cudnn.conv.fp32_precision = "ieee"
found.append(seen())
torch.backends.cudnn.conv.fp32_precision = "tf32"
with bp.conv.flags(allow_tf32=False):
    found.append(seen())
found.append(seen())
print(*map(int, found))
"""
    assert run(PREAMBLE + code, **ON_DEVICE, NVIDIA_TF32_OVERRIDE="1") == "1 1 0 1 0 0 0 1\n"


def test_convolutions_call_the_library(run: Run) -> None:
    code = """
x, w, b = torch.randn(2, 4, 7, 6), torch.randn(6, 2, 3, 3), torch.randn(6)
conv = partial(F.conv2d, stride=2, padding=1, groups=2)
assert calls(conv, x, w, b) == 1
same(conv(x.to("bp"), w.to("bp"), b.to("bp")), conv(x, w, b))
same(conv(x.to("bp:3"), w.to("bp:3"), b.to("bp:3")), conv(x, w, b))
assert calls(partial(F.conv_transpose2d, stride=2), x, w.mT.contiguous()[:4]) == 1
backward = partial(torch.ops.aten.convolution_backward, bias_sizes=[6], stride=[2, 2], padding=[1, 1],
                   dilation=[1, 1], transposed=False, output_padding=[0, 0], groups=2)
grad = torch.randn(conv(x, w).shape)
for mask in ([True, True, True], [False, True, True], [True, False, False], [False, False, True]):
    function = partial(backward, output_mask=mask)
    assert calls(function, grad, x, w) == sum(mask[:2]), mask
    results = zip(mask, function(grad.to("bp"), x.to("bp"), w.to("bp")), function(grad, x, w), strict=True)
    for asked, found, expected in results:
        assert asked == (found is not None)
        if asked:
            same(found, expected)
assert bp.is_acceptable(x.to("bp"))
print("done")
"""
    assert run(PREAMBLE + code, **ON_DEVICE) == "done\n"


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_values_and_gradients(run: Run, dtype: str) -> None:
    code = f"""
dtype = torch.{dtype}
settings = [
    dict(), dict(stride=2, padding=1), dict(dilation=2, padding=2), dict(groups=2, padding=1),
    dict(stride=3, padding=2, dilation=2, groups=4),
]
for rank, options, bias in itertools.product((1, 2, 3), settings, (False, True)):
    groups = options.get("groups", 1)
    x = torch.randn(2, 4, *(9, 8, 7)[:rank], dtype=dtype)
    w = torch.randn(8, 4 // groups, *(3, 1, 2)[:rank], dtype=dtype)
    given = [x, w, torch.randn(8, dtype=dtype)] if bias else [x, w]
    conv = partial((F.conv1d, F.conv2d, F.conv3d)[rank - 1], **options)
    for layout in LAYOUTS[rank + 2]:
        compare(conv, x.contiguous(memory_format=layout), *given[1:])
    transposed = partial((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1], **options)
    w = torch.randn(4, 8 // groups, *w.shape[2:], dtype=dtype)
    for layout in LAYOUTS[rank + 2]:
        compare(transposed, x.contiguous(memory_format=layout), w, *given[2:])
padded = partial(F.conv_transpose2d, stride=(3, 2), output_padding=(2, 1), padding=1)
compare(padded, torch.randn(1, 3, 4, 5, dtype=dtype), torch.randn(3, 2, 3, 3, dtype=dtype))
print("done")
"""
    assert run(PREAMBLE + code, **ON_DEVICE) == "done\n"


def test_layouts_and_sizes_that_change(run: Run) -> None:
    """Views, memory that is not aligned, a library's refusal, and other sizes: each call is as on the CPU."""
    code = """
w = torch.randn(5, 3, 3, 3)
conv = partial(F.conv2d, padding=1)
for n, height, width in ((1, 5, 5), (4, 6, 3), (2, 5, 5), (0, 5, 5), (1, 40, 2)):
    wide = torch.randn(n, 3, height, width + 3)
    for x in (wide[..., 3:], wide[..., 1:-2], wide.mT[:, :, :width + 1], wide.flip(0)):
        compare(conv, x, w)
flat = torch.randn(1 + 3 * 25)
for start in (0, 1):  # float32 at 4 bytes from an aligned address
    for device in ("cpu", "bp"):
        x = flat.to(device)[start:start + 75].view(1, 3, 5, 5)
        found = conv(x, w.to(device))
        expected = found if device == "cpu" else expected
    same(found, expected)
# No engine: generated kernels compute it.
x, wide = torch.randn(2, 3, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last), w.double()
assert calls(conv, x, wide) == 0 and calls(conv, x.contiguous(), wide.contiguous()) == 1
compare(conv, x, wide)
assert bp.is_acceptable(x.to("bp")) and not bp.is_acceptable(x.to(torch.complex64).to("bp"))
assert not bp.is_acceptable(x)
print("done")
"""
    assert run(PREAMBLE + code, **ON_DEVICE) == "done\n"


def test_preferences_and_workspace(run: Run) -> None:
    code = """
x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
given = [x.to("bp"), w.to("bp")]
expected = F.conv2d(x, w)
assert calls(F.conv2d, x, w) == 1
with bp.conv.flags(enabled=False):
    assert calls(F.conv2d, x, w) == 0 and not bp.is_acceptable(given[0])
    same(F.conv2d(*given), expected)
assert calls(F.conv2d, x, w) == 1
before = bp.blas_workspace_size()
bp.blas_workspace_size(64)  # less than the emulated library's
assert calls(F.conv2d, x, w) == 0
same(F.conv2d(*given), expected)
assert bp.without_workspace()["convolutions: driver"]
bp.blas_workspace_size(before)
assert calls(F.conv2d, x, w) == 1
torch.use_deterministic_algorithms(True)
same(F.conv2d(*given), expected)
torch.use_deterministic_algorithms(False)
with bp.conv.flags(enabled=True, benchmark=True):
    for _ in range(3):
        same(F.conv2d(*given), expected)
print("done")
"""
    assert run(PREAMBLE + code, **ON_DEVICE) == "done\n"


def test_training_and_graphs(run: Run) -> None:
    code = """
def losses(device, capture):
    torch.manual_seed(1)
    convolutions = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3, stride=2)
    model = torch.nn.Sequential(*convolutions, torch.nn.Flatten(), torch.nn.Linear(4 * 9, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(4, 3, 8, 8).to(device), torch.tensor([0, 1, 1, 0]).to(device)
    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
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

expected = losses("cpu", False)
for capture in (False, True):
    torch.testing.assert_close(losses("bp", capture), expected, rtol=1e-4, atol=1e-4)
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


def test_compiled_graphs_call_the_library(run: Run) -> None:
    code = """
import copy
from torch.profiler import ProfilerActivity, profile
warnings.filterwarnings("ignore", category=DeprecationWarning)  # of PyTorch's own modules
first, second = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 4, 3)
def model(first, second, x):
    return second(first(x).relu()).sigmoid()
on_bp = [copy.deepcopy(one).to("bp") for one in (first, second)]
compiled = torch.compile(model)
with torch.no_grad():
    for size in (8, 8, 9):
        x = torch.randn(2, 3, size, size)
        found, expected = compiled(*on_bp, x.to("bp")), model(first, second, x)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as profiled:
        compiled(*on_bp, x.to("bp"))
        torch.bp.synchronize()
names = [one.name for one in profiled.events()]
assert names.count("cuDNN convolution") == 2, names
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


def test_threads_and_streams(run: Run) -> None:
    code = """
import threading
x, weights = torch.randn(2, 3, 9, 9), [torch.randn(4, 3, size, size) for size in (1, 2, 3, 4)]
expected = [F.conv2d(x, w) for w in weights]
errors = []
def work(number):
    try:
        with torch.bp.stream(torch.bp.Stream()):
            for turn in range(12):
                at = (number + turn) % 4
                same(F.conv2d(x.to("bp"), weights[at].to("bp")), expected[at])
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for one in threads: one.start()
for one in threads: one.join()
assert not errors, errors
print("done")
"""
    assert run(PREAMBLE + code, **ON_DEVICE) == "done\n"


@pytest.mark.parametrize("function", ["cudnnCreate", "cudnnBackendFinalize", "cudnnBackendExecute", "cudnnSetStream"])
def test_a_library_that_fails(run: Run, function: str) -> None:
    """Generated kernels compute then, with a warning that names the library and the status."""
    code = """
x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    same(F.conv2d(x.to("bp"), w.to("bp")), F.conv2d(x, w))
    torch.bp.synchronize()
assert len(caught) == 1, [str(one.message) for one in caught]
assert "convolutions no longer use cuDNN on bp:0, which failed: " in str(caught[0].message)
assert "5000" in str(caught[0].message) and "CUDNN_STATUS_EXECUTION_FAILED" in str(caught[0].message), caught[0].message
same(F.conv2d(x.to("bp") * 2, w.to("bp")), F.conv2d(x * 2, w))
assert calls(F.conv2d, x, w) == 0
print("done")
"""
    faults = ",".join(f"{function}:{number}:5000" for number in range(1, 100))
    assert run(PREAMBLE + code, **ON_DEVICE, CUDA_EMULATOR_FAULTS=faults) == "done\n"


def test_no_library(run: Run) -> None:
    code = """
x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
assert calls(F.conv2d, x, w) == 0 and not bp.is_acceptable(x.to("bp"))
compare(F.conv2d, x, w)
print("done")
"""
    assert run(PREAMBLE + code, **ON_DEVICE, TORCH_BACKPLANE_CUDNN_LIBRARY="none") == "done\n"
