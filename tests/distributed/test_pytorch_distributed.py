"""PyTorch's tests of torch.distributed, with backend `backplane` and bp tensors on four ranks (renamed_tests.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from renamed_tests import InForks, as_gloo, as_nccl

TEMPLATES = {module: module.DistributedTest._DistTestBase for module in (as_nccl, as_gloo)}

_ITSELF = "Gloo has no connection of a rank to itself; the error says to copy the tensor"
_NCCL = "tests what only NCCL has"
_NAMES = "PyTorch has this for the backend that is named gloo only"
_SPARSE = "bp has no sparse tensors"
_ON_CPU = "creates its tensor with torch.DoubleTensor, which is on the CPU whatever the default device"
EXPECTED_FAILURES: dict[Any, dict[str, str]] = {
    as_nccl: {
        "test_batch_isend_irecv_nccl": _ITSELF,
        "test_batch_isend_irecv_self_nccl": _ITSELF,
        "test_ddp_profiling_torch_profiler": f"{_NCCL}: events with the metadata of collectives",
        "test_monitored_barrier_allreduce_hang": f"{_NCCL}: the text of a timeout",
        "test_monitored_barrier_allreduce_hang_wait_all_ranks": f"{_NCCL}: the text of a timeout",
        "test_nccl_high_priority_stream": f"{_NCCL}: its options",
    },
    as_gloo: {
        "test_barrier": _ON_CPU,
        "test_barrier_full_group": _ON_CPU,
        "test_barrier_group": _ON_CPU,
        "test_ddp_logging_data_cpu": "PyTorch calls all backends of other packages `custom` in these data",
        "test_monitored_barrier_failure_order": _NAMES,
        "test_monitored_barrier_gloo": _NAMES,
        "test_monitored_barrier_gloo_rank_0_timeout": _NAMES,
        "test_monitored_barrier_gloo_subgroup": _NAMES,
        "test_monitored_barrier_wait_all_ranks": _NAMES,
        "test_scatter_object_list": "sends a tensor within an object, which arrives on the sender's device",
        "test_sparse_all_reduce_sum": _SPARSE,
        "test_sparse_all_reduce_sum_cuda": _SPARSE,
    },
}
TOO_LARGE = {"test_ddp_uneven_inputs": "a convolution needs 4 GB on each rank, and more than PyTorch's 400 seconds"}
# In `make test`.
QUICK = (
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_all_gather_v_cuda",
    "test_all_reduce_sum_cuda_async",
    "test_all_to_all_cuda",
    "test_ddp_comm_hook_logging",
    "test_ddp_hook_parity_allreduce",
    "test_gather",
    "test_new_subgroups",
    "test_reduce_scatter_v_cuda",
    "test_send_recv_any_source",
)


def _is_skipped(module: Any, name: str) -> bool:
    is_skipped: bool = getattr(getattr(TEMPLATES[module], name), "__unittest_skip__", False)
    return is_skipped


class TestAsNccl(InForks, as_nccl.TestDistBackend, TEMPLATES[as_nccl]):
    """Tests of CUDA tensors and NCCL, except those that TestAsGloo runs. Those that neither runs are skipped here."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class TestAsGloo(InForks, as_gloo.TestDistBackend, TEMPLATES[as_gloo]):
    """Tests of CPU tensors and Gloo, with bp as the default device: only those that are skipped for NCCL."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @classmethod
    def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
        torch.bp.set_device(rank)
        torch.set_default_device("bp")
        super()._run(rank, *args, **kwargs)


def _select() -> None:
    for name in dir(TEMPLATES[as_gloo]):
        if not name.startswith("test_"):
            continue
        as_cpu = _is_skipped(as_nccl, name) and not _is_skipped(as_gloo, name)
        module = as_gloo if as_cpu else as_nccl
        if name != "test_ddp_has_finalized":  # setUp() of both classes reads it
            setattr(TestAsNccl if as_cpu else TestAsGloo, name, None)
        test = getattr(TEMPLATES[module], name)
        if name in EXPECTED_FAILURES[module]:
            pytest.mark.xfail(reason=EXPECTED_FAILURES[module][name], strict=True)(test)
        if name in TOO_LARGE:
            pytest.mark.skip(reason=TOO_LARGE[name])(test)
        if name not in QUICK:
            pytest.mark.slow(test)


_select()
