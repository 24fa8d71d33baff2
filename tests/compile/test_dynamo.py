"""Functions that use torch.bp, compiled by Dynamo: calls in graphs, guards, random numbers, export, fake tensors.

`TRACED` are the calls that do not break the graph, and `BREAKS` those that do, with the reason:

- PYTORCH: Dynamo has no rule for the call, on any device. torch.cuda's counterpart breaks the graph, too.
- STATE: torch.cuda's counterpart is put into the graph. AOTAutograd then runs it once, while it traces the graph, and
  never again. torch.bp's breaks the graph, so that it runs at each call.
- HOOK: Dynamo has a rule for torch.cuda's counterpart, and no hook with which other devices can get one.

Differences from eager mode that PyTorch has on all devices:

- `with torch.bp.stream(...)` only annotates the graph. The backends "eager" and "aot_eager" run its operators on the
  current stream, and a stream of another device does not change the current device.
- `with torch.accelerator.device_index(...)` has no effect on operators under "aot_eager".
- There is no guard for the current device that operators on "bp" (without an index) use. AOTAutograd drops `x.to("bp")`
  if the tensor is on the current device during tracing. The cache of fake tensors keeps the device of earlier results.
- The backend "eager" does not repeat random numbers in checkpoints.
"""

from __future__ import annotations

import io
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.variables import TensorVariable
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.passes import move_to_device_pass
from torch.utils.checkpoint import checkpoint

bp: Any = torch.bp  # type: ignore[attr-defined]
accelerator = torch.accelerator
Run = Callable[..., subprocess.CompletedProcess[str]]

BACKENDS = ["eager", "aot_eager"]
DEVICE_CONTEXTS = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.13 introduced the hook, register_device_context_manager"
)
RECORD_STREAM = pytest.mark.skipif(
    not hasattr(TensorVariable, "method_record_stream"), reason="torch 2.11 cannot functionalize record_stream"
)
GRAPHS_RETURN_EVENTS = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.12 returns the event of the tracing, which is not recorded"
)

STREAM = EVENT = None  # set by the fixture `state`


@pytest.fixture(autouse=True)
def state() -> Iterator[None]:
    """Each test begins without compiled code, on bp:0 and its default stream, and must end there."""
    global STREAM, EVENT
    torch._dynamo.reset()
    bp.set_device(0)
    STREAM, EVENT = bp.Stream(), bp.Event()
    streams = [bp.current_stream(index) for index in range(bp.device_count())]
    yield
    device = bp.current_device()
    bp.set_device(0)
    assert device == 0
    assert [bp.current_stream(index) for index in range(bp.device_count())] == streams


