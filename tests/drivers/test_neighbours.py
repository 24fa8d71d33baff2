"""Tests that Backplane does not change PyTorch's behaviour for other devices.

`REPLACED` maps each PyTorch function that Backplane replaces to a program that calls it on other devices. Comparing
PyTorch's namespaces before and after the import of Backplane shows whether the list is complete.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# These programs run in a process without Backplane and in processes with it, and must print the same.
PREAMBLE = """
import warnings
warnings.simplefilter("ignore")
import json, torch
from torch import _tensor_str
import torch.nn.parallel.data_parallel, importlib
data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")

def run(function, *args, **kwargs):
    try:
        return repr(function(*args, **kwargs))
    except Exception as error:
        return f"{type(error).__name__}: {error}"

x = torch.arange(6.0).reshape(2, 3)
meta = torch.empty(2, 3, device="meta")
found = []
"""

SCALERS = """
import itertools
for device, enabled, scaled in itertools.product(("cpu", "cuda", "meta"), (True, False), (True, False)):
    for form in ("unscale_(optimizer)", "unscale_(optimizer=optimizer)", "unscale_()", "step(optimizer)"):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scaler = torch.amp.GradScaler(device, enabled=enabled, init_scale=4.0)
        if scaled:
            found.append(run(lambda: scaler.scale(parameter.sum()).backward()))
        found.append(run(eval, f"scaler.{form}", {"scaler": scaler, "optimizer": optimizer}))
        found.append(run(lambda: parameter.tolist()))
        found.append(run(lambda: parameter.grad.tolist()))
"""

DLPACK = """
for t in (x, meta, x.to_sparse(), x.requires_grad_()):
    found += [run(t.__dlpack_device__), run(torch.Tensor.__dlpack_device__, t), run(torch.Tensor.__dlpack_device__)]
found += [run(torch.Tensor.__dlpack_device__, 3), run(x.__dlpack_device__, 1), run(x.__dlpack_device__, x=1)]
import torch.utils.dlpack
from_dlpacks = torch.from_dlpack, torch.utils.dlpack.from_dlpack
for t in (x.detach(), meta, x.detach().to_sparse(), x, 3):
    found += [run(lambda: type(torch.Tensor.__dlpack__(t))), run(lambda: type(t.__dlpack__(max_version=(1, 0))))]
    found += [run(lambda: torch.Tensor.__dlpack__(t, 1)), run(lambda: t.__dlpack__(x=1))]
    found += [run(lambda: t.__dlpack__(stream="x")), run(lambda: type(t.__dlpack__(stream=None)))]
    found += [run(lambda: t.__cuda_array_interface__), run(hasattr, t, "__cuda_array_interface__")]
    for function in from_dlpacks:
        found += [run(function, t), run(function, ext_tensor=t), run(function, t, 1), run(function, x=1)]
        found += [run(function, t, device="cpu"), run(function, t, copy=True)]
        found.append(run(lambda: function(torch.utils.dlpack.to_dlpack(t))))
"""

SHARING = """
for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
    for t in (torch.ones(2), torch.empty(0)):
        storage = t.untyped_storage()
        found.append(run(lambda: len(getattr(storage, name)())))
        found.append(run(lambda: (storage.is_shared(), t.tolist())))
    found.append(run(getattr(meta.untyped_storage(), name)))
    found.append(run(getattr(torch.ones(1).untyped_storage(), name), 1, 2, 3))
    found.append(run(getattr(torch.ones(1).untyped_storage(), name), unknown=1))
"""

PRINTING = """
for t in (x, meta, x.to(torch.complex64), x.to_sparse(), torch.empty(0), torch.zeros(3000), torch.tensor(1), x > 2,
          torch.nn.Parameter(x), x.half(), torch.rand(2000, 2) > 3):
    found += [repr(t), run(t.__repr__, tensor_contents="contents"), run(_tensor_str._str, t)]
    found += [run(_tensor_str._tensor_str, t, 4), run(_tensor_str._tensor_str, t, indent=4)]
    found += [run(_tensor_str._tensor_str, self=t, indent=4), run(_tensor_str._tensor_str, t)]
    found += [run(_tensor_str.get_summarized_data, t), run(_tensor_str.get_summarized_data, self=t)]
