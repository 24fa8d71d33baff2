"""What the Triton kernels that Inductor writes for bp import: their autotuner.

Inductor's autotuner compiles a kernel, in a worker process or in this one, makes a launcher for each configuration, and
measures them in the first call. Here it compiles for the target of the driver, and launches by the runtime, whichever
driver of Triton is active. Compile workers use no device: the target is in the text of the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import triton
from torch._inductor.runtime import benchmarking, triton_heuristics
from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key
from torch._inductor.triton_bundler import TritonBundler
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources


class Compiled(triton_heuristics.TritonCompileResult):
    """A kernel that Triton has compiled in one configuration."""

    def make_launcher(self) -> Any:
        """Loads the kernel on its device, and returns the function that launches it.

        Raises:
            OutOfResources: the device has less shared memory, or smaller groups, than the configuration needs.
        """
        if self.kernel.module is None:
            _load(self.kernel, self.compile_meta["device"])
        return super().make_launcher()


def _load(kernel: Any, index: int) -> None:
    """Does on bp:`index` what Triton's `CompiledKernel._init_handles` does with the active driver."""
    from torch_backplane.triton_driver.driver import Utilities
    from torch_backplane.triton_driver.launcher import Launcher
    from torch_backplane.triton_driver.targets import triton_target

    metadata, most = kernel.metadata, triton_target(index).properties["max_shared_mem"]
    if metadata.shared > most:
        raise OutOfResources(metadata.shared, most, "shared memory")
    loaded = Utilities.load_binary(kernel.name, kernel.kernel, metadata.shared, index)
    threads = metadata.num_warps * metadata.target.warp_size
    if threads > loaded[-1]:
        raise OutOfResources(threads, loaded[-1], "threads")
    kernel._run = Launcher(kernel.src, metadata)
    kernel.module, kernel.function, kernel.n_regs, kernel.n_spills, kernel.n_max_threads = loaded


class Autotuner(triton_heuristics.CachingAutotuner):
    """Inductor's autotuner, for a target of Triton."""

    target: GPUTarget

    def _precompile_config(self, cfg: Any) -> Compiled:
        given = self._create_compile_meta(cfg)
        source = ASTSource(self.fn, given["signature"], given["constants"], given["configs"][0])
        options = self._create_compile_options(cfg, given)
        binary = triton.compile(source, target=self.target, options=options)
        TritonBundler.put(triton_hash_to_path_key(binary.hash), self.triton_meta.get("device", 0))
        return Compiled(binary, cfg, given, self.inductor_meta)

    def _written(self) -> Collection[str]:
        """The names of what the kernel can write. Inductor names buffers that it only reads in_ptr0, and so on."""
        changed = set(self.mutated_arg_names)
        return {name for name in self.fn.arg_names if name in changed or not name.startswith("in_ptr")}

    def run(self, *args: Any, **named: Any) -> Any:
        """Launches the kernel, after measuring its configurations in the first call."""
        from torch_backplane.triton_driver.launcher import only_writing

        with only_writing(self._written()):
            return super().run(*args, **named)


class Heuristics:
    """Inductor's decorators of kernels (`triton_heuristics.pointwise`, say), for a target of Triton."""

    def __init__(self, backend: str, architecture: int | str, warp_size: int) -> None:
        self._target = GPUTarget(backend, architecture, warp_size)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        make: Callable[..., Any] = getattr(triton_heuristics, name)

        @functools.wraps(make)
        def decorator(*given: Any, **named: Any) -> Callable[[Any], Autotuner]:
            decorate = make(*given, **named)

            def decorated(function: Any) -> Autotuner:
                tuner = decorate(function)
                if type(tuner) is not triton_heuristics.CachingAutotuner:
                    raise NotImplementedError(
                        "torch._inductor.config.profile_bandwidth is not available for Triton kernels on bp"
                    )
                tuner.__class__ = Autotuner
                tuner.target = self._target
                return tuner

            return decorated

        return decorator


def _measure(benchmarker: Any, function: Callable[[], Any], *, warmup: int, rep: int, **named: Any) -> Any:
    """Measures a function on the current bp device, by events. Returns milliseconds."""
    return benchmarker.benchmark_gpu(function, warmup=warmup, rep=rep, device_type="bp", **named)


benchmarking.register_benchmarker("bp", _measure, override=True)
