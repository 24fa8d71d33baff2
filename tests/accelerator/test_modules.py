"""torch.nn on bp compared with the CPU: results and gradients of recurrent, convolution, attention and other layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map_only


def assert_same(on_bp: Any, on_cpu: Any, **tolerance: float) -> None:
    for mine, theirs in zip(tree_flatten(on_bp)[0], tree_flatten(on_cpu)[0], strict=True):
        if isinstance(theirs, Tensor):
            assert mine.device.type == "bp"
            torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), **tolerance)


def check(module: nn.Module, *inputs: Any, **options: Any) -> None:
    """Runs module on copies of inputs on both devices: outputs, gradients and buffers must agree."""
    outputs, gradients = [], []
    for device in ("bp", "cpu"):
        layer = copy.deepcopy(module).to(device)
        moved = tree_map_only(
            Tensor,
            lambda t, device=device: t.detach().to(device).requires_grad_(t.is_floating_point() or t.is_complex()),
            inputs,
        )
        result = layer(*moved, **tree_map_only(Tensor, lambda t, device=device: t.to(device), options))
        leaves = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
        if leaves:
            sum(
                (leaf * torch.linspace(0, 1, leaf.numel(), device=device).view(leaf.shape)).sum() for leaf in leaves
            ).backward()
        outputs.append(result)
        gradients.append(
            [leaf.grad for leaf in tree_flatten(moved)[0] if isinstance(leaf, Tensor) and leaf.grad is not None]
            + [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
            + list(layer.buffers())
        )
    assert_same(*outputs, rtol=1e-4, atol=1e-5)
    assert_same(*gradients, rtol=1e-3, atol=1e-4)


class Function(nn.Module):
    """Wraps a function in a module for check()."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- recurrent -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=["LSTM", "GRU", "RNN"])
def test_recurrent_layers(kind: type[nn.RNNBase], layers: int, bidirectional: bool) -> None:
    module = kind(3, 4, layers, bidirectional=bidirectional)
    check(module, torch.randn(5, 2, 3))
    batch_first = kind(3, 4, layers, bidirectional=bidirectional, batch_first=True, bias=False)
    check(batch_first, torch.randn(2, 5, 3))
    check(module, torch.randn(5, 3))  # without a batch


def test_recurrent_layers_with_states_and_projections() -> None:
    check(nn.LSTM(3, 4, 2), torch.randn(5, 2, 3), (torch.randn(2, 2, 4), torch.randn(2, 2, 4)))
    check(nn.LSTM(3, 4, proj_size=2), torch.randn(5, 2, 3))
    check(nn.GRU(3, 4), torch.randn(5, 2, 3), torch.randn(1, 2, 4))
    check(nn.RNN(3, 4, nonlinearity="relu"), torch.randn(5, 2, 3), torch.randn(1, 2, 4))
    check(nn.LSTMCell(3, 4), torch.randn(2, 3), (torch.randn(2, 4), torch.randn(2, 4)))
    check(nn.GRUCell(3, 4, bias=False), torch.randn(2, 3), torch.randn(2, 4))
    check(nn.RNNCell(3, 4), torch.randn(2, 3))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=["LSTM", "GRU", "RNN"])
def test_packed_sequences(kind: type[nn.RNNBase]) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(3, 4, bidirectional=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Any]:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 5, 3]), enforce_sorted=False)
            output, state = self.rnn(packed)
            assert output.data.device == x.device
            return nn.utils.rnn.pad_packed_sequence(output)[0], state

    check(Packed(), torch.randn(5, 3, 3))


def test_packed_sequences_move() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert packed.to("bp").data.device.type == "bp"
    assert packed.bp().is_bp
    assert not packed.is_bp
    assert packed.to("bp").cpu().data.device.type == "cpu"
    assert packed.to("bp").batch_sizes.device.type == "cpu"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=["LSTM", "GRU"])
def test_dropout_between_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    module = kind(3, 4, 2, dropout=0.5).to("bp")
    x = torch.randn(5, 2, 3, device="bp")
    first, second = module(x)[0], module(x)[0]
    assert not torch.equal(first, second)
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])


