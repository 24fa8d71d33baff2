"""`run`: runs a Python program with the integrations of other libraries, and on request programs written for CUDA."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Annotated, NoReturn

import typer

# The program's own options follow its name.
CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def run(
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="A script, or with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The program's arguments.")] = None,
    as_cuda: Annotated[
        bool, typer.Option("--as-cuda", help='"cuda" and torch.cuda mean bp in this program and its child processes.')
    ] = False,
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is the name of a module.")] = False,
) -> None:
    """Run a Python program as `python PROGRAM ARGUMENTS` does, with the integrations of other libraries enabled.

    Integrations make libraries such as safetensors and Accelerate accept bp devices. With --as-cuda, programs that were
    written for CUDA run on bp unchanged. Both also apply to processes that the program starts.

    Options precede PROGRAM: what follows is the program's. The exit code is the program's, or 2 if it cannot be
    started.
    """
    prepare(program, arguments or [], module=module, as_cuda=as_cuda)
    execute(program, module=module)


def prepare(program: str, arguments: list[str], *, module: bool, as_cuda: bool) -> None:
    """Make the process one that runs a program: arguments, path, integrations. Exits if there is no such program."""
    import torch_backplane  # noqa: F401 - brings torch.bp
    from torch_backplane import integrations
    from torch_backplane.cli.console import fail

    sys.argv = [program, *arguments]
    if module:
        sys.path[0] = os.getcwd()
    elif not Path(program).exists():
        fail(f"cannot run {program!r}: there is no such file")
    elif Path(program).is_file() and not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        sys.path[0] = str(Path(program).resolve().parent)
    if module and not _is_module(program):
        fail(f"cannot run -m {program!r}: there is no such module")
    os.environ["TORCH_BACKPLANE_INTEGRATIONS"] = "1"
    integrations.enable()
    if as_cuda:
        _name_bp_cuda()
    sys.excepthook = sys.__excepthook__  # instead of the command line's


def execute(program: str, *, module: bool) -> None:
    """Run a program after `prepare`. Exits if it raises an exception, which is reported first."""
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except Exception as error:
        _end_with(error, code=1)
    except KeyboardInterrupt as error:
        _end_with(error, code=130)  # as a shell reports SIGINT


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of the package that contains it
        return False


def _name_bp_cuda() -> None:
    from torch_backplane import accelerator, as_cuda
    from torch_backplane.cli.console import fail

    if not accelerator.is_available():
        try:
            accelerator.init()
        except (RuntimeError, ValueError) as error:
            fail(f"--as-cuda: {error}")
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        print("CUDA_VISIBLE_DEVICES does not apply to bp: use TORCH_BACKPLANE_VISIBLE_DEVICES", file=sys.stderr)
    os.environ["TORCH_BACKPLANE_AS_CUDA"] = "1"
    as_cuda.enable()


def _end_with(error: BaseException, code: int) -> NoReturn:
    """Report an exception of the program as Python does: without the frames that started the program."""
    traceback: types.TracebackType | None = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    sys.exit(code)