def numbers(*sizes: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(*sizes, device="bp", requires_grad=requires_grad)


def agree(found: Any, expected: Any) -> None:
    """Asserts equal structures: tensors with equal devices, dtypes and values; streams and events of equal devices."""
    leaves, structure = pytree.tree_flatten(found)
    expected_leaves, expected_structure = pytree.tree_flatten(expected)
    assert structure == expected_structure
    for one, other in zip(leaves, expected_leaves, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        elif isinstance(other, torch.Stream | torch.Event):
            assert isinstance(one, torch.Stream | torch.Event)
            assert one.device == other.device
        else:
            assert one == other


# --- calls in graphs

TRACED: dict[str, Callable[[Tensor], Any]] = {}
BREAKS: dict[str, Callable[[Tensor], Any]] = {}
PYTORCH, STATE, HOOK = "PYTORCH", "STATE", "HOOK"


def traced(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    TRACED[function.__name__] = function
    return function


def breaks(reason: str) -> Callable[[Callable[[Tensor], Any]], Callable[[Tensor], Any]]:
    assert reason in (PYTORCH, STATE, HOOK)

    def add(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        BREAKS[function.__name__] = function
        return function

    return add


def named(functions: dict[str, Callable[[Tensor], Any]]) -> list[Any]:
    """The names of functions, as parameters with the marks of the functions."""
    return [pytest.param(name, marks=getattr(one, "pytestmark", [])) for name, one in functions.items()]


@traced
def is_available(x: Tensor) -> Any:
    return x + 1 if bp.is_available() and not bp.amp.amp_definitely_not_available() else x


@traced
def device_count(x: Tensor) -> Any:
    return x + bp.device_count()


@traced
def current_device(x: Tensor) -> Any:
    return x + bp.current_device()


@traced
def is_initialized(x: Tensor) -> Any:
    return x + 1 if bp.is_initialized() else x


@traced
def properties(x: Tensor) -> Any:
    found = bp.get_device_properties(x.device)
    supports = torch.float32 in found.dtypes and found.name != "" and found.driver != ""
    return x + found.multi_processor_count + found.major + supports, found.total_memory, bp.get_device_properties().kind


@traced
def capability_and_name(x: Tensor) -> Any:
    return x + bp.get_device_capability()[0], bp.get_device_capability("bp:1"), bp.get_device_name(0)


@traced
def dtypes(x: Tensor) -> Any:
    return x + 1 if bp.is_bf16_supported() and not bp.is_tf32_supported() else x, bp.get_amp_supported_dtype()


@traced
def current_stream(x: Tensor) -> Any:
    y = x + 1
    bp.current_stream().synchronize()
    bp.current_stream(x.device).synchronize()
    return y, bp.current_stream()


@traced
def accelerator_stream(x: Tensor) -> Any:
    return (x + 1 if accelerator.current_stream() == STREAM else x), accelerator.current_stream("bp")


@traced
def comparing_streams(x: Tensor) -> Any:
    return x + 1 if bp.current_stream() == STREAM else x


@RECORD_STREAM
@traced
def waiting_for_streams(x: Tensor) -> Any:
    STREAM.wait_stream(bp.current_stream())
    with bp.stream(STREAM):
        y = x + 1
    y.record_stream(STREAM)
    bp.current_stream().wait_stream(STREAM)
    return y * 2


@traced
def new_streams(x: Tensor) -> Any:
    one, other = bp.Stream(), torch.Stream("bp:1", priority=-1)
    one.wait_stream(bp.current_stream())
    with bp.stream(one):
        y = x + 1
    one.synchronize()
    with other, bp.stream(None):
        y = y * 2
    bp.current_stream().wait_stream(one)
    return y, one, other


@traced
def events(x: Tensor) -> Any:
    event = bp.Event(enable_timing=True)
    y = x + 1
    event.record()
    EVENT.record(STREAM)
    event.wait(STREAM)
    STREAM.wait_event(EVENT)
    event.synchronize()
    other = STREAM.record_event()
    other.synchronize()
    torch.Event("bp").record()
    return y


@GRAPHS_RETURN_EVENTS
@traced
def returned_events(x: Tensor) -> Any:
    event = bp.Event(enable_timing=True)
    y = x + 1
    event.record()
    return y, event, STREAM.record_event()


@traced
def queries(x: Tensor) -> Any:
    event = bp.Event()
    event.record()
    STREAM.query()
    event.query()
    return x + 1


@traced
def synchronize(x: Tensor) -> Any:
    y = x + 1
    bp.synchronize()
    bp.synchronize(x.device)
    bp.synchronize("bp:1")
    accelerator.synchronize()
    return y


@traced
def autocast(x: Tensor) -> Any:
    with torch.autocast("bp", dtype=torch.bfloat16):
        y = x @ x
        with torch.autocast("bp", enabled=False):
            z = x @ x
    with bp.amp.autocast():
        return y, z, x @ x, torch.is_autocast_enabled("bp"), torch.get_autocast_dtype("bp")


@traced
def custom_forward(x: Tensor) -> Any:
    with bp.amp.autocast():
        return Doubled.apply(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    @bp.amp.custom_fwd(cast_inputs=torch.float32)
    def forward(context: Any, x: Tensor) -> Tensor:
        return x @ x

    @staticmethod
    @bp.amp.custom_bwd
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@traced
def of_the_accelerator(x: Tensor) -> Any:
    current = accelerator.current_accelerator()
    assert current is not None
    accelerator.set_stream(accelerator.current_stream())
    return x + accelerator.current_device_index() + accelerator.is_available(), current.type


@traced
def device_module(x: Tensor) -> Any:
    return x + torch.get_device_module().device_count() + torch.get_device_module("bp").current_device()


@traced
def attributes_of_tensors(x: Tensor) -> Any:
    return x + x.is_bp + x.get_device() + (x.device == torch.device("bp:0")), x.cpu().bp(), x.type(torch.float16)


@traced
def backends(x: Tensor) -> Any:
    return x + torch.backends.bp.is_built()  # type: ignore[attr-defined]


@traced
def new_tensors(x: Tensor) -> Any:
    y = torch.full((2,), 3.0, device="bp")
    return x[0, :2] + y + torch.arange(2, device=x.device), torch.tensor([1, 2], device="bp:1"), x.to("bp:2"), x.cpu()


@DEVICE_CONTEXTS
@traced
def device_context(x: Tensor) -> Any:
    with bp.device(1):
        y, z, w = torch.ones(2, device="bp"), x.to("bp"), x.cpu().bp()
        with bp.device("bp:2"), bp.device(-1):
            v = torch.zeros(2, device=torch.device("bp"))
        with bp.device(None), bp.device("bp"):
            u = x.new_ones(2, device="bp")
        number = bp.current_device()
        with torch.autocast("bp"):
            t = x @ x
    with accelerator.device_index(1):
        s = x + accelerator.current_device_index()
    return y, z, w, v, u, t, s, x + number, torch.ones(2, device="bp")


@breaks(PYTORCH)
def device_of(x: Tensor) -> Any:
    with bp.device_of(x):
        return x + 1


@breaks(PYTORCH)
def stream_context_class(x: Tensor) -> Any:
    with bp.StreamContext(STREAM):
        y = x + 1
    bp.current_stream().wait_stream(STREAM)
    return y


@breaks(PYTORCH)
def default_stream(x: Tensor) -> Any:
    return x + 1, bp.default_stream()


@breaks(PYTORCH)
def stream_of_another_device(x: Tensor) -> Any:
    """torch.cuda's returns the current device's stream in graphs, whatever device is given."""
    return x + 1, bp.current_stream("bp:1")


@breaks(PYTORCH)
def attributes_of_streams(x: Tensor) -> Any:
    return x + STREAM.priority + STREAM.device_index


@GRAPHS_RETURN_EVENTS
@breaks(PYTORCH)
def elapsed_time(x: Tensor) -> Any:
    start, end = bp.Event(enable_timing=True), bp.Event(enable_timing=True)
    start.record()
    end.record()
    end.synchronize()
    return x + 1 if start.elapsed_time(end) >= 0 else x


@breaks(PYTORCH)
def set_device(x: Tensor) -> Any:
    bp.set_device(0)
    return x + 1


@breaks(PYTORCH)
def set_device_index(x: Tensor) -> Any:
    accelerator.set_device_index(0)
    return x + 1


@breaks(PYTORCH)
def count_of_the_accelerator(x: Tensor) -> Any:
    return x + accelerator.device_count()


@breaks(PYTORCH)
def random_state(x: Tensor) -> Any:
    found = bp.get_rng_state()
    bp.set_rng_state(found)
    return x + 1, found


@breaks(PYTORCH)
def manual_seed(x: Tensor) -> Any:
    bp.manual_seed(1)
    return torch.rand_like(x)


@breaks(PYTORCH)
def manual_seed_of_all(x: Tensor) -> Any:
    bp.manual_seed_all(1)
    return torch.rand_like(x)


@breaks(PYTORCH)
def manual_seed_of_torch(x: Tensor) -> Any:
    torch.manual_seed(1)
    return torch.rand_like(x)


@breaks(PYTORCH)
def fork_rng(x: Tensor) -> Any:
    with torch.random.fork_rng([0], device_type="bp"):
        y = torch.rand_like(x)
    return y, torch.rand_like(x)


@breaks(PYTORCH)
def allocated_memory(x: Tensor) -> Any:
    return x + 1 if bp.memory_allocated() > 0 else x


@breaks(PYTORCH)
def allocated_memory_of_the_accelerator(x: Tensor) -> Any:
    return x + 1 if accelerator.memory_allocated() > 0 else x


@breaks(PYTORCH)
def capturing(x: Tensor) -> Any:
    return x if bp.is_current_stream_capturing() else x + 1


@breaks(PYTORCH)
def peers(x: Tensor) -> Any:
    return x + bp.can_device_access_peer(0, 1)


@breaks(PYTORCH)
def default_device(x: Tensor) -> Any:
    return x + 1 if torch.get_default_device().type == "bp" else x


@breaks(PYTORCH)
def generator(x: Tensor) -> Any:
    return torch.rand(3, device="bp", generator=torch.Generator("bp").manual_seed(2))


@breaks(PYTORCH)
def ranges(x: Tensor) -> Any:
    with bp.nvtx.range("name"):
        return x + 1


@breaks(STATE)
def empty_cache(x: Tensor) -> Any:
    bp.empty_cache()
    return x + 1


@breaks(STATE)
def peak_memory(x: Tensor) -> Any:
    bp.reset_peak_memory_stats()
    return x + 1


@breaks(STATE)
def free_memory(x: Tensor) -> Any:
    return x + (bp.mem_get_info()[1] > 0)


@breaks(STATE)
def seed(x: Tensor) -> Any:
    bp.seed()
    return x + 1


@breaks(STATE)
def set_stream(x: Tensor) -> Any:
    bp.set_stream(bp.current_stream())
    return x + 1


@breaks(STATE)
def sync_debug_mode(x: Tensor) -> Any:
    bp.set_sync_debug_mode("default")
    return x + bp.get_sync_debug_mode()


@breaks(HOOK)
def exchange_device(x: Tensor) -> Any:
    bp._maybe_exchange_device(bp._exchange_device(1))
    return x + 1


@breaks(HOOK)
def typed_tensors(x: Tensor) -> Any:
    return bp.FloatTensor([1.0, 2.0]) + x[0, :2]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", named(TRACED))
def test_calls_that_dynamo_traces(name: str, backend: str) -> None:
    function = TRACED[name]
    x = numbers(4, 4)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for _ in range(2):
        agree(compiled(x), function(x))
        assert bp.current_device() == 0
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", named(BREAKS))
def test_calls_that_break_the_graph(name: str) -> None:
    """They run as in eager mode between two graphs, and fail with `fullgraph`."""
    function = BREAKS[name]
    x = numbers(4, 4)
    torch.manual_seed(0)
    expected = function(x)
    torch.manual_seed(0)
    agree(torch.compile(function, backend="aot_eager")(x), expected)
    torch._dynamo.reset()
    with pytest.raises(Unsupported):
        torch.compile(function, backend="eager", fullgraph=True)(x)


def test_frames_of_backplane_are_not_compiled() -> None:
    """Operators between two graphs can run planners, which are Python."""
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        frames = [one.filename for one in torch._guards.TracingContext.extract_stack()]
        compiled.extend(frames or [graph.graph._codegen.__class__.__name__])
        return graph.forward

    def function(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        str(y)
        torch.save(y.sort(), io.BytesIO())
        bp.empty_cache()
        return y * 2

    x = numbers(3)
    agree(torch.compile(function, backend=backend)(x), (x + 1) * 2)
    assert compiled
    assert not [name for name in compiled if "torch_backplane" in name]


def test_all_submodules_of_torch_bp_are_loaded() -> None:
    """Importing one later would load it as a submodule of torch.bp, the module's name, a second time."""
    names = {one.name for one in pkgutil.iter_modules(bp.__path__)}
    assert bp.__name__ == "torch.bp"
    assert len(names) > 10
    assert {name for name in names if f"torch_backplane.accelerator.{name}" not in sys.modules} == set()


# --- guards


def calls_on(devices: list[int], function: Callable[..., Any], *given: Any, backend: str = "eager") -> int:
    """Calls a compiled function with these current devices, and compares with eager mode. Returns its compilations."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for index in devices:
        with bp.device(index):
            agree(compiled(*given), function(*given))
    return counter.frame_count


READS_THE_CURRENT_DEVICE: dict[str, Callable[[Tensor], Any]] = {
    "current_device": lambda x: x + bp.current_device(),
    "of the accelerator": lambda x: x + accelerator.current_device_index(),
    "properties": lambda x: (x + 1, bp.get_device_properties().name),
    "current_stream": lambda x: (x + 1, bp.current_stream()),
    "synchronize": lambda x: (x + 1, bp.synchronize()),
    "bfloat16": lambda x: x + bp.is_bf16_supported(),
}


@pytest.mark.parametrize("name", READS_THE_CURRENT_DEVICE)
def test_another_current_device_compiles_again(name: str) -> None:
    assert calls_on([0, 1, 0, 1], READS_THE_CURRENT_DEVICE[name], numbers(2)) == 2


@DEVICE_CONTEXTS
def test_a_context_does_not_get_tensors_of_another_device() -> None:
    """The cache of fake tensors knows the result of `torch.ones(2, device="bp")` on bp:0."""

    def function(x: Tensor) -> Any:
        one = torch.ones(2, device="bp")
        with bp.device(1):
            y = torch.ones(2, device="bp") + x.to("bp:1")
        return y, one + torch.ones(2, device="bp")

    assert calls_on([0], function, numbers(2), backend="aot_eager") == 1


@DEVICE_CONTEXTS
@pytest.mark.parametrize("device", [None, "bp", torch.device("bp")])
def test_a_context_without_index_is_that_of_the_current_device(device: Any) -> None:
    def function(x: Tensor) -> Any:
        with bp.device(device):
            return x + bp.current_device(), torch.ones(2, device="bp")

    assert calls_on([0, 1, 0, 1], function, numbers(2), backend="aot_eager") == 2


INDEPENDENT: dict[str, Callable[[Tensor], Any]] = {
    "count": lambda x: x + bp.device_count() + bp.is_available() + bp.is_initialized(),
    "properties of a given device": lambda x: x + bp.get_device_properties(1).multi_processor_count,
    "operators": lambda x: x * 2,
    "streams of a given device": lambda x: (x + 1, bp.Stream(1)),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_other_code_is_compiled_once(name: str) -> None:
    assert calls_on([0, 1, 2], INDEPENDENT[name], numbers(2)) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_without_index_are_on_the_current_device(backend: str) -> None:
    """The graph keeps "bp" without an index, as it would keep "cuda"."""
    assert calls_on([0, 1, 0], lambda x: (x + 1, torch.ones(2, device="bp")), numbers(2), backend=backend) == 1


def test_the_device_of_arguments_is_guarded() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: x + torch.ones_like(x), backend=counter, fullgraph=True)
    for device, frames in (("bp:0", 1), ("bp:1", 2), ("cpu", 3), ("bp:0", 3), ("bp:1", 3), ("cpu", 3)):
        x = torch.ones(2, device=device)
        agree(compiled(x), x + 1)
        assert counter.frame_count == frames


def test_autocast_is_guarded() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: x @ x, backend=counter, fullgraph=True)
    x = numbers(4, 4)
    for dtype, frames in ((None, 1), (torch.bfloat16, 2), (torch.float16, 3), (None, 3), (torch.bfloat16, 3)):
        with torch.autocast("bp", dtype=dtype or torch.float16, enabled=dtype is not None):
            found = compiled(x)
        assert found.dtype == (dtype or torch.float32)
        assert counter.frame_count == frames


@pytest.mark.parametrize("backend", BACKENDS)
def test_higher_order_operators_under_autocast(backend: str) -> None:
    """Autocast applies to the operators in the branches, and in the body of a loop."""

    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t @ t, lambda t: t @ t.t(), (x,))

    def loop(x: Tensor) -> Tensor:
        return torch._higher_order_ops.map(lambda row, t: t @ row, x, x + 1)

    for function in (branch, loop):
        for x in (numbers(3, 3).abs(), -numbers(3, 3).abs()):
            with torch.autocast("bp", dtype=torch.bfloat16):
                found = torch.compile(function, backend=backend, fullgraph=True)(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                expected = function(x.cpu())
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.cpu(), expected)


# --- gradients, random numbers, optimizers


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_training_under_autocast(backend: str, dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to("bp")
    x = numbers(4, 8)

    @torch.autocast("bp", dtype=dtype)
    def function(x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    def gradients(step: Callable[[Tensor], Tensor]) -> list[Any]:
        model.zero_grad()
        loss = step(x)
        loss.backward()
        return [loss.detach(), *(one.grad for one in model.parameters())]

    expected = gradients(function)
    agree(gradients(torch.compile(function, backend=backend, fullgraph=True)), expected)


def dropout(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5) * torch.rand_like(x) + torch.randn(64, device="bp")


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_numbers_are_those_of_eager_mode(backend: str) -> None:
    found = []
    for function in (dropout, torch.compile(dropout, backend=backend, fullgraph=True)):
        x = torch.linspace(1, 2, 64, device="bp").requires_grad_()
        torch.manual_seed(5)
        y = function(x)
        y.sum().backward()
        found.append([y.detach(), x.grad, bp.get_rng_state()])
    agree(found[1], found[0])


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.13 introduced register_graphsafe_rng_device_type")
def test_checkpoints_repeat_random_numbers() -> None:
    """Forward passes differ; the backward pass of each uses its mask. As on CUDA, its generator has a separate seed."""

    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5).sin(), x, use_reentrant=False)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x = torch.ones(256, device="bp", requires_grad=True)
    one, other = compiled(x), compiled(x)
    assert not torch.equal(one, other)
    for y in (other, one):
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y != 0, gradient != 0)
        assert 64 < y.count_nonzero() < 192


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("capturable", [False, True])
def test_optimizers(optimizer: Any, capturable: bool) -> None:
    options = {"capturable": True} if capturable and optimizer is not torch.optim.SGD else {}
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).to("bp")
        made = optimizer(model.parameters(), lr=0.1, **options)
        step = torch.compile(made.step, backend="aot_eager") if compiles else made.step
        for _ in range(3):
            made.zero_grad()
            model(torch.ones(2, 4, device="bp")).sum().backward()
            step()
        found.append(model.weight.detach())
    torch.testing.assert_close(found[1], found[0])


# --- export and fake tensors


class Exported(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        constant = torch.tensor([1.0, 2.0, 3.0, 4.0], device="bp:0") + torch.arange(4, device="bp")
        with torch.autocast("bp", dtype=torch.bfloat16):
            y = self.linear(x)
        return y + self.offset * torch.ones(4, device=x.device) + constant


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    model, x = Exported().to("bp"), numbers(2, 3)
    dynamic = {"x": {0: torch.export.Dim("rows", min=2)}}
    exported = torch.export.export(model, (x,), dynamic_shapes=dynamic, strict=strict)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for program in (exported, exported.run_decompositions(), torch.export.load(file)):
        for one in (x, numbers(5, 3)):
            torch.testing.assert_close(program.module()(one), model(one))
        assert all(value.device == torch.device("bp:0") for value in program.state_dict.values())


def test_an_exported_program_moves_between_devices() -> None:
    model, x = torch.nn.Linear(3, 4).to("bp"), numbers(2, 3)
    exported = torch.export.export(model, (x,))
    for device in ("cpu", "bp:1"):
        exported = move_to_device_pass(exported, device)
        torch.testing.assert_close(exported.module()(x.to(device)), model(x).to(device))


def test_fake_tensors_have_an_index() -> None:
    for index in (1, 0):
        FakeTensorMode.cache_clear()
        with FakeTensorMode(), bp.device(index):
            here = torch.device("bp", index)
            assert torch.empty(2, device="bp").device == here
            assert torch.empty(2).to("bp").device == here
            assert torch.nn.Linear(2, 2, device="bp").weight.device == here
            assert torch.empty(2, device="bp:2").new_empty(1).device == torch.device("bp:2")
    with FakeTensorMode():
        x = torch.empty(3, 3, device="bp:1", requires_grad=True)
        (x @ x + torch.tensor(1.0)).relu().sum().backward()
        assert x.grad is not None
        assert x.grad.device == torch.device("bp:1")
        with pytest.raises(RuntimeError, match=r"two (different )?devices,? bp:1(,| and) bp:0"):
            x + torch.empty(3, 3, device="bp:0")


FAKE = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.passes import move_to_device_pass
from torch_backplane import _C

with FakeTensorMode():
    x = torch.empty(3, 3, device="bp")
    y = torch.nn.functional.conv2d(x[None, None], torch.empty(2, 1, 2, 2, device="bp:0")).to(torch.bfloat16)
    print(x.device, y.device, tuple(y.shape), (x.cpu() + 1).device, torch.empty(1, device="bp:1").device)
print(torch.bp.is_initialized())
"""


def test_fake_tensors_initialize_no_device(run_forked: Run) -> None:
    done = run_forked(FAKE)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["bp:0 bp:0 (1, 2, 2, 2) cpu bp:1", "False"]


# --- what Backplane may not change


def test_dynamo_works_without_backplanes_part(run_forked: Run) -> None:
    """A release of torch in which a name has changed can still compile for other devices."""
    done = run_forked(
        """
import sys
import torch

sys.modules["torch_backplane.compile.traced_calls"] = None  # importing it raises ImportError
print(torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(1)).item())
"""
    )
    assert "UserWarning: torch.compile does not know bp devices: " in done.stderr
    assert done.stdout == "2.0\n"


def test_rules_for_other_devices_are_pytorchs(run_python: Run) -> None:
    """Dynamo's rules for torch.cuda, torch.accelerator and torch are those of a process without Backplane."""
    program = """
import torch
from torch._dynamo import trace_rules
from torch._dynamo.variables import ctx_manager
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

for module in (torch, torch.cuda, torch.accelerator, torch.random, torch.amp):
    for name, one in sorted(vars(module).items()):
        if callable(one):
            print(module.__name__, name, trace_rules.lookup_callable(one) or trace_rules.lookup(one))
classes = [*UserDefinedClassVariable._in_graph_classes(), *getattr(ctx_manager, "_device_context_manager_map", ())]
print(*sorted(one.__qualname__ for one in classes if "backplane" not in one.__module__), sep="\\n")
"""
    found = run_python(program)
    without = run_python(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found.returncode == without.returncode == 0, found.stderr + without.stderr
    assert len(found.stdout.splitlines()) > 1000
    assert found.stdout == without.stdout
