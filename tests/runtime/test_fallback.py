"""The fallback on a device with host-accessible memory: PyTorch's CPU kernels on bp memory, without copies."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_backplane import _C


def allocated() -> int:
    gc.collect()
    return torch.accelerator.memory_allocated()


def test_results_are_in_bp_memory_and_counted() -> None:
    x = torch.ones(1000, device="bp")
    before = allocated()
    y = x + 1
    assert y.device.type == "bp"
    assert allocated() - before == 4096  # 4,000 bytes in blocks of 512
    z = y.sort()
    assert allocated() - before == 3 * 4096 + 4096  # values, and indices of 8,000 bytes in 8,192
    del y, z
    assert allocated() == before


def test_results_have_the_dispatch_keys_of_bp_tensors() -> None:
    """A result takes over the CPU kernel's tensor and must keep none of its dispatch keys."""
    fresh = torch._C._dispatch_keys(torch.empty(2, device="bp"))
    x = torch.ones(2, 2, device="bp")
    for result in (x + 1, x @ x, x.sum(), torch.cat([x, x]), *x.sort(), torch.linalg.inv(x + x.diag().diag()), x.t()):
        assert torch._C._dispatch_keys(result) == fresh
    inference = torch.inference_mode()(lambda: torch._C._dispatch_keys(torch.empty(2, device="bp")))()
    with torch.inference_mode():
        assert torch._C._dispatch_keys(x + 1) == inference
    with torch.autocast("bp", dtype=torch.bfloat16):
        assert ((x + 1) @ (x + 1)).dtype == torch.bfloat16


def test_temporaries_of_a_kernel_are_freed() -> None:
    x = torch.randn(64, 64, device="bp")
    before = allocated()
    torch.linalg.svd(x)
    torch.linalg.inv(x)
    torch.nn.functional.conv2d(x.view(1, 1, 64, 64), x[:3, :3].reshape(1, 1, 3, 3))
    torch.fft.fft2(x)
    assert allocated() == before


def test_fallbacks_are_counted() -> None:
    x = torch.eye(3, device="bp")
    _C.reset_fallback_counts()
    torch.linalg.eigvals(x)
    torch.linalg.eigvals(x)
    assert _C.fallback_counts() == {"aten::_linalg_eigvals": 2}
    _C.reset_fallback_counts()
    assert _C.fallback_counts() == {}


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("native_layer_norm", lambda x: torch.nn.functional.layer_norm(x, (4,))),
        ("native_group_norm", lambda x: torch.nn.functional.group_norm(x, 2)),
        ("addr", lambda x: torch.addr(x, x[:, 0], x[0])),
        ("mse_loss", lambda x: torch.nn.functional.mse_loss(x, x + 1)),
        ("mul.Tensor", lambda x: x * x),
    ],
)
def test_cpu_kernels_are_preferred_to_composite_ones(name: str, function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 4)
    on_bp = x.to("bp")
    _C.reset_fallback_counts()
    result = function(on_bp)
    assert _C.fallback_counts()[f"aten::{name}"] == 1
    assert torch.equal(result.cpu(), function(x))  # bit for bit


def test_zero_copy_fallbacks_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    torch.ones(3, device="bp").digamma()
    assert not [warning for warning in recwarn if "runs on the CPU" in str(warning.message)]


def test_in_place_operators_keep_the_memory() -> None:
    x = torch.arange(6.0, device="bp").view(2, 3)
    address = x.data_ptr()
    assert x.exp_() is x
    x.add_(1).clamp_(max=5).t_()
    assert x.data_ptr() == address
    assert x.shape == (3, 2)
    expected = torch.arange(6.0).view(2, 3).exp_().add_(1).clamp_(max=5).t_()
    torch.testing.assert_close(x.cpu(), expected)


def test_in_place_on_views() -> None:
    x = torch.zeros(4, 4, device="bp")
    assert x[1:3, ::2].fill_(2).data_ptr() == x.data_ptr() + 16
    x[:, 3].index_add_(0, torch.tensor([0, 3], device="bp"), torch.ones(2, device="bp"))
    x.t()[1].copy_(torch.arange(4.0))
    x[x > 2] = -1
    assert x.tolist() == [[0, 0, 0, 1], [2, 1, 2, 0], [2, 2, 2, 0], [0, -1, 0, 1]]