def test_double_backward_through_recurrent_layers() -> None:
    for module, function in ((nn.LSTM(2, 2), lambda o: o[0]), (nn.GRU(2, 2), lambda o: o[0])):
        module.double().to("bp")
        x = torch.randn(2, 1, 2, dtype=torch.float64, device="bp", requires_grad=True)
        assert torch.autograd.gradcheck(lambda x, m=module, f=function: f(m(x)), (x,))


# --- convolutions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2}, {"groups": 2}, {"bias": False}], ids=str
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions(dimensions: int, transposed: bool, options: dict[str, Any]) -> None:
    kinds = (
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        if transposed
        else (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    )
    check(kinds[dimensions - 1](4, 6, 3, **options), torch.randn(2, 4, *[7] * dimensions))


def test_convolutions_in_other_layouts() -> None:
    check(nn.Conv2d(4, 4, 3, padding="same", padding_mode="circular"), torch.randn(4, 6, 6))  # no batch
    check(nn.Conv2d(4, 4, 3, groups=4), torch.randn(2, 4, 6, 6))  # depthwise
    check(nn.ConvTranspose2d(4, 4, 3, stride=2, output_padding=1), torch.randn(2, 4, 5, 5))
    check(nn.Conv2d(3, 2, 3), torch.randn(0, 3, 5, 5))  # an empty batch
    module = nn.Conv2d(4, 6, 3).to("bp", memory_format=torch.channels_last)
    x = torch.randn(2, 4, 7, 7, device="bp").to(memory_format=torch.channels_last).requires_grad_()
    y = module(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        y, F.conv2d(x.contiguous(), module.weight.contiguous(), module.bias), rtol=1e-4, atol=1e-5
    )
    y.sum().backward()
    assert x.grad.shape == x.shape
    for gradient in (x.grad, module.weight.grad):
        assert gradient.is_contiguous(memory_format=torch.channels_last)
    for dtype in (torch.float64, torch.bfloat16, torch.complex64):
        result = nn.Conv1d(2, 2, 2, dtype=dtype, device="bp")(torch.ones(1, 2, 4, dtype=dtype, device="bp"))
        assert result.dtype == dtype


def test_double_backward_through_convolution() -> None:
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64, device="bp", requires_grad=True)
    weight = torch.randn(2, 2, 3, 3, dtype=torch.float64, device="bp", requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, device="bp", requires_grad=True)
    assert torch.autograd.gradcheck(F.conv2d, (x, weight, bias))
    assert torch.autograd.gradgradcheck(F.conv2d, (x, weight, bias))
    assert torch.autograd.gradgradcheck(F.conv_transpose2d, (x, weight, bias))


# --- attention -------------------------------------------------------------------------------------------------------

ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "boolean mask": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()},
    "additive mask": {"attn_mask": torch.linspace(-1, 1, 36).view(6, 6)},
    "mask per head": {"attn_mask": torch.linspace(-1, 1, 144).view(1, 4, 6, 6)},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_scaled_dot_product_attention(name: str) -> None:
    inputs = [torch.randn(2, 4, 6, 8) for _ in range(3)]
    check(Function(F.scaled_dot_product_attention), *inputs, **ATTENTION[name])


def test_attention_with_grouped_queries_other_lengths_and_dtypes() -> None:
    attention = Function(F.scaled_dot_product_attention)
    check(attention, torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8), enable_gqa=True)
    check(attention, torch.randn(2, 4, 3, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 5))
    check(attention, torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 8))
    check(attention, *(torch.randn(2, 2, 6, 8, dtype=torch.float64) for _ in range(3)))
    half = [torch.randn(2, 2, 6, 8).bfloat16() for _ in range(3)]
    exact = F.scaled_dot_product_attention(*(tensor.double() for tensor in half))
    result = F.scaled_dot_product_attention(*(tensor.to("bp") for tensor in half)).cpu()
    assert result.dtype == torch.bfloat16
    assert (result - exact).abs().max() <= (F.scaled_dot_product_attention(*half) - exact).abs().max()


def test_gradient_of_the_attention_mask() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    check(Function(attend), *(torch.randn(2, 4, 6, 8) for _ in range(3)), torch.randn(6, 6))


