"""Inductor's Triton kernels on the emulator of CUDA: Triton's interpreter computes them, in place of their binaries.

`install()` makes a second copy of Triton in this process, whose functions are interpreted, because Triton chooses for
the whole process between its compiler and its interpreter. A launch on the emulator calls the kernel's function in this
copy with the parameters that the binary would get.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton  # noqa: F401  the copy must not be the first one
from torch._inductor.runtime import benchmarking

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cuda_emulator"))
import emulator

from torch_backplane.compile import triton_runtime
from torch_backplane.triton_driver import launcher

HELPERS, RANDOM = "torch._inductor.runtime.triton_helpers", "torch_backplane.compile.triton_random"
COPIED = ("triton", "torch._inductor.runtime.triton_compat", HELPERS, RANDOM)
LETTERS = {"i1": "?", "u1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I",
           "u64": "Q", "fp16": "H", "bf16": "H", "fp32": "f", "f32": "f", "fp64": "d"}  # fmt: skip
# Functions of libdevice whose names are not those of torch.
NAMES = {"rint": torch.round, "nearbyint": torch.round, "isinfd": torch.isinf, "isnand": torch.isnan,
         "finite": torch.isfinite, "fabs": torch.abs}  # fmt: skip

launches: list[tuple[str, tuple[int, ...]]] = []  # kernels and their sizes
_files = tempfile.TemporaryDirectory()
_lock = threading.RLock()  # the interpreter keeps its state in modules


def _is_copied(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in COPIED) and not name.startswith("triton._C")


@contextlib.contextmanager
def _second_triton() -> Iterator[None]:
    """Imports modules of COPIED anew in this context, with Triton's interpreter."""
    first = {name: module for name, module in sys.modules.items() if _is_copied(name)}
    for name in first:
        del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]
        for name in [one for one in sys.modules if _is_copied(one)]:
            del sys.modules[name]
        sys.modules.update(first)
        for name in COPIED[1:]:
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, first[name])


class Interpreter:
    """The second copy of Triton."""

    def __init__(self) -> None:
        importlib.import_module(HELPERS), importlib.import_module(RANDOM)
        with _second_triton():
            self.helpers, self.random = importlib.import_module(HELPERS), importlib.import_module(RANDOM)
            self.interpreter: Any = importlib.import_module("triton.runtime.interpreter")
            libdevice: Any = importlib.import_module("triton.language.extra.cuda.libdevice")
            self.triton: Any = sys.modules["triton"]
            self.triton.knobs.runtime.interpret = True  # kept by the copy, and in the environment in this context
        self.builder = self.interpreter.interpreter_builder
        self.builder.create_extern_elementwise = self._libdevice
        self.interpreter._patch_builtin(libdevice, self.builder, self.interpreter._LangPatchScope())
        self.helpers.libdevice = libdevice
        # triton.jit would import the interpreter when it is called, and find the first copy.
        decorators = SimpleNamespace(jit=self.interpreter.InterpretedFunction)
        self.names = {"triton": decorators, "tl": self.triton.language, "triton_helpers": self.helpers,
                      "libdevice": libdevice, "tl_math": self.helpers.math, "bp_random": self.random}  # fmt: skip

    def _libdevice(self, library: str, path: str, symbol: str, arguments: Any, kind: Any, is_pure: bool) -> Any:
        name = symbol.removeprefix("__nv_")
        for known in (name, name.removesuffix("f")):
            if (function := NAMES.get(known) or getattr(torch, known, None)) is not None:
                break
        else:
            raise NotImplementedError(f"libdevice's {symbol}")
        values = function(*(torch.from_numpy(np.array(one.data)) for one in arguments)).numpy()
        found = self.interpreter._get_np_dtype(kind)
        return self.interpreter.TensorHandle(values.astype(found), kind.scalar)

    def kernel(self, path: str, name: str) -> Callable[..., Any]:
        """Returns a kernel of a file of Inductor, as a function of Python."""
        tree = ast.parse(Path(path).read_text())
        kept = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
        for one in kept:
            one.decorator_list = [one for one in one.decorator_list if ast.unparse(one) == "triton.jit"]
            assert one.decorator_list, f"{one.name} is no function of Triton"
        tree.body = kept
        file = Path(_files.name, f"{len(os.listdir(_files.name))}.py")
        file.write_text(ast.unparse(tree))
        names = {"__name__": file.stem, **self.names}
        exec(compile(file.read_text(), str(file), "exec"), names)
        function: Any = names[name]
        return function.rewrite()

    def run(self, function: Callable[..., Any], sizes: tuple[int, ...], values: dict[str, Any]) -> None:
        """Runs a kernel on a grid, block by block. `values`: (Triton's type, value) of each argument, or a constant."""
        with _lock:
            scope = self.interpreter._patch_lang(function)
            given = {name: self._value(*one) if isinstance(one, tuple) else one for name, one in values.items()}
            try:
                self.builder.set_grid_dim(*sizes[:3])
                for z, y, x in np.ndindex(sizes[2], sizes[1], sizes[0]):
                    self.builder.set_grid_idx(x, y, z)
                    function(**given)
            finally:
                scope.restore()

    def _value(self, kind: str, value: Any) -> Any:
        """Returns a parameter as the interpreter's tensor. `kind`: Triton's name of its type."""
        language = self.triton.language
        found = language.str_to_ty(kind, None)
        handle = self.interpreter.TensorHandle(np.array([value], self.interpreter._get_np_dtype(found)), found)
        return language.tensor(handle, found)


