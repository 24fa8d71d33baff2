"""lu_unpack, and decompositions on devices whose driver has no library for them."""

from __future__ import annotations

import pytest
import torch
from agreement import DEVICE, agrees

from torch_backplane import plans
from torch_backplane.planning import LibraryCall


@pytest.mark.parametrize("shape", [(4, 4), (3, 5, 2), (2, 1, 3, 6), (0, 3, 3), (2, 0, 3), (1, 1)], ids=str)
def test_lu_unpack(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for data, too in ((True, True), (False, True), (True, False)):

        def unpack(lu: torch.Tensor, data: bool = data, too: bool = too) -> list[torch.Tensor]:
            _, pivots = torch.linalg.lu_factor(lu.cpu())
            found = torch.lu_unpack(lu, pivots.to(lu.device), unpack_data=data, unpack_pivots=too)
            return [*(found[:1] if too else ()), *(found[1:] if data else ())]

        agrees(unpack, torch.randn(shape))


@pytest.mark.parametrize("bad", [0, 4, -7])
def test_pivots_out_of_range_are_an_error(bad: int) -> None:
    pivots = torch.tensor([2, bad, 3], dtype=torch.int32)

    def unpack(device: str) -> None:
        torch.lu_unpack(torch.randn(3, 3, device=device), pivots.to(device))
        torch.accelerator.synchronize()  # raises the error of the device

    for device in ("cpu", DEVICE):
        with pytest.raises(RuntimeError, match=r"pivots passed to lu_unpack must be between 1 and LU.size\(-2\)"):
            unpack(device)


def test_another_number_of_pivots_is_an_error() -> None:
    """PyTorch's CPU kernel accesses memory out of bounds instead."""
    lu = torch.randn(2, 3, 4, device=DEVICE)
    for shape in ((2, 4), (3,), (3, 3), (2, 2)):
        with pytest.raises(RuntimeError, match=r"lu_unpack: LU_pivots must have the shape \[2, 3\], but got \["):
            torch.lu_unpack(lu, torch.ones(shape, dtype=torch.int32, device=DEVICE))


def test_decompositions_without_a_library_run_on_the_cpu() -> None:
    if LibraryCall(torch.device(DEVICE), "lu", torch.float32).why_not() is None:
        pytest.skip("the driver has a library for them: see tests/cuda/test_cuda_solvers.py")
    a = torch.randn(3, 3) + 5 * torch.eye(3)
    for function in (torch.linalg.inv_ex, torch.linalg.det, lambda a: torch.linalg.solve_triangular(a, a, upper=True)):
        text = plans.explain(function, a.to(DEVICE))
        assert "the driver's library is not available on this device" in text, text