def test_out_of_the_right_size_is_written_in_place() -> None:
    out = torch.empty(3, device="bp")
    address = out.data_ptr()
    result = torch.add(torch.ones(3, device="bp"), 1, out=out)
    assert result is out
    assert out.data_ptr() == address
    assert out.tolist() == [2, 2, 2]


def test_out_that_is_empty_grows_in_bp_memory() -> None:
    before = allocated()
    out = torch.empty(0, device="bp")
    torch.cumsum(torch.ones(1000, device="bp"), 0, out=out)
    assert out.shape == (1000,)
    assert out[-1].item() == 1000
    assert allocated() - before == 4096
    assert out.untyped_storage().device.type == "bp"
    out.untyped_storage().resize_(0)
    assert allocated() == before


def test_out_of_another_size_is_resized_with_pytorchs_warning() -> None:
    out = torch.empty(2, device="bp")
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.mul(torch.ones(5, device="bp"), 3, out=out)
    assert out.tolist() == [3] * 5
    assert out.device.type == "bp"


def test_out_that_shares_its_storage_grows_in_all_views() -> None:
    base = torch.zeros(4, device="bp")
    out = base[:0]
    torch.add(torch.ones(8, device="bp"), 1, out=out)
    assert out.tolist() == [2] * 8
    assert base.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    assert base.tolist() == [2] * 4


def test_several_outs() -> None:
    values, indices = torch.empty(0, device="bp"), torch.empty(0, dtype=torch.int64, device="bp")
    x = torch.tensor([[3.0, 1.0], [0.0, 2.0]], device="bp")
    result = torch.max(x, 1, out=(values, indices))
    assert result.values is values
    assert values.tolist() == [3, 2]
    assert indices.tolist() == [0, 1]
    u, s, v = (torch.empty(0, device="bp") for _ in range(3))
    torch.linalg.svd(x, out=(u, s, v))
    torch.testing.assert_close((u @ s.diag() @ v).cpu(), x.cpu())


def test_out_of_another_dtype_or_layout() -> None:
    out = torch.empty(3, dtype=torch.float64, device="bp")
    torch.add(torch.ones(3, device="bp"), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="result type Float can't be cast to the desired output type"):
        torch.add(torch.ones(3, device="bp"), 1, out=torch.empty(3, dtype=torch.int64, device="bp"))
    out = torch.empty(3, 2, device="bp").t()
    torch.add(torch.ones(2, 3, device="bp"), 1, out=out)
    assert out.stride() == (1, 2)
    assert out.tolist() == [[2] * 3] * 2


def test_arguments_that_overlap() -> None:
    x = torch.arange(5.0, device="bp")
    with pytest.raises(
        RuntimeError, match="unsupported operation: some elements of the input tensor and the written-to"
    ):
        torch.add(x[:-1], 1, out=x[1:])
    x.mul_(x)
    assert x.tolist() == [0, 1, 4, 9, 16]
    torch.sub(x, x, out=x)
    assert x.tolist() == [0] * 5
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.zeros(1, device="bp").expand(3).add_(1)


def test_tensor_lists() -> None:
    x = torch.arange(6.0, device="bp").view(2, 3)
    assert torch.cat([x, x[:1], x.t().t()]).tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [0, 1, 2], [3, 4, 5]]
    assert torch.stack([x, x], 1).shape == (2, 2, 3)
    assert torch.cat([torch.empty(0, device="bp"), x[0]]).tolist() == [0, 1, 2]
    parts = torch.split_with_sizes_copy(x, [1, 2], 1)
    assert [part.tolist() for part in parts] == [[[0], [3]], [[1, 2], [4, 5]]]
    assert all(part.device.type == "bp" for part in parts)
    torch._foreach_mul_([x, x[0]], 2)
    assert x.tolist() == [[0, 4, 8], [6, 8, 10]]
    assert torch.block_diag(x, x).shape == (4, 6)
    assert [t.shape for t in torch.meshgrid(x[0], x[1], indexing="ij")] == [(3, 3)] * 2


