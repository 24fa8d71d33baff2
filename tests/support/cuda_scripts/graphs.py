"""Streams and CUDA graphs, in the style of PyTorch's notes about CUDA semantics."""

import torch

torch.manual_seed(0)
device = "cuda:0"
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).to(device)
loss_fn = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(8, 8, 16), torch.randn(8, 8, 4)
static_input, static_target = torch.zeros(8, 16, device="cuda"), torch.zeros(8, 4, device="cuda")
s = torch.cuda.Stream()
s.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(s):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss_fn(model(static_input), static_target).backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(s)
g = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(g):
    static_loss = loss_fn(model(static_input), static_target)
    static_loss.backward()
    optimizer.step()
losses = []
for _epoch in range(4):
    for data, target in zip(inputs, targets, strict=True):
        static_input.copy_(data)
        static_target.copy_(target)
        g.replay()
    torch.cuda.synchronize()
    losses.append(static_loss.item())
print("losses", " ".join(f"{loss:.4f}" for loss in losses))
assert losses[-1] < losses[0]
event = torch.cuda.Event()
with torch.cuda.stream(torch.cuda.Stream(device=device)):
    other = static_input * 2
    event.record()
event.wait()
other.record_stream(torch.cuda.current_stream())
assert torch.equal(other, static_input + static_input)
assert not torch.cuda.is_current_stream_capturing()