@pytest.mark.parametrize(
    "backend", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "OVERRIDEABLE"]
)
def test_choosing_the_attention_backend(backend: str) -> None:
    x = torch.randn(1, 2, 8, 16)
    expected = F.scaled_dot_product_attention(x, x, x)
    on_bp = [x.to("bp") for _ in range(3)]
    with sdpa_kernel(getattr(SDPBackend, backend)):
        choice = torch.ops.aten._fused_sdp_choice(*on_bp)
        result = F.scaled_dot_product_attention(*on_bp)
    assert choice == (SDPBackend.MATH if backend == "MATH" else SDPBackend.OVERRIDEABLE).value
    torch.testing.assert_close(result.cpu(), expected)


def test_attention_with_all_backends_disabled_raises_pytorchs_error() -> None:
    x = torch.randn(1, 2, 8, 16, device="bp")
    with sdpa_kernel([SDPBackend.ERROR]), pytest.raises(RuntimeError, match="No viable backend"):
        F.scaled_dot_product_attention(x, x, x)
    F.scaled_dot_product_attention(x, x, x)


def test_attention_modules() -> None:
    x = torch.randn(5, 2, 8)
    check(nn.MultiheadAttention(8, 2), x, x, x)
    check(nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True), *(torch.randn(2, 5, n) for n in (8, 6, 4)))
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    check(nn.MultiheadAttention(8, 2), x, x, x, key_padding_mask=padding, need_weights=False)
    check(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), x)
    check(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True).eval(), x)
    check(nn.Transformer(8, 2, 1, 1, 16, dropout=0.0), x, torch.randn(4, 2, 8))


def test_the_fast_path_of_transformer_layers() -> None:
    layer = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    x = torch.randn(2, 5, 8)
    with torch.inference_mode():
        expected = layer(x)
        torch.testing.assert_close(copy.deepcopy(layer).to("bp")(x.to("bp")).cpu(), expected)


# --- normalization, pooling, embedding, losses, images ----------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.BatchNorm1d(4), (6, 4)),
        (nn.BatchNorm2d(4), (3, 4, 5, 5)),
        (nn.BatchNorm2d(4, affine=False, momentum=None), (3, 4, 5, 5)),
        (nn.BatchNorm3d(4, track_running_stats=False), (2, 4, 3, 3, 3)),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (3, 4, 5, 5)),
        (nn.GroupNorm(2, 4), (3, 4, 5)),
        (nn.LayerNorm((4, 5)), (3, 4, 5)),
        (nn.RMSNorm(5), (3, 4, 5)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_normalization(module: nn.Module, shape: tuple[int, ...], training: bool) -> None:
    check(module.train(training), torch.randn(shape) * 2 + 1)


def test_running_statistics_are_updated_in_place() -> None:
    module = nn.BatchNorm1d(2).to("bp")
    address = module.running_mean.data_ptr()
    module(torch.full((4, 2), 10.0, device="bp"))
    assert module.running_mean.data_ptr() == address
    assert module.running_mean.tolist() == pytest.approx([1, 1])
    assert module.num_batches_tracked.item() == 1


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str) -> None:
    module = nn.EmbeddingBag(10, 3, mode=mode, padding_idx=2)
    check(module, torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 4]))
    check(module, torch.tensor([[1, 2], [4, 5]]))
    if mode == "sum":
        check(module, torch.tensor([1, 2, 4]), torch.tensor([0, 2]), torch.rand(3))


def test_embedding() -> None:
    check(nn.Embedding(10, 3, padding_idx=0, scale_grad_by_freq=True), torch.tensor([[0, 1, 1], [9, 0, 3]]))
    module = nn.Embedding(10, 3, max_norm=0.5).to("bp")
    assert module(torch.tensor([1, 2], device="bp")).norm(dim=1).max().item() <= 0.5 + 1e-5
    # Host devices raise the CPU kernel's error at the call, devices with their own kernels at the next synchronization.
    with pytest.raises(IndexError, match=r"index out of range in self|embedding: index 10 is out of bounds .* size 10"):
        nn.Embedding(10, 3, device="bp")(torch.tensor([10], device="bp")).cpu()


