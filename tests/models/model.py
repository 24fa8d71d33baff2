"""The description of a model, and what the tables of models share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]

# The module with the models of each library. A module has a dictionary `MODELS`.
MODULES = {
    "torch": "models.torch_models",
    "torchvision": "models.torchvision_models",
    "timm": "models.timm_models",
    "transformers": "models.transformers_models",
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that is tried.

    Attributes:
        build: Makes the module, with random weights.
        inputs: Gets a length, and returns the arguments of the module, on the CPU.
        lengths: The lengths of the inputs. All but the first are for inference only.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    lengths: tuple[int, ...] = (0,)


def models_of(library: str) -> Mapping[str, Model]:
    """The models of a library of MODULES, by name. Imports the library."""
    return importlib.import_module(MODULES[library]).MODELS


def images(size: int = 64, count: int = 2) -> Callable[[int], Inputs]:
    """Inputs for a module that takes images (count × 3 × size × size) as its first argument, named `x`."""
    return lambda length: {"x": torch.randn(count, 3, size, size)}


def without_dropout(module: nn.Module) -> nn.Module:
    """Sets the probabilities of dropout, stochastic depth and skipped layers to 0, in place."""
    for part in module.modules():
        for holder in (part, getattr(part, "config", None)):
            for name, value in vars(holder).items() if holder is not None else ():
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)
        if type(part).__name__.startswith(("Dropout", "StochasticDepth")):
            part.p = 0.0  # type: ignore[assignment]
    return module
