"""A generative adversarial network, in the style of pytorch/examples dcgan: two models, noise made on the device."""

import argparse
import random

import torch
import torch.backends.cudnn as cudnn
import torch.nn as nn
import torch.optim as optim

parser = argparse.ArgumentParser()
parser.add_argument("--cuda", action="store_true", default=torch.cuda.is_available())
parser.add_argument("--ngpu", type=int, default=1)
opt = parser.parse_args()
random.seed(7)
torch.manual_seed(7)
cudnn.benchmark = True
device = torch.device("cuda:0" if opt.cuda else "cpu")
nz, ngf, batch = 16, 8, 16


def weights_init(m):
    if m.__class__.__name__.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif m.__class__.__name__.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Parallel(nn.Module):
    def __init__(self, main):
        super().__init__()
        self.main = main

    def forward(self, input):
        if input.is_cuda and opt.ngpu > 1:
            return nn.parallel.data_parallel(self.main, input, range(opt.ngpu))
        return self.main(input)


netG = Parallel(
    nn.Sequential(
        nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
        nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )
).to(device)  # fmt: skip
netD = Parallel(
    nn.Sequential(
        nn.Conv2d(1, ngf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ngf, ngf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf * 2), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ngf * 2, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
    )
).to(device)  # fmt: skip
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(batch, nz, 1, 1, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
images = torch.rand(3, batch, 1, 16, 16) * 2 - 1
for i, data in enumerate(images):
    netD.zero_grad()
    label = torch.full((batch,), 1.0, dtype=torch.float, device=device)
    errD_real = criterion(netD(data.to(device)).view(-1), label)
    errD_real.backward()
    fake = netG(torch.randn(batch, nz, 1, 1, device=device))
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()).view(-1), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake).view(-1), label)
    errG.backward()
    optimizerG.step()
    print(f"[{i}/{len(images)}] Loss_D: {(errD_real + errD_fake).item():.4f} Loss_G: {errG.item():.4f}")
torch.save(netG.state_dict(), "netG.pth")
netG.load_state_dict(torch.load("netG.pth", map_location=device))
print("fake on", "the GPU" if netG(fixed_noise).is_cuda else "the CPU")
