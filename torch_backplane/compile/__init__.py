"""`torch.compile` on bp devices.

`device_interface` describes the devices to Dynamo and Inductor. `inductor` registers bp with Inductor: `scheduling`
and `kernel` write fused kernels, `wrapper` writes what a compiled graph does, and `runtime` replays it as a plan.
Nothing of `torch._dynamo` or `torch._inductor` is imported before the program does so: `imports` runs what belongs to a
module of PyTorch after that module is imported.
"""

from __future__ import annotations

import types

from torch_backplane.compile.imports import when_imported


def install() -> None:
    """Register bp with Dynamo, Inductor and fake tensors as soon as they are imported."""
    when_imported("torch._dynamo.device_interface", _register_devices)
    when_imported("torch._inductor.utils", _treat_as_gpu)
    when_imported("torch._inductor.scheduler", _schedule)
    when_imported("torch._inductor.codegen.common", _register_with_inductor)
    when_imported("torch._inductor.compile_fx", _compile_for_host_devices)
    when_imported("torch._subclasses.fake_impls", _install_fake_tensors)


def _register_devices(module: types.ModuleType) -> None:
    from torch_backplane.compile import device_interface

    device_interface.register()


def _treat_as_gpu(utils: types.ModuleType) -> None:
    from torch_backplane.compile import inductor

    inductor.treat_as_gpu(utils)


def _schedule(scheduler: types.ModuleType) -> None:
    from torch_backplane.compile import inductor

    inductor.create_backend_without_triton(scheduler)


def _register_with_inductor(common: types.ModuleType) -> None:
    from torch_backplane.compile import inductor

    inductor.register(common)


def _compile_for_host_devices(compile_fx: types.ModuleType) -> None:
    from torch_backplane.compile import host

    host.install(compile_fx)


def _install_fake_tensors(fake_impls: types.ModuleType) -> None:
    from torch_backplane.compile import fake_tensors

    fake_tensors.install(fake_impls)
