"""Triton kernels on bp tensors: `kernel[grid](...)` on devices whose drivers have a `triton_target`.

- `targets`: which devices run Triton kernels.
- `driver`: Triton's driver for bp. It says what Triton compiles for, and which device, stream and buffers it uses.
- `launcher`: launches Triton's binaries as commands of the runtime, so that streams, graphs, plans and profiles know
  them.

The driver is in Triton's table of backends, as `bp`, after the program has imported Triton. Triton uses it if no other
driver is active, such as that of torch.cuda.
"""

from __future__ import annotations

import types

NAME = "bp"  # in triton.backends.backends, and for TRITON_DEFAULT_BACKEND


def register(backends: types.ModuleType) -> None:
    """Add bp to the table of the module `triton.backends`."""
    from torch_backplane.triton_driver.driver import BackplaneDriver, NoCompiler

    backends.backends[NAME] = backends.Backend(NoCompiler, BackplaneDriver)
