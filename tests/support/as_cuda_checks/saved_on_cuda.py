"""Loads a checkpoint that was saved on CUDA."""

import torch

x = torch.load("saved.pt")
assert x.device == torch.device("cuda:1")
assert x.tolist() == [0.0, 1.0, 2.0]
