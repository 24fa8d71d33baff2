"""The command line: `python -m torch_backplane COMMAND`.

One file per command. Commands import most of their dependencies when they run, so that `--help` is fast.
"""

from __future__ import annotations

import typer

from torch_backplane.cli.audit import audit
from torch_backplane.cli.conformance import conformance
from torch_backplane.cli.devices import devices
from torch_backplane.cli.doctor import doctor
from torch_backplane.cli.explain import explain
from torch_backplane.cli.info import info
from torch_backplane.cli.memory import memory
from torch_backplane.cli.ops import ops
from torch_backplane.cli.ptxas import ptxas
from torch_backplane.cli.run import CONTEXT_SETTINGS, run
from torch_backplane.cli.tune import tune

app = typer.Typer(
    help="Backplane: PyTorch device backends, written in Python.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (devices, doctor, info, conformance, ops, audit, ptxas, tune):
    app.command()(command)
app.command(context_settings=CONTEXT_SETTINGS)(run)
app.command(context_settings=CONTEXT_SETTINGS)(explain)
app.add_typer(memory, name="memory")


def main() -> None:
    """Run the command line. Entry point of `backplane` and of `python -m torch_backplane`.

    Any error is one line, with exit code 2. In Python's development mode it has a traceback.
    """
    import sys

    try:
        app(prog_name="python -m torch_backplane")
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        first = (str(error).splitlines() or [""])[0]
        print(f"Error: {type(error).__name__}: {first}", file=sys.stderr)
        print("`python -X dev -m torch_backplane …` shows the traceback.", file=sys.stderr)
        sys.exit(2)
