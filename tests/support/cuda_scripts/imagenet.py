"""A residual network with mixed precision, in the style of pytorch/examples imagenet: `.cuda(gpu)`, checkpoints."""

import argparse
import time

import torch
import torch.backends.cudnn as cudnn
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast

parser = argparse.ArgumentParser()
parser.add_argument("--gpu", default=0, type=int)
args = parser.parse_args()
torch.manual_seed(3)
cudnn.benchmark = True
cudnn.deterministic = True
use_cuda = torch.cuda.is_available()


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.downsample = nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(out + self.downsample(x))


model = nn.Sequential(Block(3, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
if use_cuda:
    torch.cuda.set_device(args.gpu)
    model = model.cuda(args.gpu)
    if torch.cuda.is_bf16_supported():
        print("# bfloat16 is supported")
device = next(model.parameters()).device
criterion = nn.CrossEntropyLoss().to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scaler = GradScaler(enabled=use_cuda)
images = torch.randn(4, 16, 3, 16, 16)
targets = torch.randint(0, 10, (4, 16))


def accuracy(output, target, topk=(1, 5)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0).mul_(100.0 / target.size(0)) for k in topk]


end = time.time()
for epoch in range(3):
    for image, target in zip(images, targets, strict=True):
        if device.type == "cuda":
            image = image.cuda(args.gpu, non_blocking=True)
            target = target.cuda(args.gpu, non_blocking=True)
        with autocast(enabled=use_cuda):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    acc1, acc5 = accuracy(output, target)
    print(f"Epoch: [{epoch}] Loss {loss.item():.4f}")
    print(f"# Acc@1 {acc1.item():.2f} Acc@5 {acc5.item():.2f} time {time.time() - end:.2f} dtype {output.dtype}")
state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
torch.save(state, "checkpoint.pth.tar")
loc = f"cuda:{args.gpu}" if use_cuda else "cpu"
checkpoint = torch.load("checkpoint.pth.tar", map_location=loc)
model.load_state_dict(checkpoint["state_dict"])
optimizer.load_state_dict(checkpoint["optimizer"])
assert all(value.is_cuda == use_cuda for value in checkpoint["state_dict"].values())