"""

DATA_PARALLEL = """
found.append(run(data_parallel._get_available_device_type))
found.append(run(data_parallel._get_available_device_type, 1))
linear = torch.nn.Linear(3, 1)
with torch.no_grad():
    linear.weight.fill_(1.0), linear.bias.fill_(0.0)
for options in ({}, {"device_ids": [0]}, {"device_ids": [0, 1], "output_device": 0}, {"dim": 1}, {"unknown": 1}):
    found.append(run(lambda: torch.nn.DataParallel(linear, **options)(x).tolist()))
    found.append(run(lambda: torch.nn.parallel.data_parallel(linear, x, **options).tolist()))
found += [run(torch.nn.DataParallel), run(lambda: torch.nn.DataParallel(3).module), str(linear.weight.device)]
"""

INDUCTOR = """
from torch._inductor import lowering, utils
found += [repr(utils.GPU_TYPES), repr([one for one in utils.GPU_TYPES])]
for kind in ("cpu", "cuda", "mps", "xpu", "mtia", "tpu", "", None):
    found += [repr(kind in utils.GPU_TYPES), run(utils.is_gpu, kind)]
    found.append(run(lambda: utils.is_big_gpu(torch.device(kind, 0))))
found += [run(utils.is_big_gpu), run(utils.is_big_gpu, 1), run(utils.is_big_gpu, index_or_device=0)]
for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
    found.append(run(utils.needs_fallback_due_to_atomic_add_limitations, dtype))
    found.append(run(lowering.needs_fallback_due_to_atomic_add_limitations, dtype))
torch.manual_seed(3)
found.append(run(lambda: torch.compile(lambda x: torch.rand_like(x) + torch.nn.functional.dropout(x))(x).tolist()))
found.append(run(lambda: torch.compile(lambda x: (x * 2).softmax(-1).sum(0))(x).tolist()))
found.append(run(lambda: torch.compile(lambda x: (x.cumsum(-1), x.cummax(0), x.sort(-1), x.topk(2)))(x)))
from torch._inductor import ir
found += [run(ir.Scan.create), run(ir.Scan.create, torch.device("cpu"))]
found += [run(ir.Sort.create), run(ir.Sort.create, torch.device("cpu"))]
from torch._inductor.graph import GraphLowering
from torch.fx.experimental.proxy_tensor import make_fx
convolved = make_fx(lambda x: torch.ops.aten.convolution(x, x, None, [1], [0], [1], False, [0], 1))(x[None])
for graph in (convolved, make_fx(torch.sin)(x)):
    found.append(run(GraphLowering.decide_layout_opt, graph, is_inference=True))
found += [run(GraphLowering.decide_layout_opt), run(GraphLowering.decide_layout_opt, graph)]
found.append(run(lambda: torch.compile(lambda x: torch.nn.functional.conv1d(x, x))(x[None]).tolist()))
"""

ASSOCIATIVE_SCAN = """
from torch._higher_order_ops import associative_scan
from torch._higher_order_ops.associative_scan import associative_scan as same
for scan in (associative_scan, same):
    for mode in ("pointwise", "generic", "other"):
        found += [run(scan, torch.add, t, 0, combine_mode=mode) for t in (x, meta, [x, x], [], 3)]
        found.append(run(scan, torch.mul, x, dim=1, reverse=True, combine_mode=mode))
        found.append(run(torch.compile(scan, backend="eager"), torch.add, x, 1, False, mode))
    found += [run(scan), run(scan, torch.add), run(scan, 3, x, 0), run(scan, torch.add, x, 5), run(scan, unknown=1)]