def test_ctc_loss() -> None:
    targets, lengths = torch.randint(1, 5, (2, 3)), torch.tensor([3, 2])
    for where in ("bp", "cpu"):  # the device of the lengths
        results = []
        for device in ("bp", "cpu"):
            torch.manual_seed(1)
            logits = torch.randn(8, 2, 5).to(device).requires_grad_()
            on = where if device == "bp" else "cpu"
            loss = F.ctc_loss(
                logits.log_softmax(2), targets.to(device), torch.tensor([8, 7], device=on), lengths.to(on)
            )
            loss.backward()
            results.append((loss, logits.grad))
        assert_same(*results)


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss,
        nn.L1Loss,
        nn.SmoothL1Loss,
        nn.HuberLoss,
        nn.BCEWithLogitsLoss,
        nn.KLDivLoss,
        nn.PoissonNLLLoss,
        nn.GaussianNLLLoss,
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses(loss: type[nn.Module], reduction: str, recwarn: pytest.WarningsRecorder) -> None:
    more = [torch.rand(4, 3) + 1] if loss is nn.GaussianNLLLoss else []
    check(loss(reduction=reduction), torch.rand(4, 3), torch.rand(4, 3), *more)
    assert not [warning for warning in recwarn if "resized" in str(warning.message)]


def test_more_losses() -> None:
    labels = torch.tensor([0, 2, 1, 2])
    check(nn.CrossEntropyLoss(weight=torch.rand(3), label_smoothing=0.1, ignore_index=1), torch.randn(4, 3), labels)
    check(nn.NLLLoss(), torch.randn(4, 3, 2), torch.randint(3, (4, 2)))
    check(nn.MultiMarginLoss(), torch.randn(4, 3), labels)
    check(nn.TripletMarginLoss(), *(torch.randn(4, 3) for _ in range(3)))
    check(nn.CosineEmbeddingLoss(), torch.randn(4, 3), torch.randn(4, 3), torch.tensor([1, -1, 1, -1]))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
def test_interpolate(mode: str) -> None:
    options = {"align_corners": False, "antialias": True} if mode in ("bilinear", "bicubic") else {}
    check(Function(lambda x: F.interpolate(x, scale_factor=1.7, mode=mode)), torch.randn(1, 2, 5, 6))
    check(Function(lambda x: F.interpolate(x, size=(3, 4), mode=mode, **options)), torch.randn(1, 2, 5, 6))


def test_images() -> None:
    for mode in ("bilinear", "nearest", "bicubic"):
        for padding in ("zeros", "border", "reflection"):
            check(
                Function(lambda x, g, m=mode, p=padding: F.grid_sample(x, g, m, p, align_corners=False)),
                torch.randn(1, 2, 5, 5),
                torch.rand(1, 4, 4, 2) * 2.2 - 1.1,
            )
    check(Function(lambda theta: F.affine_grid(theta, [1, 1, 3, 3], align_corners=False)), torch.randn(1, 2, 3))
    check(Function(lambda x: F.pixel_shuffle(F.unfold(x, 2).view(1, 8, 4, 4), 2)), torch.randn(1, 2, 5, 5))
    for mode in ("reflect", "replicate", "circular"):
        check(Function(lambda x, m=mode: F.pad(x, (1, 2, 0, 1), mode=m)), torch.randn(1, 2, 4, 4))


def test_pooling() -> None:
    x = torch.randn(2, 3, 8, 8)
    check(nn.MaxPool2d(3, 2, 1, return_indices=True), x)
    check(nn.AvgPool2d(3, 2, 1, count_include_pad=False), x)
    check(nn.AdaptiveAvgPool2d((3, 1)), x)
    check(nn.AdaptiveMaxPool2d(2), x)
    check(nn.LPPool2d(2, 2), x)
    check(Function(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)), x)
    check(nn.MaxPool3d(2), torch.randn(1, 2, 4, 4, 4))
    check(nn.AvgPool1d(2), torch.randn(1, 2, 5))


