"""torch.backends.cuda and torch.backends.cudnn."""

import torch
import torch.backends.cudnn as cudnn
from torch.backends import bp

cudnn.benchmark = True
assert cudnn.benchmark
assert bp.conv.benchmark
assert bp.rnn.benchmark
with cudnn.flags(enabled=False):
    assert not cudnn.enabled
    assert not bp.conv.enabled
    assert not bp.rnn.enabled
    assert not cudnn.benchmark
assert cudnn.enabled
assert bp.conv.enabled
assert cudnn.benchmark
cudnn.benchmark = False
cudnn.deterministic = True
assert cudnn.deterministic
assert cudnn.is_available()
assert cudnn.version() is None
assert cudnn.allow_tf32
with cudnn.flags(enabled=True, allow_tf32=False):
    assert bp.conv.fp32_precision == "ieee"
cudnn.allow_tf32 = False
assert not bp.conv.allow_tf32
assert not torch.backends.cuda.matmul.allow_tf32
torch.backends.cuda.matmul.allow_tf32 = True
assert bp.matmul.fp32_precision == "tf32"
assert torch.backends.cuda.is_built()
assert torch.backends.cuda.flash_sdp_enabled()
torch.backends.cuda.enable_mem_efficient_sdp(False)
assert not torch.backends.cuda.mem_efficient_sdp_enabled()
assert torch.backends.cuda.preferred_linalg_library("default") == "default"
x = torch.randn(1, 1, 4, 4, device="cuda")
assert cudnn.is_acceptable(x) == bp.is_acceptable(x)