def _emulate(interpreter: Interpreter, path: str, kernel: Any) -> Callable[[tuple[int, ...], bytes], None]:
    """Returns what the emulator calls for the launches of a kernel that Triton compiled from Inductor's file."""
    function = interpreter.kernel(path, kernel.name)
    kinds = {name: kind for name, kind in kernel.src.signature.items() if kind != "constexpr"}
    constants = {kernel.src.fn.arg_names[place[0]]: value for place, value in kernel.src.constants.items()}
    layout = "@" + "".join("Q" if kind.startswith("*") else LETTERS[kind] for kind in kinds.values()) + "QQ"

    def call(sizes: tuple[int, ...], parameters: bytes) -> None:
        assert len(parameters) == struct.calcsize(layout), f"{kernel.name} has other parameters than {kinds}"
        launches.append((kernel.name, sizes))
        given = struct.unpack(layout, parameters)[:-2]
        values = {name: (kind, value) for (name, kind), value in zip(kinds.items(), given, strict=True)}
        interpreter.run(function, sizes, values | constants)

    return call


def install(measures: bool = False) -> None:
    """Lets the emulator run Inductor's Triton kernels of this process.

    Args:
        measures: whether configurations of kernels are measured. If not, each runs once, which takes less time.
    """
    if not measures:
        benchmarking.register_benchmarker("bp", lambda benchmarker, function, **_: function() or 1.0, override=True)
    interpreter, make = Interpreter(), triton_runtime.Autotuner._make_launchers
    load, with_parameters = triton_runtime._load, launcher.Binary.with_parameters
    calls: dict[int, Any] = {}  # by the identity of kernels, then of their binaries

    def _make_launchers(self: Any) -> None:
        for one in self.compile_results:
            calls[id(one.kernel)] = _emulate(interpreter, self.filename, one.kernel)
        make(self)

    def _load(kernel: Any, index: int) -> None:
        with _lock:
            emulator.define_kernel(kernel.name, calls[id(kernel)])
            load(kernel, index)
        kernel.function.emulated = calls.pop(id(kernel))

    def loaded(self: Any, parameters: Any) -> Any:
        """Different kernels can have the same name. The emulator finds the function when it loads the binary."""
        with _lock:
            if hasattr(self, "emulated"):
                emulator.define_kernel(self.name, self.emulated)
            found = with_parameters(self, parameters)
            found.wait()
            return found

    triton_runtime.Autotuner._make_launchers = _make_launchers
    triton_runtime._load = _load
    launcher.Binary.with_parameters = loaded