# --- linear algebra and Fourier transforms ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_linear_algebra(dtype: torch.dtype) -> None:
    a = torch.randn(4, 4, dtype=dtype)
    positive = a @ a.mH + 4 * torch.eye(4, dtype=dtype)
    for function, matrix in [
        (torch.linalg.inv, a),
        (torch.linalg.det, a),
        (torch.linalg.slogdet, a),
        (torch.linalg.cholesky, positive),
        (torch.linalg.svdvals, a),
        (torch.linalg.eigvalsh, positive),
        (torch.linalg.qr, a),
        (torch.linalg.matrix_exp, a),
        (torch.linalg.pinv, a),
        (lambda t: torch.linalg.solve(t, t[:, :2]), a),
        (lambda t: torch.linalg.lstsq(t, t[:, :2]).solution, a),
        (lambda t: torch.linalg.lu_solve(*torch.linalg.lu_factor(t), t), a),
        (lambda t: torch.linalg.norm(t, "nuc"), a),
        (lambda t: torch.linalg.solve_triangular(t, t, upper=True), a),
        (lambda t: torch.linalg.multi_dot([t, t, t]), a),
        (lambda t: torch.linalg.eigvals(t).abs().sort().values, a),
    ]:
        outputs = [function(matrix.to(device)) for device in ("bp", "cpu")]
        assert_same(*outputs)


def test_fourier_transforms() -> None:
    real, imaginary = torch.randn(3, 8), torch.randn(3, 8, dtype=torch.complex64)
    for function in (torch.fft.rfft, torch.fft.rfft2, torch.fft.ihfft, torch.fft.fft):
        check(Function(lambda x, f=function: torch.view_as_real(f(x).resolve_conj())), real)
    for function in (
        torch.fft.fft,
        torch.fft.ifft2,
        torch.fft.irfft,
        torch.fft.hfft,
        torch.fft.fftshift,
        torch.fft.fftn,
    ):
        outputs = [function(imaginary.to(device)) for device in ("bp", "cpu")]
        assert_same(*outputs, rtol=1e-4, atol=1e-5)
    window = torch.hann_window(8)
    signal = torch.randn(64)
    spectra = [
        torch.stft(signal.to(device), 8, window=window.to(device), return_complex=True) for device in ("bp", "cpu")
    ]
    assert_same(*spectra, rtol=1e-4, atol=1e-5)
    back = torch.istft(spectra[0], 8, window=window.to("bp"))
    torch.testing.assert_close(back.cpu(), signal, rtol=1e-4, atol=1e-5)


def test_moving_modules() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("table", torch.ones(2), persistent=False)
    moved = module.to("bp", torch.float64)
    assert moved is module
    assert {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]} == {"bp"}
    assert module[0].weight.dtype == torch.float64
    assert module[1].num_batches_tracked.dtype == torch.int64
    assert module.bp(1)[0].weight.device == torch.device("bp:1")
    assert module.cpu()[0].weight.device.type == "cpu"
    assert isinstance(module.half()[0].weight, nn.Parameter)
    with torch.device("bp:2"):
        assert nn.Linear(2, 2).weight.device == torch.device("bp:2")
    assert nn.utils.skip_init(nn.Linear, 2, 2, device="bp").weight.device.type == "bp"
    nn.utils.parametrizations.weight_norm(nn.Linear(2, 2).to("bp"))(torch.ones(1, 2, device="bp")).sum().backward()


def test_the_attention_backend_is_chosen_for_fake_tensors() -> None:
    """The choice reads only metadata: dispatch modes see no operators that the program does not call."""
    query = torch.randn(2, 3, 8, 16, device="bp")
    attend = F.scaled_dot_product_attention
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        for kind in (DimDynamic.STATIC, DimDynamic.DYNAMIC):
            sizes = [DimDynamic.STATIC, DimDynamic.STATIC, kind, DimDynamic.STATIC]
            fake = mode.from_tensor(query, symbolic_context=StatelessSymbolicContext(sizes))
            assert attend(fake, fake, fake).shape == fake.shape
    for dynamic in (False, True):
        compiled = torch.compile(lambda x: attend(x, x, x), backend="aot_eager", dynamic=dynamic)
        given = query.clone().requires_grad_()
        result = compiled(given)
        torch.testing.assert_close(result, attend(query, query, query))
        assert torch.autograd.grad(result.sum(), given)[0].shape == query.shape
