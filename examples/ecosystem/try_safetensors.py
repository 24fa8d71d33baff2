"""safetensors: saves bp tensors, and loads files onto bp by name, in slices, and into a module."""

import tempfile
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from trial import Program, Results, main, on

import torch_backplane.integrations.safetensors  # noqa: F401


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def save_and_load(device: torch.device) -> Results:
    model = network().to(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        safetensors.torch.save_model(model, path)
        loaded = {name: on(one, device) for name, one in safetensors.torch.load_file(path, device=str(device)).items()}
        other = network().to(device)
        safetensors.torch.load_model(other, path, device=str(device))
        with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
            part = on(file.get_slice("0.weight")[3:7, ::2], device)
    x = torch.randn(8, 64)
    return {**loaded, "output": other(x.to(device)), "part": part}


def truncated(device: torch.device) -> Results:
    def allocated() -> int:
        return 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)

    x = torch.arange(4096.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        safetensors.torch.save_file({"first": x, "second": 2 * x}, path)
        data, before = path.read_bytes(), allocated()
        for length in (0, 4, 40, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:length])
            try:
                safetensors.torch.load_file(path, device=str(device))
            except safetensors.SafetensorError:
                pass
            else:
                raise AssertionError(f"{length} of {len(data)} bytes were loaded without an error")
            assert allocated() == before, f"{allocated() - before} bytes remain after an error"
        path.write_bytes(data)
        return safetensors.torch.load_file(path, device=str(device))


main(
    "safetensors",
    [
        Program("save_model, load_file, load_model, slices", save_and_load),
        Program("errors for truncated files", truncated, tolerance=0),
    ],
)
