"""safetensors: saves bp tensors, and loads files onto bp by name, in slices, and into a module."""

import tempfile
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import torch_backplane.integrations.safetensors  # noqa: F401
from trial import Program, Results, main, on


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


main("safetensors", [Program("save_model, load_file, load_model, slices", save_and_load)])
