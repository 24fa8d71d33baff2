"""DataParallel, in the style of PyTorch's tutorial: on several GPUs if there are several."""

import torch
import torch.nn as nn

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.manual_seed(5)
model = nn.Linear(5, 2)
if torch.cuda.device_count() > 1:
    print("# Let's use", torch.cuda.device_count(), "GPUs!")
    model = nn.DataParallel(model)
model.to(device)
for data in torch.randn(3, 30, 5):
    output = model(data.to(device))
    print("output size", output.size(), "sum", f"{output.sum().item():.4f}")
