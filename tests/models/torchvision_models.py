"""torchvision's models of images and videos. The larger architectures have fewer layers than the published ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig

from models.model import Model, images

CLASSES = 10


def image_model(make: Callable[..., nn.Module], size: int = 64, tolerance: float = 1e-3, **options: Any) -> Model:
    return Model(build=partial(make, num_classes=CLASSES, **options), inputs=images(size), tolerance=tolerance)


MODELS = {
    "alexnet": image_model(models.alexnet),
    "convnext": image_model(models.ConvNeXt, block_setting=[CNBlockConfig(32, 64, 2), CNBlockConfig(64, None, 1)]),
    "densenet": image_model(models.DenseNet, growth_rate=8, block_config=(2, 2, 2), num_init_features=16),
    "efficientnet_b0": image_model(models.efficientnet_b0),
    "googlenet": image_model(models.googlenet, aux_logits=False, init_weights=False),
    "lraspp_mobilenet_v3_large": image_model(models.segmentation.lraspp_mobilenet_v3_large, weights_backbone=None),
    "maxvit": image_model(
        models.MaxVit, input_size=(64, 64), stem_channels=16, partition_size=4, block_channels=[16, 32],
        block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.0,
    ),
    "mnasnet0_5": image_model(models.mnasnet0_5),
    "mobilenet_v3_small": image_model(models.mobilenet_v3_small),
    "r3d_18": Model(
        build=partial(models.video.r3d_18, num_classes=CLASSES),
        inputs=lambda length: {"x": torch.randn(2, 3, 4, 32, 32)},
    ),
    "regnet_y_400mf": image_model(models.regnet_y_400mf),
    "resnet18": image_model(models.resnet18),
    "shufflenet_v2_x0_5": image_model(models.shufflenet_v2_x0_5),
    "squeezenet1_1": image_model(models.squeezenet1_1),
    "swin": image_model(
        models.SwinTransformer, patch_size=[4, 4], embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4]
    ),
    "vision_transformer": image_model(
        models.VisionTransformer, image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64
    ),
}  # fmt: skip
