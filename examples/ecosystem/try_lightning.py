"""Lightning: Trainer in float32 and mixed precision, and Fabric."""

import logging
import tempfile

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset
from trial import Program, Results, falls, main

import torch_backplane.integrations.lightning  # noqa: F401

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Regression(lightning.LightningModule):  # type: ignore[misc]
    """A small network that learns to add its inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def loader() -> DataLoader:
    torch.manual_seed(2)
    x = torch.randn(256, 8)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64)


def fit(device: torch.device, precision: str) -> Results:
    model = Regression()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator=device.type, devices=1, max_epochs=8, precision=precision, default_root_dir=folder,
            logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        if scaler := getattr(trainer.precision_plugin, "scaler", None):
            scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0})  # low enough that no step is skipped
        trainer.fit(model, loader())
        assert trainer.strategy.root_device.type == device.type
        again = Regression.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, weights_only=True)
    weights, loaded = (dict(one.named_parameters())["layers.0.weight"].cpu() for one in (model, again))
    assert torch.equal(weights, loaded)
    return {"losses": falls(model.losses)}


def float32(device: torch.device) -> Results:
    return fit(device, "32-true")


def bfloat16(device: torch.device) -> Results:
    return fit(device, "bf16-mixed")


def float16(device: torch.device) -> Results:
    return fit(device, "16-mixed" if device.type != "cpu" else "32-true")  # Lightning has no float16 on the CPU


def fabric(device: torch.device) -> Results:
    fabric = lightning.Fabric(accelerator="auto" if device.type == "bp" else "cpu", devices=1)
    assert fabric.device.type == device.type
    model = Regression()
    network, optimizer = fabric.setup(model.layers, model.configure_optimizers())
    losses = []
    for inputs, targets in list(fabric.setup_dataloaders(loader())) * 4:
        loss = torch.nn.functional.mse_loss(network(inputs), targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": falls(losses)}


main(
    "lightning",
    [
        Program("Trainer", float32),
        Program('Trainer(precision="bf16-mixed")', bfloat16, tolerance=3e-2),
        Program('Trainer(precision="16-mixed")', float16, tolerance=3e-2),
        Program('Fabric(accelerator="auto")', fabric),
    ],
)
