"""The process that runs programs and prints one line of JSON per kernel.

    python -m torch_backplane.ptxas.worker REQUEST

REQUEST is a JSON file with `titles`. TORCH_BACKPLANE_DRIVERS selects the driver of the RecordingDevice.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from torch_backplane import _C, drivers
from torch_backplane.ptxas.cases import programs


def main() -> None:
    """Print {"begins": title} before each program, {"case", "error"} if it ends early, and then its new kernels."""
    warnings.simplefilter("ignore")
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # programs may print
    torch.set_num_threads(1)
    place = torch.device("bp", 0)
    device: Any = drivers.device(0)
    _C._memory_enable_caching(False)
    seen: dict[tuple[str, str], int] = {}
    known = programs()
    for title in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["titles"]:
        program = known[title]
        print(json.dumps({"begins": title}), file=channel)
        device.value = program.value
        try:
            program.run(place)
        except Exception as error:  # kernels do not run, so a program can find values that it does not accept
            first = (str(error).splitlines() or [""])[0]
            print(json.dumps({"case": title, "error": f"{type(error).__name__}: {first}"}), file=channel)
        torch.accelerator.synchronize(place)
        for key, kernel in list(device.kernels.items()):
            if kernel.group > seen.get(key, 0):
                seen[key] = kernel.group
                found = {"case": title, "text": kernel.text, "entry": kernel.entry, "group": kernel.group}
                print(json.dumps(found), file=channel)


if __name__ == "__main__":
    main()
