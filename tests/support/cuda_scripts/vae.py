"""A variational autoencoder, in the style of pytorch/examples vae: random numbers on the device, sampling."""

import torch
import torch.utils.data
from torch import nn, optim
from torch.nn import functional as F

torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
kwargs = {"num_workers": 0, "pin_memory": True} if device.type == "cuda" else {}


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    return BCE - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-2)
images = (torch.rand(4, 64)[torch.arange(128) % 4] > 0.5).float()
loader = torch.utils.data.DataLoader(images, batch_size=32, shuffle=True, **kwargs)
losses = []
for epoch in range(6):
    total = 0.0
    for data in loader:
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        total += loss.item()
        optimizer.step()
    losses.append(total / len(images))
    print(f"====> Epoch: {epoch} Average loss: {losses[-1]:.4f}")
with torch.no_grad():
    sample = model.decode(torch.randn(8, 4).to(device)).cpu()
assert losses[-1] < 0.9 * losses[0], losses
assert sample.shape == (8, 64)