"""

FLEX_ATTENTION = """
from torch.nn.attention import flex_attention as flex
for device, needs_grad in (("cpu", False), ("cpu", True), ("meta", False), ("meta", True)):
    t = torch.ones(1, 2, 4, 8, device=device, requires_grad=needs_grad)
    found += [run(flex._validate_device, t, t, t), run(flex._validate_device, t), run(flex._validate_device, query=t)]
    found.append(run(lambda: flex.flex_attention(t, t, t).tolist()))
    found.append(run(lambda: torch.compile(flex.flex_attention, backend="eager")(t, t, t).tolist()))
with torch.autocast("cpu", torch.bfloat16):
    found.append(run(lambda: flex.flex_attention(*[torch.ones(1, 2, 4, 8)] * 3).tolist()))
    found.append(run(lambda: torch.cond(x.sum() > 0, lambda t: t @ t.t(), lambda t: t.t() @ t, (x.detach(),))))
"""

DISTRIBUTED = """
import torch.distributed as dist
found += [run(dist.split_group), run(dist.split_group, None, [[0]]), run(dist.split_group, unknown=1)]

def reduce(*args, **kwargs):
    dist.init_process_group(*args, store=dist.HashStore(), rank=0, world_size=1, **kwargs)
    try:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        group = dist.new_group([0], backend="gloo" if "backend" in kwargs else None)
        dist.all_reduce(tensor, group=group)
        dist.barrier()
        return tensor.tolist(), dist.get_backend() if args or kwargs else ""
    finally:
        dist.destroy_process_group()

for args, kwargs in [(("gloo",), {}), (("cpu:gloo",), {}), ((), {}), ((), {"backend": "gloo"}), (("nonsense",), {})]:
    found.append(run(reduce, *args, **kwargs))
found.append(run(dist.new_group, [0]))
found.append(repr(dist.get_default_backend_for_device("cpu")))
"""

REPLACED = {
    "torch._higher_order_ops.associative_scan": ASSOCIATIVE_SCAN,
    "torch._higher_order_ops.associative_scan.associative_scan": ASSOCIATIVE_SCAN,
    "torch._dynamo.variables.builder.VariableBuilder._wrap": INDUCTOR,
    "torch._inductor.compile_fx.compile_fx": INDUCTOR,
    "torch._inductor.fx_passes.joint_graph.replace_random_passes": INDUCTOR,
    "torch._inductor.fx_passes.post_grad.move_constructors_to_gpu": INDUCTOR,
    "torch._inductor.fx_passes.post_grad.prepare_softmax_extra_check": INDUCTOR,
    "torch._inductor.graph.GraphLowering.decide_layout_opt": INDUCTOR,
    "torch._inductor.ir.Scan.create": INDUCTOR,
    "torch._inductor.ir.Sort.create": INDUCTOR,
    "torch._inductor.ir.UserDefinedTritonKernel.codegen": INDUCTOR,
    "torch._inductor.lowering.needs_fallback_due_to_atomic_add_limitations": INDUCTOR,
    "torch._inductor.scheduler.Scheduler.create_backend": INDUCTOR,
    "torch._inductor.utils.GPU_TYPES": INDUCTOR,
    "torch._inductor.utils.is_big_gpu": INDUCTOR,
    "torch._inductor.utils.needs_fallback_due_to_atomic_add_limitations": INDUCTOR,
    "torch.nn.attention.flex_attention._validate_device": FLEX_ATTENTION,
    "torch.distributed.distributed_c10d.split_group": DISTRIBUTED,
    "torch.distributed.split_group": DISTRIBUTED,
    "torch.distributed.distributed_c10d.init_process_group": DISTRIBUTED,
    "torch.distributed.distributed_c10d.new_group": DISTRIBUTED,
    "torch.distributed.init_process_group": DISTRIBUTED,
    "torch.distributed.new_group": DISTRIBUTED,
    "torch.amp.grad_scaler.GradScaler.unscale_": SCALERS,
    "torch.Tensor.__cuda_array_interface__": DLPACK,
    "torch.Tensor.__dlpack__": DLPACK,
    "torch.Tensor.__dlpack_device__": DLPACK,
    "torch.from_dlpack": DLPACK,
    "torch.utils.dlpack.from_dlpack": DLPACK,
    "torch.storage.UntypedStorage._share_fd_cpu_": SHARING,
    "torch.storage.UntypedStorage._share_filename_cpu_": SHARING,
    "torch._tensor_str._tensor_str": PRINTING,
    "torch._tensor_str.get_summarized_data": PRINTING,
    "torch.nn.parallel.data_parallel": DATA_PARALLEL,
    "torch.nn.parallel.data_parallel.DataParallel.__init__": DATA_PARALLEL,
    "torch.nn.parallel.data_parallel._get_available_device_type": DATA_PARALLEL,
}

# What functions of PyTorch record for Backplane: the name of the backend (torch.utils.rename_privateuse1_backend), and
# the folders whose functions Dynamo does not compile (torch._dynamo.trace_rules.add).
RECORDED = {
    "torch.utils.backend_registration._privateuse1_backend_name",
    "torch._dynamo.trace_rules.SKIP_DIRS_RE",
}

COMPARE = """
import json, sys, types, warnings
warnings.simplefilter("ignore")
import torch, torch.multiprocessing, torch.fx, torch.distributed, torch.utils.dlpack, torch.nn.parallel
import torch.serialization, torch._utils, torch.utils.data, torch._dynamo
import torch._inductor.compile_fx, torch.nn.attention.flex_attention

