"""Accelerate: a training loop in three precisions, `accelerate launch` on one and two ranks, offloading to the CPU."""

import os
import subprocess
import sys

import torch
from accelerate import Accelerator, cpu_offload
from accelerate.state import AcceleratorState
from accelerate.utils import GradScalerKwargs
from torch.utils.data import DataLoader, TensorDataset
from trial import Program, Results, falls, main, on

import torch_backplane.integrations.accelerate  # noqa: F401


def loop(device: torch.device, mixed_precision: str | None) -> list[float]:
    """Accelerate's standard training loop."""
    AcceleratorState._reset_state(reset_partial_state=True)
    scale = GradScalerKwargs(init_scale=256.0)  # low enough that no step is skipped
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=mixed_precision, kwargs_handlers=[scale])
    assert accelerator.device.type == device.type, accelerator.device
    torch.manual_seed(2)
    x = torch.randn(256, 16)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Each rank gets its share of 64 rows.
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(8):
        total = 0.0
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
            total += accelerator.reduce(loss.detach(), "mean").item()
        losses.append(total / len(loader))
    return falls(losses)


def float32(device: torch.device) -> Results:
    return {"losses": loop(device, "no")}


def bfloat16(device: torch.device) -> Results:
    return {"losses": loop(device, "bf16")}


def float16(device: torch.device) -> Results:
    # Accelerate ignores float16 on the CPU: this compares with float32.
    return {"losses": loop(device, "fp16" if device.type != "cpu" else "no")}


# For two ranks: Accelerate gives DistributedDataParallel the device with the rank's number.
TWO_DEVICES = {"TORCH_BACKPLANE_HOST_DEVICES": "2", "POCL_DEVICES": "pthread pthread"}


def launch(device: torch.device, *options: str) -> Results:
    """Runs the loop by `accelerate launch`. Returns the losses, which rank 0 prints."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, __file__]
    environment = {**TWO_DEVICES, **os.environ, "LAUNCHED_ON": device.type}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return {"losses": [float(one) for one in ran.stdout.split("losses:")[1].split()]}


def launched(device: torch.device) -> Results:
    cpu = ["--cpu"] if device.type == "cpu" else []
    return launch(device, "--num_processes", "1", "--mixed_precision", "bf16", *cpu)


def on_two_ranks(device: torch.device, *options: str) -> Results:
    """Trains on two ranks, and on the CPU in one process."""
    return launch(device, "--num_processes", "2", *options) if device.type != "cpu" else float32(device)


def distributed(device: torch.device) -> Results:
    return on_two_ranks(device, "--multi_gpu")


def fsdp(device: torch.device) -> Results:
    return on_two_ranks(
        device, "--use_fsdp", "--fsdp_version", "1", "--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP",
        "--fsdp_min_num_params", "100",
    )  # fmt: skip


def fsdp2(device: torch.device) -> Results:
    return on_two_ranks(device, "--use_fsdp", "--fsdp_version", "2")


def offloaded(device: torch.device) -> Results:
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    cpu_offload(model, execution_device=device)
    assert model[0].weight.device.type == "meta"
    return {"output": on(model(torch.randn(8, 128).to(device)), device)}


if "LAUNCHED_ON" in os.environ:
    losses = loop(torch.device(os.environ["LAUNCHED_ON"]), None)
    if int(os.environ.get("RANK", "0")) == 0:
        print("losses:", *losses)
    Accelerator().end_training()
else:
    main(
        "accelerate",
        [
            Program("training loop", float32),
            Program('mixed_precision="bf16"', bfloat16, tolerance=3e-2),
            Program('mixed_precision="fp16"', float16, tolerance=3e-2),
            Program("accelerate launch", launched, tolerance=3e-2, runs=1),
            Program("two ranks: DistributedDataParallel", distributed, runs=1),
            Program("two ranks: FSDP", fsdp, runs=1),
            Program("two ranks: FSDP2", fsdp2, runs=1),
            Program("cpu_offload", offloaded),
        ],
    )