def test_optional_tensors() -> None:
    x = torch.arange(6.0, device="bp").view(2, 3)
    assert x[:, torch.tensor([0, 2], device="bp")].tolist() == [[0, 2], [3, 5]]
    index = torch.tensor([1], device="bp")
    assert torch.ops.aten.index(x.unsqueeze(0), [None, index, index]).tolist() == [[4]]
    weightless = torch.nn.functional.layer_norm(x, (3,))
    weighted = torch.nn.functional.layer_norm(x, (3,), torch.ones(3, device="bp"), torch.zeros(3, device="bp"))
    torch.testing.assert_close(weightless, weighted)
    assert torch.bincount(torch.tensor([0, 1, 1], device="bp"), weights=x[0]).tolist() == [0, 3]
    assert torch.histogram(x.cpu(), 2).hist.tolist() == torch.histogram(x, 2).hist.tolist()


def test_results_that_alias_arguments() -> None:
    x = torch.randn(3, device="bp")
    assert torch.ops.aten.relu_(x) is x
    y = torch.zeros(3, device="bp")
    torch.ops.aten.add.out(x, 1, out=y)
    assert torch.ops.aten.add.out(x, 1, out=y) is y
    mean, variance = torch.zeros(2, device="bp"), torch.ones(2, device="bp")
    values = torch.ops.aten.native_batch_norm(
        torch.tensor([[0.0, 2.0], [2.0, 4.0]], device="bp"), None, None, mean, variance, True, 0.5, 1e-5
    )
    assert all(value.device.type == "bp" for value in values)
    assert mean.tolist() == [0.5, 1.5]
    assert variance.tolist() == [1.5, 1.5]


def test_results_that_share_one_storage() -> None:
    """The CPU kernel splits one buffer into several results. They share it on bp, too, and it is counted once."""
    x = torch.randn(8, 4, device="bp")
    before = allocated()
    parts = torch.ops.aten.unsafe_chunk(x.clone(), 2)
    assert allocated() - before == 512
    assert parts[0].untyped_storage().data_ptr() == parts[1].untyped_storage().data_ptr()
    del parts
    assert allocated() == before


def test_conjugate_and_negative_arguments() -> None:
    x = torch.randn(3, 3, dtype=torch.complex64)
    y = x.to("bp")
    for function in (
        lambda t: t.conj() @ t,
        lambda t: t.conj().sum(),
        lambda t: torch.linalg.solve(t.mH, t),
        lambda t: t.conj().imag.exp(),
        lambda t: torch.fft.ifft(t.conj()),
        lambda t: t.conj().clone().mul_(2),
        lambda t: torch.vdot(t[0], t[1]),
    ):
        torch.testing.assert_close(function(y).cpu(), function(x))


def test_empty_and_zero_dimensional_tensors() -> None:
    empty = torch.empty(0, 3, device="bp")
    assert (empty + 1).shape == (0, 3)
    assert empty.sum().item() == 0
    assert torch.cat([empty, empty]).shape == (0, 3)
    assert empty.to("bp:1").shape == (0, 3)
    assert (empty @ torch.ones(3, 2, device="bp")).shape == (0, 2)
    scalar = torch.tensor(3.0, device="bp")
    assert (scalar + scalar).item() == 6
    assert scalar.sum().item() == 3
    with pytest.raises(RuntimeError, match=r"max\(\): Expected reduction dim to be specified for input.numel\(\) == 0"):
        torch.empty(0, device="bp").max()


def test_kernels_wait_for_the_work_of_the_stream() -> None:
    pinned = torch.full((4,), 7.0).pin_memory()
    _C.sleep(30)
    x = pinned.to("bp", non_blocking=True)
    assert (x + 1).tolist() == [8, 8, 8, 8]


