"""TorchScript, torch.compile, FX, vmap and DataLoader."""

import pickle

import torch


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2, device=x.device) + x.to(torch.float32)


assert scripted(torch.ones(2, device="cuda")).is_cuda
compiled = torch.compile(lambda x: torch.ones(2, device="cuda") + x.to("cuda").cuda(), backend="eager")
assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
assert compiled(torch.ones(2)).is_cuda
traced = torch.fx.symbolic_trace(lambda x: torch.ones(2, device="cuda") + x.to("cuda"))
assert traced(torch.ones(2)).is_cuda
assert torch.vmap(lambda x: x + torch.ones(2, device="cuda"))(torch.ones(3, 2, device="cuda")).is_cuda
loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2, pin_memory=True)
assert all(batch.is_pinned() and batch.cuda(non_blocking=True).is_cuda for batch in loader)
for function in (torch.zeros, torch.Tensor.to, torch.fft.fftfreq, torch.amp.custom_fwd):
    assert pickle.loads(pickle.dumps(function)) is function
