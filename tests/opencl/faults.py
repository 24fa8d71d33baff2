"""Known bugs of OpenCL implementations, each detected by a kernel that does not involve Backplane (docs/opencl.md).

A test that such a fault breaks has the marker `fault` with the fault's name. If the implementation has the fault, the
test is expected to fail and must not pass.
"""

from __future__ import annotations

from functools import cache

import numpy
import torch

DESCRIPTIONS = {"short loops": "the implementation ends all loops of a work item after 65,535 rounds"}


@cache
def present(name: str) -> bool:
    """Returns whether the implementation behind bp:0 has the fault."""
    assert name == "short loops"
    return _runs("int rounds = 0; while (rounds < x) ++rounds; result = rounds;", 70_000) != 70_000


def _runs(text: str, x: float) -> float:
    """Runs a kernel with the body `text` on `x` and returns its `result`."""
    import pyopencl as cl

    name = torch.bp.get_device_properties(0).name
    devices = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    context = cl.Context([device for device in devices if device.name.strip() == name][:1])
    queue = cl.CommandQueue(context)
    source = f"kernel void run(const float x, global float* to) {{ float result; {text} *to = result; }}"
    found = numpy.empty(1, numpy.float32)
    memory = cl.Buffer(context, cl.mem_flags.WRITE_ONLY, found.nbytes)
    cl.Program(context, source).build().run(queue, (1,), None, numpy.float32(x), memory)
    cl.enqueue_copy(queue, found, memory)
    return float(found[0])