def test_memory_that_is_freed_while_a_copy_into_it_is_pending() -> None:
    """The block is reused immediately, in stream order: the copy must not overwrite what the next kernel writes."""
    pinned = torch.full((4,), 7.0).pin_memory()
    _C.sleep(30)
    x = pinned.to("bp", non_blocking=True)
    address = x.data_ptr()
    del x
    y = torch.full((4,), 2.0, device="bp")
    assert y.data_ptr() == address
    torch.accelerator.synchronize()
    assert y.tolist() == [2, 2, 2, 2]


def test_kernels_wait_for_events_of_another_stream() -> None:
    stream = torch.Stream("bp")
    pinned = torch.full((4,), 7.0).pin_memory()
    with stream:
        _C.sleep(500)  # longer than the lines after the sleep take on a loaded machine
        x = pinned.to("bp", non_blocking=True)
        event = torch.Event("bp")
        event.record()
    assert not event.query()
    event.wait()
    assert (x + 1).tolist() == [8, 8, 8, 8]


@pytest.mark.filterwarnings("ignore::UserWarning")  # «beta state», «prototype stage», «deprecated»
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("sparse", lambda x: x.to_sparse()),
        ("sparse", lambda x: torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64, device="bp"), x[:1, 0])),
        ("sparse", lambda x: torch.sparse_coo_tensor([[0]], [1.0], device="bp")),
        ("sparse", lambda x: x.cpu().to_sparse().to("bp")),
        ("sparse", lambda x: x.cpu().to_sparse_csr().to("bp")),
        ("sparse", lambda x: x.to_sparse_csr()),
        ("sparse", lambda x: x.to_sparse_bsr((1, 1))),
        ("sparse", lambda x: torch.empty(2, 2, device="bp", layout=torch.sparse_coo)),
        ("sparse", lambda x: torch.empty(2, 2, device="bp", layout=torch.sparse_csr)),
        ("sparse", lambda x: torch.zeros(2, 2, device="bp", layout=torch.sparse_coo)),
        (
            "sparse",
            lambda x: (
                torch.nn.functional.embedding(torch.tensor([0], device="bp"), x.requires_grad_(), sparse=True)
                .sum()
                .backward()
            ),
        ),
        ("quantized", lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
        ("quantized", lambda x: torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8).to("bp")),
        (
            "quantized",
            lambda x: torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8, device="bp"),
        ),
        (
            "quantized",
            lambda x: torch.quantize_per_channel(
                x, torch.ones(2, device="bp"), torch.zeros(2, device="bp"), 0, torch.qint8
            ),
        ),
        ("nested", lambda x: torch.nested.nested_tensor([x, x])),
        ("nested", lambda x: torch.nested.as_nested_tensor([x, x])),
        ("nested", lambda x: torch.nested.nested_tensor([x.cpu(), x.cpu()]).to("bp")),
        ("mkldnn", lambda x: x.to_mkldnn()),
    ],
)
def test_unsupported_kinds_of_tensors_are_refused(name: str, function: object) -> None:
    with pytest.raises(NotImplementedError, match=name) as refusal:
        function(torch.ones(2, 2, device="bp"))  # type: ignore[operator]
    assert "bp" in str(refusal.value)


def test_jagged_tensors_work() -> None:
    parts = [torch.ones(2, 3, device="bp"), torch.full((4, 3), 2.0, device="bp")]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    assert jagged.device == torch.device("bp:0")
    (jagged * 2).values().sum().backward()
    assert [(part * 2).sum().item() for part in jagged.unbind()] == [12, 48]
    assert jagged.grad.values().tolist() == [[2, 2, 2]] * 6


def test_operator_without_any_kernel_is_refused_by_name() -> None:
    with torch.library._scoped_library("backplane_test_fallback", "DEF") as library:
        library.define("nowhere(Tensor x) -> Tensor")
        with pytest.raises(NotImplementedError, match=r"backplane_test_fallback::nowhere.*there is no CPU kernel"):
            torch.ops.backplane_test_fallback.nowhere(torch.ones(1, device="bp"))


