"""PyTorch's own code sees bp, so it takes the paths that it takes without the option."""

import torch

x = torch.ones(2, device="cuda")
code = """
kinds = (
    device.type, str(device), repr(device), tensor.is_cuda, torch.cuda.is_available(),
    torch.backends.cudnn.is_available(),
)
"""
seen = {}
for module in ("torch.nn.functional", "torch", "torch_backplane.plans", "torchvision.ops", "__main__"):
    namespace = {"__name__": module, "device": x.device, "tensor": x, "torch": torch}
    exec(code, namespace)
    seen[module] = namespace["kinds"]
bp, cuda = (
    ("bp", "bp:0", "device(type='bp', index=0)", False, False, torch._C._has_cudnn),
    ("cuda", "cuda:0", "device(type='cuda', index=0)", True, True, True),
)
assert list(seen.values()) == [bp, bp, bp, cuda, cuda], seen
assert "device='bp:0'" in str(x)
