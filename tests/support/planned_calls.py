"""For each planned operator with number arguments: a call, and the same call with other numbers.

Sizes are chosen so that another number changes no layout: contiguous tensors stay contiguous, and the alignment of
rows does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DEVICES = ("bp:0", "bp:1")

# Numbers that select dimensions or a variant of the operator. No formula computes with them.
CHOICES = ("dim", "dims", "axis", "reduction", "mask_type", "compute_mode", "input_dtype", "dtype", "layout")

Arguments = tuple[Any, ...]
Make = Callable[[str], Arguments]


@dataclass(frozen=True)
class Calls:
    """The calls of one operator.

    Args:
        make: returns the positional arguments for a device, in schema order; the rest have their defaults.
        others: other values of single numbers, by name, where most values are invalid. None: the number has no other
            value, because other arguments determine it.
        also: further calls for numbers that must change together.
        together: the names of those numbers.
        launches_nothing: the operator launches no kernel itself: it calls other operators, or none.
    """

    make: Make
    others: dict[str, Any]
    also: tuple[Make, ...] = ()
    together: tuple[str, ...] = ()
    launches_nothing: bool = False


def tensor(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def index(device: str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=device)


F = tensor
CALLS: dict[str, Calls] = {}


def call(names: str, make: Make, *also: Make, together: str = "", **others: Any) -> None:
    for name in names.split():
        assert name not in CALLS, name
        CALLS[name] = Calls(make, others, also, tuple(together.split()))


# --- elementwise operators

call("add.Tensor sub.Tensor rsub.Tensor _add_relu.Tensor", lambda d: (F(d, 8, 12), F(d, 8, 12), 2.5))
call("_add_relu.Scalar", lambda d: (F(d, 8, 12), 1.5, 2.5))
call("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", lambda d: (F(d, 8, 12), 1.5))
call("masked_fill.Scalar", lambda d: (F(d, 8, 12), F(d, 8, 12, dtype=torch.bool), 1.5))
call("__lshift__.Scalar __rshift__.Scalar", lambda d: (F(d, 8, 12, dtype=torch.int32), 2))
call("__ilshift__.Scalar __irshift__.Scalar", lambda d: (F(d, 8, 12, dtype=torch.int32), 2))
call("addcmul addcdiv", lambda d: (F(d, 8, 12), F(d, 8, 12), F(d, 8, 12), 2.5))
call("clamp", lambda d: (F(d, 8, 12), 0.5, 1.5))
call("clamp_max clamp_min leaky_relu hardshrink softshrink fill.Scalar", lambda d: (F(d, 8, 12), 0.5))
call("hardshrink_backward softshrink_backward threshold_backward", lambda d: (F(d, 8, 12), F(d, 8, 12), 0.5))
call("leaky_relu_backward", lambda d: (F(d, 8, 12), F(d, 8, 12), 0.5, False))
call("elu", lambda d: (F(d, 8, 12), 1.5, 2.5, 0.5))
call("elu_backward", lambda d: (F(d, 8, 12), 1.5, 2.5, 0.5, False, F(d, 8, 12)))
call("hardtanh threshold", lambda d: (F(d, 8, 12), 0.5, 1.5))
call("softplus", lambda d: (F(d, 8, 12), 1.5, 20.0))
call("softplus_backward hardtanh_backward", lambda d: (F(d, 8, 12), F(d, 8, 12), 1.5, 20.0))
call("lerp.Scalar", lambda d: (F(d, 8, 12), F(d, 8, 12), 0.25))
call("logit", lambda d: (F(d, 8, 12), 0.01), eps=0.02)
call("logit_backward", lambda d: (F(d, 8, 12), F(d, 8, 12), 0.01), eps=0.02)
call("mvlgamma", lambda d: (F(d, 8, 12), 3))
call("polygamma", lambda d: (7, F(d, 8, 12)))
call("nan_to_num", lambda d: (F(d, 8, 12), 0.5, 1.5, 2.5))
call("native_dropout_backward", lambda d: (F(d, 8, 12), F(d, 8, 12, dtype=torch.bool), 2.5))
call("pow.Scalar remainder.Scalar_Tensor", lambda d: (2.5, F(d, 8, 12)))
call("pow.Tensor_Scalar", lambda d: (F(d, 8, 12), 2.7), exponent=3.1)
call("round.decimals", lambda d: (F(d, 8, 12), 2))
call("fake_quantize_per_tensor_affine_cachemask", lambda d: (F(d, 8, 12), 0.5, 3, 0, 255))
call(
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    lambda d: (F(d, 8, 12), F(d, 1), F(d, 1, dtype=torch.int32), F(d, 1, dtype=torch.int64), 0, 255),
)
call(
    "fake_quantize_per_channel_affine_cachemask",
    lambda d: (F(d, 8, 12), F(d, 8), torch.zeros(8, dtype=torch.int32, device=d), 0, 0, 255),
)
call(
    "_amp_update_scale_",
    lambda d: (F(d), torch.zeros((), dtype=torch.int32, device=d), F(d), 2.0, 0.5, 100),
)

# --- lists


def lists(device: str, count: int) -> Arguments:
    return tuple([F(device, 8, 12), F(device, 5)] for _ in range(count))


_TWO = [1.5, 2.5]
for _name in ("add", "sub", "mul", "div", "maximum", "minimum"):
    call(f"_foreach_{_name}.Scalar", lambda d: (*lists(d, 1), 1.5))
    call(f"_foreach_{_name}.ScalarList", lambda d: (*lists(d, 1), _TWO))
call("_foreach_add.List _foreach_sub.List", lambda d: (*lists(d, 2), 1.5))
call("_foreach_add.Tensor", lambda d: (*lists(d, 1), F(d), 1.5))
call("_foreach_addcmul.Scalar _foreach_addcdiv.Scalar", lambda d: (*lists(d, 3), 1.5))
call("_foreach_addcmul.ScalarList _foreach_addcdiv.ScalarList", lambda d: (*lists(d, 3), _TWO))
call("_foreach_lerp.Scalar", lambda d: (*lists(d, 2), 0.25))
call("_foreach_lerp.ScalarList", lambda d: (*lists(d, 2), [0.25, 0.75]))
call("_foreach_norm.Scalar", lambda d: (*lists(d, 1), 2.7), ord=3.1)


def _steps(device: str) -> list[torch.Tensor]:
    return [F(device), F(device)]


call(
    "_fused_adam_ _fused_adamw_",
    lambda d: (*lists(d, 4), [], _steps(d), 0.1, 0.9, 0.99, 0.01, 1e-8, False, False),
    beta1=0.8, beta2=0.98,
)  # fmt: skip
call(
    "_fused_adam_.tensor_lr _fused_adamw_.tensor_lr",
    lambda d: (*lists(d, 4), [], _steps(d), F(d), 0.9, 0.99, 0.01, 1e-8, False, False),
    beta1=0.8, beta2=0.98,
)  # fmt: skip
call("_fused_adagrad_", lambda d: (*lists(d, 3), _steps(d), 0.1, 0.2, 0.01, 1e-8, False))
call("_fused_adagrad_.tensor_lr", lambda d: (*lists(d, 3), _steps(d), F(d), 0.2, 0.01, 1e-8, False))
call("_fused_sgd_.tensor_lr", lambda d: (*lists(d, 3), 0.01, 0.9, F(d), 0.2, False, False, False))
call("_fused_sgd_", lambda d: (*lists(d, 3), 0.01, 0.9, 0.1, 0.2, False, False, False))

# --- reductions, norms

_SPREADS = "var.correction std.correction var_mean.correction std_mean.correction"
call(_SPREADS, lambda d: (F(d, 8, 12), [1], 1.0))
call("linalg_vector_norm norm.ScalarOpt_dim", lambda d: (F(d, 8, 12), 2.7, [1]), ord=3.1, p=3.1)
call("norm.ScalarOpt_dim_dtype", lambda d: (F(d, 8, 12), 2.7, [1], False, torch.float32), p=3.1)
call("renorm", lambda d: (F(d, 8, 12), 2.7, 0, 1.5), p=3.1)
call("hash_tensor", lambda d: (F(d, 8, 12), [1]), mode=None)
call("histc", lambda d: (F(d, 96), 10, 0.5, 1.5))
call("bincount", lambda d: (index(d, 96), None, 10))
call("kthvalue topk", lambda d: (F(d, 8, 12), 3))
call("multinomial", lambda d: (F(d, 8, 12), 3))
call("native_layer_norm", lambda d: (F(d, 8, 12), [12], F(d, 12), F(d, 12), 1e-5), normalized_shape=None)
call(
    "native_layer_norm_backward",
    lambda d: (F(d, 8, 12), F(d, 8, 12), [12], F(d, 8, 1), F(d, 8, 1), F(d, 12), F(d, 12), [True] * 3),
    normalized_shape=None,
)


def _images(device: str, *shape: int) -> torch.Tensor:
    return F(device, *(shape or (2, 4, 8, 8)))


call(
    "native_group_norm",
    lambda d: (_images(d), F(d, 4), F(d, 4), 2, 4, 64, 2, 1e-5),
    lambda d: (_images(d, 3, 8, 12, 4), F(d, 8), F(d, 8), 3, 8, 48, 4, 1e-4),
    together="N C HxW group",
)
call(
    "native_group_norm_backward",
    lambda d: (_images(d), _images(d), F(d, 2, 2), F(d, 2, 2), F(d, 4), 2, 4, 64, 2, [True] * 3),
    lambda d: (
        *(_images(d, 3, 8, 12, 4), _images(d, 3, 8, 12, 4), F(d, 3, 4), F(d, 3, 4), F(d, 8)),
        *(3, 8, 48, 4, [True] * 3),
    ),
    together="N C HxW group",
)
_channels = lambda d: [F(d, 4) for _ in range(4)]  # noqa: E731
call("native_batch_norm _native_batch_norm_legit", lambda d: (_images(d), *_channels(d), True, 0.1, 1e-5))
call("_native_batch_norm_legit.no_stats", lambda d: (_images(d), F(d, 4), F(d, 4), True, 0.1, 1e-5))
call("_batch_norm_with_update _batch_norm_no_update", lambda d: (_images(d), *_channels(d), 0.1, 1e-5))
call("batch_norm_update_stats", lambda d: (_images(d), F(d, 4), F(d, 4), 0.1))
call(
    "native_batch_norm_backward",
    lambda d: (_images(d), _images(d), *(F(d, 4) for _ in range(5)), True, 1e-5, [True] * 3),
)
call(
    "batch_norm_backward",
    lambda d: (_images(d), _images(d), *(F(d, 4) for _ in range(5)), True, 1e-5, [True] * 3, F(d, 0)),
)
call("_fused_rms_norm", lambda d: (F(d, 8, 12), [12], F(d, 12), 1e-5), normalized_shape=None)
call(
    "_fused_rms_norm_backward",
    lambda d: (F(d, 8, 12), F(d, 8, 12), [12], F(d, 8, 1), F(d, 12), [True, True]),
    normalized_shape=None,
)

# --- attention


def _attended(device: str) -> Arguments:
    """query, key, value and a mask."""
    return F(device, 2, 4, 8, 12), F(device, 2, 2, 16, 12), F(device, 2, 2, 16, 12), F(device, 8, 16)


call("backplane::attention", lambda d: (*_attended(d), False, 0.25, 0.5))
call(
    "backplane::attention_backward",
    lambda d: (
        *(F(d, 2, 4, 8, 12), *_attended(d), F(d, 2, 4, 8, 12), F(d, 2, 4, 8)),
        *(False, 0.25, 0.5, index(d, 2), [True] * 4),
    ),
)

# --- recurrent layers


def _lstm(device: str) -> Arguments:
    """input, hx, cx, and of both directions both weights and both biases."""
    weights = (F(device, 64, 12), F(device, 64, 16), F(device, 64), F(device, 64))
    return F(device, 4, 8, 12), F(device, 2, 8, 16), F(device, 2, 8, 16), [*weights, *weights]


call("backplane::rnn_layer", lambda d: (*_lstm(d), 2, True), mode=None)
call(
    "backplane::rnn_layer_backward",
    lambda d: (
        *(F(d, 4, 8, 32), F(d, 2, 8, 16), F(d, 2, 8, 16), *_lstm(d)),
        *(2, F(d, 4, 8, 32), F(d, 2, 8, 16), F(d, 2, 8, 16), F(d, 2, 4, 8, 80)),
    ),
    mode=None,
)

# --- products, distances

call("addmm", lambda d: (F(d, 8, 12), F(d, 8, 16), F(d, 16, 12), 0.5, 1.5))
call("_addmm_activation", lambda d: (F(d, 8, 12), F(d, 8, 16), F(d, 16, 12), 0.5, 1.5))
call("addmv", lambda d: (F(d, 8), F(d, 8, 16), F(d, 16), 0.5, 1.5))
call("addr", lambda d: (F(d, 8, 12), F(d, 8), F(d, 12), 0.5, 1.5))
call("baddbmm", lambda d: (F(d, 2, 8, 12), F(d, 2, 8, 16), F(d, 2, 16, 12), 0.5, 1.5))
call("addbmm", lambda d: (F(d, 8, 12), F(d, 2, 8, 16), F(d, 2, 16, 12), 0.5, 1.5))
call("_cdist_forward", lambda d: (F(d, 8, 4), F(d, 6, 4), 2.7, None))
call("_cdist_backward", lambda d: (F(d, 8, 6), F(d, 8, 4), F(d, 6, 4), 2.7, F(d, 8, 6)))
call("_pdist_forward", lambda d: (F(d, 8, 4), 2.7))
call("_pdist_backward", lambda d: (F(d, 28), F(d, 8, 4), 2.7, F(d, 28)))

# --- losses

_pair = lambda d: (F(d, 8, 12), F(d, 8, 12))  # noqa: E731
call("huber_loss smooth_l1_loss", lambda d: (*_pair(d), 1, 1.5))
call("huber_loss_backward smooth_l1_loss_backward", lambda d: (F(d, 8, 12), *_pair(d), 1, 1.5))
call("multi_margin_loss", lambda d: (F(d, 8, 12), index(d, 8), 1, 1.5), p=None)
call("multi_margin_loss_backward", lambda d: (F(d), F(d, 8, 12), index(d, 8), 1, 1.5), p=None)
call("nll_loss_forward", lambda d: (F(d, 8, 12), index(d, 8), None, 1, 3))
call("nll_loss_backward", lambda d: (F(d), F(d, 8, 12), index(d, 8), None, 1, 3, F(d)))
call("nll_loss2d_forward", lambda d: (_images(d), index(d, 2, 8, 8), None, 1, 3))
call("nll_loss2d_backward", lambda d: (F(d), _images(d), index(d, 2, 8, 8), None, 1, 3, F(d)))

# --- places, rows, triangles

call("arange", lambda d: (10, torch.float32, None, torch.device(d)))
call("arange.start", lambda d: (1, 10, torch.float32, None, torch.device(d)))
call("arange.start_step", lambda d: (1, 20, 2, torch.float32, None, torch.device(d)), end=30)
call("linspace", lambda d: (1.5, 2.5, 12, torch.float32, None, torch.device(d)))
call("range.out", lambda d: (1, 20, 2, F(d, 10)), end=None, start=2)
call("logspace.out", lambda d: (1.5, 2.5, 12, 10.0, F(d, 12)), steps=None)
call(
    "randperm.generator_out",
    lambda d: (12, None, index(d, 12)),
    lambda d: (14, None, index(d, 14)),
    together="n",
)
call("eye", lambda d: (12, torch.float32, None, torch.device(d)))
call("eye.m", lambda d: (12, 8, torch.float32, None, torch.device(d)))
call("tril triu", lambda d: (F(d, 8, 12), 1))
call("tril_indices triu_indices", lambda d: (8, 12, 1, torch.int64, None, torch.device(d)))
call("roll", lambda d: (F(d, 8, 12), [3], [1]))
call("channel_shuffle", lambda d: (_images(d, 2, 12, 4, 4), 2))
call("pixel_shuffle", lambda d: (_images(d, 2, 36, 6, 6), 2))
call("pixel_unshuffle", lambda d: (_images(d, 2, 36, 6, 6), 2))
call("narrow_copy", lambda d: (F(d, 8, 12), 1, 1, 4))
call("repeat_interleave.Tensor", lambda d: (index(d, 8), None), output_size=None)
call("bucketize.Scalar", lambda d: (1.5, F(d, 12)))
call("searchsorted.Scalar", lambda d: (F(d, 12), 1.5))
call("isin.Scalar_Tensor", lambda d: (1.5, F(d, 12)))
call("isin.Tensor_Scalar", lambda d: (F(d, 12), 1.5))
call("embedding", lambda d: (F(d, 8, 12), index(d, 5), 2))
call("embedding_renorm_", lambda d: (F(d, 8, 12), index(d, 5), 1.5, 2.5), norm_type=3.1)
call("embedding_dense_backward", lambda d: (F(d, 5, 12), index(d, 5), 8, 2, False))
call(
    "_embedding_bag _embedding_bag_forward_only",
    lambda d: (F(d, 8, 12), index(d, 5), index(d, 2), False, 0, False, None, False, 2),
    mode=None,
)
call(
    "_embedding_bag_backward",
    lambda d: (
        F(d, 2, 12), index(d, 5), index(d, 2), index(d, 5), index(d, 2), index(d, 2, 12), 8, False, 0, False, None, 2
    ),
    mode=None,
)  # fmt: skip
call(
    "_embedding_bag_dense_backward",
    lambda d: (F(d, 2, 12), index(d, 5), index(d, 5), index(d, 2), index(d, 2, 12), 8, False, 0, None, 2),
    mode=None,
)
call(
    "_embedding_bag_per_sample_weights_backward",
    lambda d: (F(d, 2, 12), F(d, 8, 12), index(d, 5), index(d, 2), index(d, 5), 0, 2),
    mode=None,
)
call("index_add", lambda d: (F(d, 8, 12), 0, index(d, 5), F(d, 5, 12), 1.5))
call("index_fill.int_Scalar", lambda d: (F(d, 8, 12), 0, index(d, 5), 1.5))
call("scatter.value", lambda d: (F(d, 8, 12), 0, index(d, 8, 12), 1.5))
call("scatter.value_reduce", lambda d: (F(d, 8, 12), 0, index(d, 8, 12), 1.5, "add"))
call("nonzero_static", lambda d: (F(d, 8, 12), 10, 3))
call("backplane::write_coordinates", lambda d: (index(d, 10, 2), F(d, 8, 12), index(d, 2), 3))
call("unfold_backward", lambda d: (F(d, 8, 5, 4), [8, 12], 1, 4, 2), lambda d: (F(d, 6, 7, 3), [6, 9], 1, 3, 1),
     together="input_sizes size step")  # fmt: skip

# --- random numbers

call("bernoulli_.float", lambda d: (F(d, 8, 12), 0.25))
call("cauchy_ normal_ log_normal_", lambda d: (F(d, 8, 12), 0.25, 0.5))
call("uniform_", lambda d: (F(d, 8, 12), 0.25, 2.5))
call("exponential_", lambda d: (F(d, 8, 12), 0.25))
call("geometric_", lambda d: (F(d, 8, 12), 0.25))
call("normal.Tensor_float", lambda d: (F(d, 8, 12), 0.25))
call("normal.float_Tensor", lambda d: (0.25, F(d, 8, 12)))
call("random_.from", lambda d: (F(d, 8, 12), 2, 10))
call("random_.to", lambda d: (F(d, 8, 12), 10))
call("native_dropout", lambda d: (F(d, 8, 12), 0.25, True))
call("rrelu_with_noise", lambda d: (F(d, 8, 12), F(d, 8, 12), 0.125, 0.25, True), lower=0.0625)

# --- images


def _sizes(rank: int, size: int) -> list[int]:
    return [size + place for place in range(rank)]


def _image(device: str, rank: int, size: int) -> torch.Tensor:
    return F(device, 2, 3, *_sizes(rank, size))


for _rank in (1, 2, 3):
    for _kind in ("reflection", "replication"):
        call(
            f"{_kind}_pad{_rank}d",
            lambda d, r=_rank: (_image(d, r, 6), [2, 1] * r),
        )
        call(
            f"{_kind}_pad{_rank}d_backward",
            lambda d, r=_rank: (F(d, 2, 3, *(s + 3 for s in _sizes(r, 6))), _image(d, r, 6), [2, 1] * r),
            lambda d, r=_rank: (F(d, 2, 3, *(s + 5 for s in _sizes(r, 6))), _image(d, r, 6), [2, 3] * r),
            together="padding",
        )
    for _kind in ("upsample_nearest", "_upsample_nearest_exact"):
        call(
            f"{_kind}{_rank}d",
            lambda d, r=_rank: (_image(d, r, 6), _sizes(r, 9), *[1.4] * r),
        )
        call(
            f"{_kind}{_rank}d_backward",
            lambda d, r=_rank: (_image(d, r, 9), _sizes(r, 9), [2, 3, *_sizes(r, 6)], *[1.4] * r),
            lambda d, r=_rank: (_image(d, r, 11), _sizes(r, 11), [2, 3, *_sizes(r, 7)], *[1.4] * r),
            together="output_size input_size",
        )
for _name, _rank in (("linear1d", 1), ("bilinear2d", 2), ("trilinear3d", 3), ("bicubic2d", 2)):
    call(
        f"upsample_{_name}",
        lambda d, r=_rank: (_image(d, r, 6), _sizes(r, 9), False, *[1.4] * r),
    )
    call(
        f"upsample_{_name}_backward",
        lambda d, r=_rank: (_image(d, r, 9), _sizes(r, 9), [2, 3, *_sizes(r, 6)], False, *[1.4] * r),
        lambda d, r=_rank: (_image(d, r, 11), _sizes(r, 11), [2, 3, *_sizes(r, 7)], False, *[1.4] * r),
        together="output_size input_size",
    )
for _rank in (2, 3):
    call(
        f"adaptive_avg_pool{_rank}d.out",
        lambda d, r=_rank: (_image(d, r, 8), _sizes(r, 3), _image(d, r, 3)),
        lambda d, r=_rank: (_image(d, r, 8), _sizes(r, 4), _image(d, r, 4)),
        together="output_size",
    )
    call(f"_adaptive_avg_pool{_rank}d adaptive_max_pool{_rank}d", lambda d, r=_rank: (_image(d, r, 8), _sizes(r, 3)))
    call(
        f"avg_pool{_rank}d",
        lambda d, r=_rank: (_image(d, r, 12), [4] * r, [3] * r, [1] * r, False, True, 7),
    )
    call(
        f"avg_pool{_rank}d_backward",
        lambda d, r=_rank: (_image(d, r, 5), _image(d, r, 5), [3] * r, [1] * r, [1] * r, False, True, 7),
        lambda d, r=_rank: (_image(d, r, 4), _image(d, r, 6), [3] * r, [1] * r, [0] * r, False, True, 7),
        together="kernel_size stride padding",
    )
    call(
        f"max_pool{_rank}d_with_indices",
        lambda d, r=_rank: (_image(d, r, 12), [4] * r, [3] * r, [1] * r, [1] * r),
    )
    call(
        f"max_pool{_rank}d_with_indices_backward",
        lambda d, r=_rank: (
            *(_image(d, r, 5), _image(d, r, 5), [3] * r, [1] * r, [1] * r, [1] * r, False),
            index(d, 2, 3, *_sizes(r, 5)),
        ),
        lambda d, r=_rank: (
            *(_image(d, r, 4), _image(d, r, 8), [3] * r, [1] * r, [0] * r, [2] * r, False),
            index(d, 2, 3, *_sizes(r, 4)),
        ),
        together="kernel_size stride padding dilation",
    )
    call(
        f"fractional_max_pool{_rank}d",
        lambda d, r=_rank: (_image(d, r, 12), [3] * r, [4] * r, F(d, 2, 3, r)),
    )
    call(
        f"fractional_max_pool{_rank}d_backward",
        lambda d, r=_rank: (
            *(_image(d, r, 4), _image(d, r, 12), [3] * r, _sizes(r, 4)),
            index(d, 2, 3, *_sizes(r, 4)),
        ),
        lambda d, r=_rank: (
            *(_image(d, r, 5), _image(d, r, 12), [2] * r, _sizes(r, 5)),
            index(d, 2, 3, *_sizes(r, 5)),
        ),
        together="kernel_size output_size",
    )
call("grid_sampler_2d", lambda d: (_image(d, 2, 6), F(d, 2, 4, 5, 2), 0, 0, False))
call(
    "grid_sampler_2d_backward",
    lambda d: (F(d, 2, 3, 4, 5), _image(d, 2, 6), F(d, 2, 4, 5, 2), 0, 0, False, [True] * 2),
)
call("max_unpool2d", lambda d: (_image(d, 2, 4), index(d, 2, 3, 4, 5), [8, 9]))
call(
    "max_unpool3d",
    lambda d: (_image(d, 3, 4), index(d, 2, 3, 4, 5, 6), [8, 9, 10], [2, 2, 2], [0, 0, 0]),
)
call("im2col", lambda d: (_image(d, 2, 12), [3, 4], [1, 1], [1, 1], [2, 2]))
call(
    "col2im",
    lambda d: (F(d, 2, 27, 36), [6, 6], [3, 3], [1, 1], [1, 1], [1, 1]),
    lambda d: (F(d, 2, 12, 30), [7, 8], [2, 2], [2, 2], [0, 0], [1, 1]),
    together="output_size kernel_size dilation padding stride",
)
# Six channels per group: convolutions with fewer channels have a separate kernel on devices with lockstep work items.
call(
    "convolution_overrideable",
    lambda d: (_image(d, 2, 12), F(d, 6, 3, 3, 3), F(d, 6), [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
    lambda d: (F(d, 2, 6, 12, 13), F(d, 12, 3, 4, 2), F(d, 12), [1, 2], [0, 1], [2, 1], False, [0, 0], 2),
    together="groups output_padding",
)
# Both calls have gradients of the same height and width, because the bias gradient has different kernels for few and
# for many elements. Both have a stride above 1, because the gradient of the image has a separate kernel for stride 1 on
# devices with lockstep work items.
call(
    "convolution_backward_overrideable",
    lambda d: (
        *(F(d, 2, 6, 12, 13), _image(d, 2, 24), F(d, 6, 3, 3, 3)),
        *([2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3),
    ),
    lambda d: (
        *(F(d, 2, 12, 12, 13), F(d, 2, 6, 12, 25), F(d, 12, 3, 3, 3)),
        *([1, 2], [2, 2], [2, 2], False, [0, 0], 2, [True] * 3),
    ),
    together="stride padding dilation output_padding groups",
)


# --- Fourier transforms: their kernel text depends on the length

call("_fft_c2c", lambda d: (F(d, 8, 12, dtype=torch.complex64), [1], 0, True), normalization=1)
call("_fft_r2c", lambda d: (F(d, 8, 12), [1], 0, True), normalization=1)
call("_fft_c2r", lambda d: (F(d, 8, 7, dtype=torch.complex64), [1], 0, 12), normalization=1, last_dim_size=None)


def _projections(device: str) -> Arguments:
    return F(device, 24, 8), F(device, 24), F(device, 8, 8), F(device, 8)


def _multi_head(device: str) -> Arguments:
    x = F(device, 2, 3, 8)
    return (x, x, x, 8, 2, *_projections(device))


def _encoder_layer(device: str) -> Arguments:
    norms = [F(device, 8) for _ in range(4)]
    feed_forward = F(device, 16, 8), F(device, 16), F(device, 8, 16), F(device, 8)
    return (F(device, 2, 3, 8), 8, 2, *_projections(device), False, False, 1e-5, *norms, *feed_forward)


call("_native_multi_head_attention", _multi_head, embed_dim=None, num_head=4)
call("_transformer_encoder_layer_fwd", _encoder_layer, embed_dim=None, num_heads=4)