def test_ctc_loss_accepts_lengths_on_the_cpu() -> None:
    scores, targets = torch.randn(5, 2, 4).log_softmax(2), torch.tensor([[1, 2], [2, 3]])
    lengths = torch.tensor([5, 5]), torch.tensor([2, 2])
    op = torch.ops.aten._ctc_loss.Tensor
    assert torch.equal(op(scores.to("bp"), targets.to("bp"), *lengths)[0].cpu(), op(scores, targets, *lengths)[0])
    with pytest.raises(RuntimeError, match="at least two devices, bp:0 and cpu"):
        op(scores.to("bp"), targets, *lengths)


def test_operators_at_addresses_of_removed_operators() -> None:
    """A removed library's operators are replaced by operators with other arguments."""
    for number in range(10):
        with torch.library._scoped_library("backplane_test_first", "DEF") as library:
            library.define(f"first{number}(Tensor x) -> Tensor")
            library.impl(f"first{number}", lambda x: x + 1, "CPU")
            first = getattr(torch.ops.backplane_test_first, f"first{number}")
            assert first(torch.ones(2, device="bp")).tolist() == [2, 2]
        with torch.library._scoped_library("backplane_test_second", "DEF") as library:
            library.define(f"second{number}(Tensor x, Tensor(a!) y, Tensor z) -> ()")
            library.impl(f"second{number}", lambda x, y, z: (y.copy_(x + z), None)[1], "CPU")
            y = torch.zeros(2, device="bp")
            second = getattr(torch.ops.backplane_test_second, f"second{number}")
            second(torch.ones(2, device="bp"), y, torch.ones(2, device="bp"))
            assert y.tolist() == [2, 2]
            assert _C.fallback_counts()[f"backplane_test_second::second{number}"] == 1


def test_errors_of_the_cpu_kernel_propagate() -> None:
    x = torch.zeros(2, 2, device="bp")
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.inv(x)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        x @ torch.zeros(3, 2, device="bp")
    with pytest.raises(RuntimeError, match=r"The size of tensor a .* must match the size of tensor b"):
        x + torch.zeros(3, device="bp")
    assert x.device.type == "bp"
    assert torch.empty(2).device.type == "cpu"  # the CPU's allocator is restored after an error
    assert (x + 1).sum().item() == 4


def test_cpu_tensors_after_a_fallback_are_in_cpu_memory() -> None:
    before = allocated()
    torch.ones(3, device="bp") + 1
    y = torch.ones(1000)
    assert y.device.type == "cpu"
    assert _C.is_pinned_address(y.data_ptr()) is False
    assert allocated() == before


def hold(x: Tensor) -> Tensor:
    return x.sort().values


def test_memory_that_outlives_its_operator_is_freed_once() -> None:
    before = allocated()
    kept = [hold(torch.rand(100, device="bp")) for _ in range(10)]
    assert allocated() - before == 10 * 512
    numbers = [value.numpy(force=True) for value in kept]
    del kept
    assert allocated() == before
    assert len(numbers) == 10


def test_in_place_operators_do_not_change_lazy_clones() -> None:
    original = torch.arange(4.0, device="bp")
    clone = torch._lazy_clone(original)
    clone.add_(1)
    original.mul_(10)
    assert original.tolist() == [0, 10, 20, 30]
    assert clone.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], ids=str)
def test_triangles_write_to_strided_batches(dtype: torch.dtype) -> None:
    """Batches without a constant distance between matrices, with which PyTorch's CPU kernels write out of bounds."""
    x = (3 * torch.randn(3, 3, 2, 6)).to(dtype)
    for function in (torch.tril, torch.triu):
        for diagonal in (-1, 0, 2):
            for strides in ((3, 72, 1, 9), (12, 40, 6, 1), (36, 12, 6, 1), (1, 3, 54, 9)):
                memory, expected = torch.zeros(400, dtype=dtype, device="bp"), torch.zeros(400, dtype=dtype)
                out = memory.as_strided(x.shape, strides, 20)
                assert function(x.to("bp"), diagonal, out=out) is out
                expected.as_strided(x.shape, strides, 20).copy_(function(x, diagonal))
                assert torch.equal(memory.cpu(), expected), (function, diagonal, strides)
        with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
            function(x.to("bp"), out=torch.zeros(6, 2, 3, 3, dtype=torch.int16, device="bp").permute(2, 3, 1, 0))
