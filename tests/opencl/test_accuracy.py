"""Sums are as exact as the CPU's: a sample of `python -m torch_backplane conformance --accuracy`, on kernels for CPUs
and, in a process of its own, for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from torch_backplane.conformance.accuracy import chosen, measure_one

SAMPLE = {
    "sum of an expanded": "positive",
    "sum, outer": "positive",
    "var_mean": "offset",
    "mse_loss, sum": "positive",
    "native_layer_norm": "offset",
    "layer_norm, backward of weights": "normal",
    "rms_norm, backward of weights": "positive",
    "group_norm": "offset",
    "group_norm, backward": "normal",
    "batch_norm": "offset",
    "instance_norm": "offset",
    "nll_loss, sum": "positive",
    "softmax": "positive",
    "softmax, outer": "positive",
    "softmax, backward": "positive",
    "interpolate, nearest, backward": "normal",
    "cumsum": "positive",
    "dot": "offset",
    "cdist of order 1": "normal",
}


# A work item goes through more numbers than it is let where loops are short.
LONG = {
    "layer_norm, backward of weights",
    "rms_norm, backward of weights",
    "batch_norm",
    "nll_loss, sum",
    "softmax, outer",
    "cumsum",
    "cdist of order 1",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.fault("short loops")] if name in LONG else []) for name in SAMPLE],
)
def test_as_exact_as_the_cpu(name):
    (case,) = [case for case in chosen("") if case.name == name]
    found = measure_one(torch.device("bp:0"), torch.float32, case, min(10**5, case.most), SAMPLE[name])
    assert found.passed, found


def test_as_exact_as_the_cpu_on_kernels_for_gpus():
    names = {"sum, inner", "var_mean", "native_layer_norm", "cumsum", "mm"}
    command = [sys.executable, "-m", "torch_backplane", "conformance", "--accuracy", "--driver", "opencl"]
    options = ["--match", f"^({'|'.join(names)})$", "--elements", "10000", "--json", "-"]
    environment = os.environ | {"TORCH_BACKPLANE_VISIBLE_DEVICES": "opencl:0", "TORCH_BACKPLANE_DISCRETE": "1"}
    ran = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert {one["case"] for one in json.loads(ran.stdout)["measurements"]} == names
