"""`tune`: finds the fastest candidates for operators that a program recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def tune(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Untuned operators (tunableop_untuned0.csv), or results.")
    ],
    device: Annotated[int, typer.Option(help="Index of the bp device.")] = 0,
    output: Annotated[
        str, typer.Option(metavar="FILE", help="Results file; default: the file that programs read.")
    ] = "",
    duration: Annotated[int, typer.Option(metavar="MS", help="Maximum time per candidate.", min=0)] = 0,
    iterations: Annotated[int, typer.Option(metavar="N", help="Maximum number of calls per candidate.", min=0)] = 0,
) -> None:
    """Time the candidates of operators that a program recorded with PYTORCH_TUNABLEOP_RECORD_UNTUNED=1, and write the
    fastest to a file that programs read with PYTORCH_TUNABLEOP_ENABLED=1.

    Operators that already have a result in the file are not tuned again. The exit code is 0 if all operators have a
    result, and 2 if FILE cannot be tuned.
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    import torch_backplane  # noqa: F401 - brings torch.bp
    from torch_backplane.accelerator import tunable
    from torch_backplane.accelerator.devices import device_count, set_device
    from torch_backplane.cli.console import fail
    from torch_backplane.drivers.base import SettingError
    from torch_backplane.tuning.files import read_problems

    console = Console(highlight=False)
    try:
        problems = read_problems(Path(file))
        count = device_count()
        if not 0 <= device < count:
            fail(f"--device {device} is not in the range 0 to {count - 1}" if count else "there is no bp device")
        set_device(device)
        tunable.enable()
        tunable.tuning_enable()
        if not (tunable.is_enabled() and tunable.tuning_is_enabled()):
            fail("PYTORCH_TUNABLEOP_ENABLED or PYTORCH_TUNABLEOP_TUNING disables tuning; unset it")
        if output:
            tunable.set_filename(output)
        if duration:
            tunable.set_max_tuning_duration(duration)
        if iterations:
            tunable.set_max_tuning_iterations(iterations)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("tuning", total=len(problems))
            tunable.tune_all(problems, device, lambda one: progress.advance(task))
    except (ValueError, OSError, SettingError) as error:
        fail(str(error))
    results = {(name, parameters): rest for name, parameters, *rest in tunable.get_results()}
    table = Table("operator", "parameters", "candidate", "ms", expand=False)
    for one in problems:
        candidate, milliseconds = results.get((one.name, one.parameters), ("the only one", None))
        text = "" if milliseconds is None else f"{milliseconds:.4g}"
        table.add_row(one.name, one.parameters, str(candidate), text)
    console.print(table)
    console.print(f"{len(problems)} operators; results are in {tunable.get_filename()}")
