"""DLPack import and export, and the errors that NumPy and other array libraries get for bp tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils import dlpack

EXTENSION_DEVICE = 12  # kDLExtDev of dlpack.h: a device type that DLPack does not define


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8], ids=str
)
def test_round_trip_shares_memory(dtype: torch.dtype) -> None:
    x = torch.arange(6).to(dtype).to("bp:1").view(2, 3).t()
    y = dlpack.from_dlpack(dlpack.to_dlpack(x))
    assert (y.device, y.dtype, y.shape, y.stride()) == (x.device, x.dtype, x.shape, x.stride())
    assert y.data_ptr() == x.data_ptr()
    x.zero_()
    assert not y.any()


def test_from_dlpack_accepts_tensors() -> None:
    x = torch.arange(3.0, device="bp")
    assert x.__dlpack_device__() == (EXTENSION_DEVICE, 0)
    assert torch.ones(1, device="bp:2").__dlpack_device__() == (EXTENSION_DEVICE, 2)
    y = torch.from_dlpack(x)
    assert y.device == x.device
    assert y.data_ptr() == x.data_ptr()


def test_memory_is_freed_with_the_last_reference() -> None:
    before = torch.accelerator.memory_allocated()
    y = torch.from_dlpack(torch.ones(1000, device="bp"))
    assert torch.accelerator.memory_allocated() > before
    assert y.sum().item() == 1000
    del y
    assert torch.accelerator.memory_allocated() == before
    capsule = dlpack.to_dlpack(torch.ones(1000, device="bp"))
    del capsule  # never consumed
    assert torch.accelerator.memory_allocated() == before


def test_copies_are_made_on_request() -> None:
    x = torch.ones(3, device="bp")
    y = torch.from_dlpack(x, copy=True)
    assert y.data_ptr() != x.data_ptr()
    assert y.device == x.device
    assert torch.from_dlpack(x, device="bp:0").data_ptr() == x.data_ptr()


def test_numpy_arrays_to_bp() -> None:
    array = np.arange(4, dtype=np.float32)
    x = torch.from_dlpack(array).to("bp")
    assert x.tolist() == [0, 1, 2, 3]
    assert torch.from_numpy(array).to("bp").tolist() == [0, 1, 2, 3]
    assert torch.asarray(array, device="bp").device.type == "bp"
    assert torch.tensor(array, device="bp").tolist() == [0, 1, 2, 3]


def test_from_dlpack_between_devices() -> None:
    x = torch.ones(2, device="bp")
    assert torch.from_dlpack(x, device="cpu").tolist() == [1, 1]
    assert torch.from_dlpack(torch.ones(2), device="bp").device.type == "bp"
    with pytest.raises(ValueError, match=r"cannot move DLPack tensor .* without copying"):
        torch.from_dlpack(x, device="cpu", copy=False)


def test_numpy_reads_pinned_tensors_in_place() -> None:
    pinned = torch.arange(3.0).pin_memory()
    assert np.asarray(pinned).tolist() == [0, 1, 2]
    assert np.from_dlpack(pinned).ctypes.data == pinned.data_ptr()


def test_tensors_that_dlpack_does_not_support() -> None:
    with pytest.raises(BufferError, match=r"requires gradient|require gradient"):
        torch.ones(1, device="bp", requires_grad=True).__dlpack__()
    with pytest.raises(BufferError, match="conjugate bit"):
        torch.ones(1, device="bp", dtype=torch.complex64).conj().__dlpack__()


def test_conversion_to_numpy_raises_pytorchs_error() -> None:
    x = torch.ones(3, device="bp")
    message = (
        r"can't convert bp:0 device type tensor to numpy\. Use Tensor\.cpu\(\) to copy the tensor to host memory first"
    )
    for convert in (x.numpy, x.__array__, lambda: np.asarray(x), lambda: np.array([x, x]), lambda: np.sin(x)):
        with pytest.raises(TypeError, match=message):
            convert()
    assert x.numpy(force=True).tolist() == [1, 1, 1]
    assert x.cpu().numpy().tolist() == [1, 1, 1]
    assert torch.ones(1, device="bp", requires_grad=True).numpy(force=True).tolist() == [1]


def test_numpy_from_dlpack_raises() -> None:
    with pytest.raises((BufferError, RuntimeError), match=r"[Uu]nsupported device"):
        np.from_dlpack(torch.ones(3, device="bp"))


def test_there_is_no_cuda_array_interface() -> None:
    x = torch.ones(3, device="bp")
    assert not hasattr(x, "__cuda_array_interface__")
    with pytest.raises(TypeError):
        memoryview(x)


def test_numpy_scalars_and_arrays_as_operands() -> None:
    x = torch.ones(3, device="bp")
    assert (x * np.float32(2)).tolist() == [2, 2, 2]
    assert x[np.int64(1)].item() == 1
    assert x[np.array([0, 2])].tolist() == [1, 1]
    assert x.new_tensor(np.arange(2)).device.type == "bp"
    assert float(x[0]) == 1.0
    assert f"{x[0]:.2f}" == "1.00"