def train(device):
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(72, 4))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(device)
    scaler.scale(model(torch.randn(2, 1, 8, 8, device=device)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    repr(model[0].weight)

def names():
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            found[f"{module_name}.{key}"] = value
            if isinstance(value, type) and value.__module__.partition(".")[0] == "torch":
                for inner, member in list(vars(value).items()):
                    found[f"{value.__module__}.{value.__qualname__}.{inner}"] = member
    return found

with torch.autograd.set_multithreading_enabled(False):
    train("cpu")  # PyTorch's lazy initialization
before = names()
import torch_backplane
torch.ones(1, device="bp")
with torch.autograd.set_multithreading_enabled(False):  # PyTorch's engine was started without threads for bp
    train("bp")
after = names()
# pybind11 creates new objects for enumeration members at each access.
print(json.dumps(sorted(
    name for name, value in before.items() if after.get(name, value) is not value and not name.startswith("torch._C.")
)))
"""


def run(program: str, **environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, timeout=240
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip().splitlines()[-1]


def test_replaced_names_are_listed() -> None:
    """Fails if Backplane replaces a name that is not in REPLACED, or no longer replaces one that is."""
    assert json.loads(run(COMPARE, TORCH_DEVICE_BACKEND_AUTOLOAD="0")) == sorted({*REPLACED, *RECORDED})


@pytest.fixture(scope="module")
def answers() -> dict[str, list[list[str]]]:
    """Returns the output of each program without Backplane, with Backplane and no device, and with two devices."""
    parts = {SCALERS: "SCALERS", DLPACK: "DLPACK", SHARING: "SHARING", PRINTING: "PRINTING", DATA_PARALLEL: "PARALLEL",
             DISTRIBUTED: "DISTRIBUTED", INDUCTOR: "INDUCTOR", FLEX_ATTENTION: "FLEX_ATTENTION",
             ASSOCIATIVE_SCAN: "ASSOCIATIVE_SCAN"}  # fmt: skip
    program = PREAMBLE + "all = {}\n"
    for text, name in parts.items():
        program += f"found = []\n{text}\nall[{name!r}] = found\n"
    program += "print(json.dumps(all))"
    runs = [
        json.loads(run(program, TORCH_BACKPLANE_DRIVERS="host", **environment))
        for environment in (
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "TORCH_BACKPLANE_HOST_DEVICES": "0"},
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "TORCH_BACKPLANE_HOST_DEVICES": "2"},
        )
    ]
    return {text: [found[name] for found in runs] for text, name in parts.items()}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_functions_are_unchanged_for_other_devices(name: str, answers: dict[str, list[list[str]]]) -> None:
    alone, without_devices, with_devices = answers[REPLACED[name]]
    assert len(alone) > 2
    assert without_devices == alone
    assert with_devices == alone
