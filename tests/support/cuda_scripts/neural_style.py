"""Style transfer, in the style of pytorch/examples fast_neural_style: instance norm, Gram matrices."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--cuda", type=int, default=1)
args = parser.parse_args()
device = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
torch.manual_seed(42)


class ConvLayer(nn.Module):
    def __init__(self, cin, cout, size, stride, upsample=None):
        super().__init__()
        self.upsample = upsample
        self.pad = nn.ReflectionPad2d(size // 2)
        self.conv = nn.Conv2d(cin, cout, size, stride)
        self.norm = nn.InstanceNorm2d(cout, affine=True)

    def forward(self, x):
        if self.upsample:
            x = F.interpolate(x, mode="nearest", scale_factor=self.upsample)
        return torch.relu(self.norm(self.conv(self.pad(x))))


def gram_matrix(y):
    b, ch, h, w = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


def normalize_batch(batch):
    mean = batch.new_tensor([0.485, 0.456, 0.406]).view(-1, 1, 1)
    std = batch.new_tensor([0.229, 0.224, 0.225]).view(-1, 1, 1)
    return (batch / 255.0 - mean) / std


transformer = nn.Sequential(
    ConvLayer(3, 8, 5, 1), ConvLayer(8, 16, 3, 2), ConvLayer(16, 8, 3, 1, upsample=2), nn.Conv2d(8, 3, 3, padding=1)
).to(device)
vgg = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)).to(device)
vgg.requires_grad_(False)
optimizer = torch.optim.Adam(transformer.parameters(), 1e-2)
mse_loss = nn.MSELoss()
style = torch.rand(1, 3, 16, 16).mul(255).to(device)
gram_style = gram_matrix(vgg(normalize_batch(style)))
for i, x in enumerate(torch.rand(6, 2, 3, 16, 16).mul(255)):
    x = x.to(device)
    optimizer.zero_grad()
    y = transformer(x)
    features_y, features_x = vgg(normalize_batch(y)), vgg(normalize_batch(x))
    content_loss = mse_loss(features_y, features_x)
    style_loss = 100 * mse_loss(gram_matrix(features_y), gram_style.expand(2, -1, -1))
    (content_loss + style_loss).backward()
    optimizer.step()
    print(f"[{i}] content: {content_loss.item():.5f} style: {style_loss.item():.5f}")
transformer.eval().cpu()
torch.save(transformer.state_dict(), "style.model")
