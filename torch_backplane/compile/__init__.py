"""`torch.compile` on bp devices.

- Dynamo: `device_interface` describes the devices; `traced_calls` and `device_context` say how torch.bp is traced.
- Inductor: `inductor` registers bp; `scheduling` and `kernel` write fused kernels, `wrapper` writes what a compiled
  graph does, and `runtime` replays it as a plan. `scans` writes scans, and `sorts` writes sorts. `fused_templates` and
  `template_kernel` fuse elementwise operations into products and convolutions. `cpu_indices` moves indices to the
  device. `host` compiles for host devices.
- `associative_scan` lets the operator of this name accept bp tensors.
- Triton: `triton_driver` (the package next to this one) runs Triton kernels, and `triton_calls` writes the calls of the
  program's Triton kernels in compiled graphs. If the user chooses it, Inductor writes its kernels in Triton
  (`triton_scheduling`), which use `triton_runtime` and `triton_random`.

Nothing of `torch._dynamo`, `torch._inductor` or Triton is imported before the program does so: `imports` runs what
belongs to a module after that module is imported.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable

import torch

from torch_backplane.compile.imports import when_imported

Hook = Callable[[types.ModuleType], object]


def install() -> None:
    """Register bp with PyTorch's parts that compile, and with Triton, when they are imported."""
    for name, hook in HOOKS.items():
        when_imported(name, functools.partial(_call, hook))


def _call(hook: Hook, module: types.ModuleType) -> None:
    """Calls the hook. An error is a warning, because the module must stay usable for other devices."""
    try:
        hook(module)
    except Exception as error:
        what = "Triton" if module.__name__.startswith("triton.") else "torch.compile"
        warnings.warn(f"{what} does not know bp devices: {type(error).__name__}: {error}", stacklevel=2)


def _pass_autocast(ops: types.ModuleType) -> None:
    """Let higher-order operators (torch.cond, say) ignore autocast on bp, as on other devices."""
    key = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
    ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)  # of operators that are defined later
    for operator in ops._higher_order_ops.values():
        operator.fallthrough(key)


def _register_with_dynamo(module: types.ModuleType) -> None:
    from torch_backplane.compile import device_interface, traced_calls

    device_interface.register()
    traced_calls.register()


def _register_generators(aot_utils: types.ModuleType) -> None:
    """Let checkpoints repeat random numbers: each pass gets a generator with the same state."""
    if hasattr(aot_utils, "register_graphsafe_rng_device_type"):  # since torch 2.13
        aot_utils.register_graphsafe_rng_device_type("bp")


def _treat_as_gpu(utils: types.ModuleType) -> None:
    from torch_backplane.compile import inductor

    inductor.treat_as_gpu(utils)
    inductor.avoid_missing_atomics(utils)


def _lower(lowering: types.ModuleType) -> None:
    from torch_backplane.compile import flex_attention, inductor, random_numbers

    inductor.avoid_missing_atomics(lowering)
    inductor.avoid_missing_dtypes(lowering)
    random_numbers.register_lowerings(lowering)
    inductor.make_templates(lowering)
    inductor.sort_for_topk(lowering)
    flex_attention.install_lowering(lowering)


def _replace_random_numbers(joint_graph: types.ModuleType) -> None:
    from torch_backplane.compile import random_numbers

    random_numbers.install(joint_graph)


def _change_graphs(post_grad: types.ModuleType) -> None:
    from torch_backplane.compile import cpu_indices, inductor

    cpu_indices.install(post_grad)
    inductor.find_statistics_of_softmax_in_one_loop(post_grad)


def _change_nodes(ir: types.ModuleType) -> None:
    from torch_backplane.compile import inductor, triton_calls

    inductor.scan_whole_lines(ir)
    inductor.sort_short_rows(ir)
    triton_calls.install(ir)


def _keep_layouts(graph: types.ModuleType) -> None:
    from torch_backplane.compile import inductor

    inductor.keep_layouts_of_convolutions(graph)


def _schedule(scheduler: types.ModuleType) -> None:
    from torch_backplane.compile import inductor

    inductor.create_backend_without_triton(scheduler)


def _register_with_inductor(common: types.ModuleType) -> None:
    from torch_backplane.compile import inductor

    inductor.register(common)


def _compile_for_host_devices(compile_fx: types.ModuleType) -> None:
    from torch_backplane.compile import host

    host.install(compile_fx)


def _install_flex_attention(module: types.ModuleType) -> None:
    from torch_backplane.compile import flex_attention

    flex_attention.install(module)


def _install_associative_scan(module: types.ModuleType) -> None:
    from torch_backplane.compile import associative_scan

    associative_scan.install(module)


def _install_fake_tensors(fake_impls: types.ModuleType) -> None:
    from torch_backplane.compile import fake_tensors

    fake_tensors.install(fake_impls)


def _trace_triton_kernels(builder: types.ModuleType) -> None:
    from torch_backplane.compile import triton_calls

    triton_calls.trace_kernels(builder)


def _register_with_triton(backends: types.ModuleType) -> None:
    from torch_backplane import triton_driver

    triton_driver.register(backends)


HOOKS: dict[str, Hook] = {
    "torch._ops": _pass_autocast,
    "torch._higher_order_ops.associative_scan": _install_associative_scan,
    "torch._dynamo": _register_with_dynamo,
    "torch._dynamo.variables.builder": _trace_triton_kernels,
    "torch._functorch._aot_autograd.utils": _register_generators,
    "torch._inductor.utils": _treat_as_gpu,
    "torch._inductor.fx_passes.joint_graph": _replace_random_numbers,
    "torch._inductor.fx_passes.post_grad": _change_graphs,
    "torch._inductor.ir": _change_nodes,
    "torch._inductor.graph": _keep_layouts,
    "torch._inductor.lowering": _lower,
    "torch._inductor.scheduler": _schedule,
    "torch._inductor.codegen.common": _register_with_inductor,
    "torch._inductor.compile_fx": _compile_for_host_devices,
    "torch._subclasses.fake_impls": _install_fake_tensors,
    "torch.nn.attention.flex_attention": _install_flex_attention,
    "triton.backends": _register_with_triton,
}
