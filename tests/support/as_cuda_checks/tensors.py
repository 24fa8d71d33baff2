"""Tensors, generators, modules and checkpoints."""

import io

import torch

x = torch.arange(6.0, device="cuda").view(2, 3)
assert x.is_cuda
assert x.device.type == "cuda"
assert not x.cpu().is_cuda
assert x.type() == "torch.cuda.FloatTensor"
for y in (
    x.to("cuda:1"),
    x.to(device="cuda:1"),
    x.to("cuda:1", torch.float32),
    x.cuda(1),
    x.cuda("cuda:1"),
    x.cuda(device=torch.device("cuda:1")),
    x.cpu().cuda(1, non_blocking=True),
    x.new_zeros(2, 3, device="cuda:1") + x.to(1),
    x.cpu().cuda(1, memory_format=torch.contiguous_format),
):
    assert y.device == torch.device("cuda:1"), y.device
    assert torch.equal(y.cpu(), x.cpu())
assert x.untyped_storage().is_cuda
assert x.storage().is_cuda
assert not x.cpu().untyped_storage().is_cuda
assert x.cpu().untyped_storage().cuda().is_cuda
assert x.cpu().pin_memory("cuda").is_pinned("cuda")
assert x.type(torch.cuda.LongTensor).type() == "torch.cuda.LongTensor"
assert x.type("torch.FloatTensor").device.type == "cpu"
assert x.cpu().type("torch.cuda.HalfTensor").dtype == torch.float16
assert x.cpu().type() == "torch.FloatTensor"
assert isinstance(x, torch.cuda.FloatTensor)
assert not isinstance(x.cpu(), torch.cuda.FloatTensor)
g = torch.Generator(device="cuda").manual_seed(3)
assert g.device.type == "cuda"
assert torch.equal(
    torch.rand(4, generator=g, device="cuda"),
    torch.rand(4, generator=torch.Generator("cuda").manual_seed(3), device="cuda"),
)
assert isinstance(torch.default_generator, torch.Generator)
assert torch.Generator().device.type == "cpu"
module = torch.nn.Linear(3, 2, device="cuda:1")
assert module.weight.is_cuda
assert module.cpu().cuda(1).weight.get_device() == 1
assert module.to("cuda:0").weight.get_device() == 0
assert module.to(device="cuda").weight.is_cuda
assert torch.nn.Linear(3, 2, device="meta").to_empty(device="cuda").weight.is_cuda
packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
assert packed.cuda().is_cuda
assert packed.to("cuda").is_cuda
assert not packed.is_cuda
assert torch.zeros_like(x.cpu(), device="cuda").is_cuda
assert torch.as_tensor([1], device="cuda").is_cuda
assert torch.fft.fftfreq(4, device="cuda").is_cuda
assert torch.hann_window(4, device="cuda").is_cuda
x.grad = torch.ones_like(x)
assert x.grad.is_cuda

for location in ("cuda:1", torch.device("cuda:1"), {"cuda:0": "cuda:1"}, lambda s, tag: s.cuda(1)):
    file = io.BytesIO()
    torch.save({"x": x, "device": x.device}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=location)
    assert loaded["x"].device == torch.device("cuda:1"), location
    assert loaded["device"] == x.device
tags = []
file.seek(0)
torch.load(file, map_location=lambda storage, tag: tags.append(tag))
assert tags == ["cuda:0"]  # as in files that were saved on CUDA
