"""torch.device and default devices."""

import pickle

import pytest
import torch

d = torch.device("cuda", 1)
assert (d.type, d.index, str(d), repr(d), f"{d}") == ("cuda", 1, "cuda:1", "device(type='cuda', index=1)", "cuda:1")
assert d == torch.device("cuda:1") == torch.device(type="cuda", index=1) == torch.device("bp:1") == torch.device(d)
assert torch.device("cuda").index is None
assert str(torch.device("cuda")) == "cuda"
assert repr(torch.device("cuda")) == "device(type='cuda')"
assert torch.device("cuda") != torch.device("cpu")
assert torch.device("cpu").type == "cpu"
assert str(torch.device("cpu", 0)) == "cpu:0"
assert {"cuda": 1, "cpu": 2}[d.type] == 1
assert "cuda" in str(d)
assert isinstance(d, torch.device)
assert pickle.loads(pickle.dumps(d)) == d
assert hash(d) == hash(torch.device("cuda:1"))
assert getattr(torch, d.type) is torch.cuda
with torch.device("cuda"):
    assert torch.zeros(2).is_cuda
for wrong in ("cudax", "cuda:x", "cuda:-1", "gpu"):
    with pytest.raises(RuntimeError, match=f"{wrong}|{wrong.replace('cuda:', 'bp:')}"):
        torch.device(wrong)
with pytest.raises(RuntimeError, match="2"):
    torch.zeros(2, device="cuda:7")
torch.set_default_device("cuda:1")
assert torch.zeros(2).device == torch.get_default_device() == d
assert torch.tensor([1]).get_device() == 1
assert torch.zeros(2, device="cpu").device.type == "cpu"
torch.set_default_device(None)
assert torch.zeros(2).device.type == "cpu"
assert torch.accelerator.current_accelerator().type == "cuda"
