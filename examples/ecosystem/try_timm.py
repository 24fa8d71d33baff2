"""timm: what its training script uses (mixup, optimizer, schedule, scaler, averaged weights), and features."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, NativeScaler, accuracy
from trial import Program, Results, falls, main, on

CLASSES = 4


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose class is the quadrant that is bright."""
    torch.manual_seed(1)
    labels = torch.arange(32) % CLASSES
    x = 0.1 * torch.randn(32, 3, 32, 32)
    for image, label in zip(x, labels.tolist(), strict=True):
        row, column = 16 * (label // 2), 16 * (label % 2)
        image[:, row : row + 16, column : column + 16] += 1
    return x, labels


def train(device: torch.device, name: str, rate: float, **options: object) -> Results:
    x, labels = (one.to(device) for one in images())
    torch.manual_seed(2)
    model = timm.create_model(name, num_classes=CLASSES, **options).to(device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=rate, weight_decay=0.01)
    schedule = CosineLRScheduler(optimizer, t_initial=12, warmup_t=2, warmup_lr_init=1e-4)
    average = ModelEmaV3(model, decay=0.8)
    mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=0.0, num_classes=CLASSES, label_smoothing=0.05)
    scaler, criterion = NativeScaler(device.type), SoftTargetCrossEntropy()
    torch.manual_seed(3)
    losses = []
    for step in range(12):
        mixed, targets = mixup(x, labels)
        loss = criterion(model(mixed), targets)
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=5.0, parameters=model.parameters())
        average.update(model, step=step)
        schedule.step(step + 1)
        losses.append(loss.item())
    with torch.inference_mode():
        right, _ = accuracy(average.module.eval()(x), labels, topk=(1, 2))
    return {"losses": falls(losses), "accuracy": on(right, device) / 100}


def convolutions(device: torch.device) -> Results:
    return train(device, "resnet18", 5e-4)


def attention(device: torch.device) -> Results:
    return train(device, "vit_tiny_patch16_224", 5e-3, img_size=32, patch_size=8, depth=2)


def features(device: torch.device) -> Results:
    torch.manual_seed(4)
    model = timm.create_model("mobilenetv3_small_050", features_only=True).to(device).eval()
    x, _ = images()
    with torch.inference_mode():
        return {f"level {index}": on(one, device) for index, one in enumerate(model(x.to(device)))}


main(
    "timm",
    [
        Program("training a ViT with mixup", attention, tolerance=2e-3),
        Program("training a ResNet", convolutions, tolerance=2e-2, runs=2),
        Program("features of a MobileNet", features),
    ],
)
