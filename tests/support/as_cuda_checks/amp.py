"""Mixed precision."""

import torch
from torch.cuda import amp
from torch.cuda.amp import GradScaler, autocast, custom_fwd
from torch.cuda.amp.grad_scaler import OptState

assert torch.cuda.amp is amp
assert custom_fwd is torch.bp.amp.custom_fwd
assert amp.autocast is autocast
assert OptState is not None
a = torch.randn(4, 4, device="cuda", requires_grad=True)
contexts = [
    autocast(),
    torch.autocast("cuda", dtype=torch.float16),
    torch.amp.autocast(device_type="cuda", dtype=torch.float16),
]
for context in contexts:
    assert not torch.is_autocast_enabled()
    assert not torch.is_autocast_enabled("cuda")
    with context:
        assert (a @ a).dtype == torch.float16
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
torch.set_autocast_dtype("cuda", torch.bfloat16)
assert torch.get_autocast_dtype("cuda") == torch.get_autocast_gpu_dtype() == torch.bfloat16
torch.set_autocast_gpu_dtype(torch.float16)
assert torch.amp.is_autocast_available("cuda")
assert torch.get_autocast_dtype("cuda") == torch.float16
for scaler in (
    GradScaler(),
    torch.amp.GradScaler(),
    torch.amp.GradScaler("cuda"),
    torch.amp.GradScaler(device="cuda", init_scale=4.0),
):
    assert scaler.scale(a.sum()).is_cuda
    assert scaler.is_enabled()


class Double(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad * 2


with torch.autocast("cuda"):
    assert Double.apply(a.half()).dtype == torch.float32
with torch.random.fork_rng(devices=[0], device_type="cuda"):
    torch.rand(2, device="cuda")
