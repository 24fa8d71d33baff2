"""Tensor types, as programs used them before PyTorch 0.4."""

import torch
from torch.autograd import Variable

use_cuda = torch.cuda.is_available()
dtype = torch.cuda.FloatTensor if use_cuda else torch.FloatTensor
ltype = torch.cuda.LongTensor if use_cuda else torch.LongTensor
torch.manual_seed(2)
x = Variable(torch.randn(64, 20).type(dtype), requires_grad=False)
y = Variable(torch.randn(64, 5).type(dtype), requires_grad=False)
w1 = Variable(torch.randn(20, 10).type(dtype), requires_grad=True)
w2 = Variable(torch.randn(10, 5).type(dtype), requires_grad=True)
for t in range(30):
    loss = (x.mm(w1).clamp(min=0).mm(w2) - y).pow(2).sum()
    loss.backward()
    w1.data -= 1e-5 * w1.grad.data
    w2.data -= 1e-5 * w2.grad.data
    w1.grad.data.zero_()
    w2.grad.data.zero_()
    if t % 10 == 0:
        print(t, f"{loss.item():.3f}")
assert x.type() == ("torch.cuda.FloatTensor" if use_cuda else "torch.FloatTensor")
assert isinstance(x.data, dtype)
assert x.is_cuda == use_cuda
zeros = dtype(2, 3).zero_()
index = ltype([1, 0])
assert zeros[index].type() == zeros.type()
if use_cuda:
    assert x.type("torch.cuda.DoubleTensor").dtype == torch.float64
    assert x.type("torch.FloatTensor").is_cuda is False
    assert x.cpu().cuda(0).get_device() == 0
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    assert torch.zeros(2).is_cuda
    torch.set_default_tensor_type(torch.FloatTensor)
    assert not torch.zeros(2).is_cuda
