"""The devices that run Triton kernels. Imports no Triton."""

from __future__ import annotations

from torch_backplane import accelerator, drivers
from torch_backplane.drivers import TritonTarget


def triton_target(index: int) -> TritonTarget:
    """Return what Triton compiles for on bp:`index`.

    Raises:
        RuntimeError: the device's driver does not run Triton kernels.
    """
    device = drivers.device(index)
    if device.triton_target is None:
        having = [f"bp:{one}" for one in range(accelerator.device_count()) if drivers.device(one).triton_target]
        raise RuntimeError(
            f"Triton kernels do not run on bp:{index} ({device.properties.name}). They run on CUDA devices: "
            f"{', '.join(having) or 'there is none'}. torch.bp.set_device() makes one current"
        )
    return device.triton_target
