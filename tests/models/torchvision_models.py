"""torchvision's models of images and videos, most of them with fewer and narrower layers than the published ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchvision import models
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.regnet import BlockParams
from torchvision.models.resnet import BasicBlock
from torchvision.models.segmentation.fcn import FCN, FCNHead
from torchvision.models.video import mvit
from torchvision.models.video import resnet as video

from models.model import Model, images

CLASSES = 10


def image_model(make: Callable[..., nn.Module], size: int = 64, **options: Any) -> Model:
    return Model(build=partial(make, num_classes=CLASSES, **options), inputs=images(size))


def segmentation() -> nn.Module:
    backbone = IntermediateLayerGetter(models.ResNet(BasicBlock, [1, 1, 1, 1]), {"layer4": "out"})
    return FCN(backbone, FCNHead(512, CLASSES))


def video_resnet() -> nn.Module:
    convolutions = [video.Conv3DSimple] * 4
    return video.VideoResNet(video.BasicBlock, convolutions, [1, 1, 1, 1], video.BasicStem, num_classes=CLASSES)


def video_transformer() -> nn.Module:
    layers = [
        mvit.MSBlockConfig(1, 16, 32, [], [3, 3, 3], [], [1, 4, 4]),
        mvit.MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
    ]
    return mvit.MViT(
        (32, 32), 4, layers, residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True,
        proj_after_attn=True, num_classes=CLASSES,
    )  # fmt: skip


def mobile_layer(*sizes: int, attends: bool, activation: str) -> InvertedResidualConfig:
    """A layer with the numbers of input channels, expanded channels and output channels."""
    inputs, expanded, outputs = sizes
    return InvertedResidualConfig(inputs, 3, expanded, outputs, attends, activation, 2, 1, 1.0)


MODELS = {
    "alexnet": image_model(models.alexnet),
    "convnext": image_model(models.ConvNeXt, block_setting=[CNBlockConfig(32, 64, 2), CNBlockConfig(64, None, 1)]),
    "densenet": image_model(models.DenseNet, growth_rate=8, block_config=(2, 2, 2), num_init_features=16),
    "efficientnet": image_model(
        models.EfficientNet, dropout=0.2,
        inverted_residual_setting=[
            MBConvConfig(1, 3, 1, 32, 16, 1), MBConvConfig(6, 3, 2, 16, 24, 2), MBConvConfig(6, 5, 2, 24, 40, 1),
        ],
    ),
    "fcn": Model(build=segmentation, inputs=images()),
    "maxvit": image_model(
        models.MaxVit, input_size=(64, 64), stem_channels=16, partition_size=4, block_channels=[16],
        block_layers=[1], head_dim=8, stochastic_depth_prob=0.0,
    ),
    "mobilenet_v2": image_model(
        models.MobileNetV2, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2]]
    ),
    "mobilenet_v3": image_model(
        models.MobileNetV3, last_channel=128,
        inverted_residual_setting=[
            mobile_layer(16, 16, 16, attends=True, activation="RE"),
            mobile_layer(16, 72, 24, attends=False, activation="RE"),
            mobile_layer(24, 96, 40, attends=True, activation="HS"),
        ],
    ),
    "mvit": Model(build=video_transformer, inputs=lambda length: {"x": torch.randn(2, 3, 4, 32, 32)}),
    "regnet": image_model(
        models.RegNet, norm_layer=nn.BatchNorm2d,
        block_params=BlockParams([1, 2], [16, 32], [8, 16], [1.0, 1.0], [2, 2], se_ratio=0.25),
    ),
    "resnet": image_model(models.ResNet, block=BasicBlock, layers=[1, 1, 1, 1]),
    "shufflenet_v2": image_model(
        models.ShuffleNetV2, stages_repeats=[2, 2, 1], stages_out_channels=[24, 32, 48, 64, 128]
    ),
    "squeezenet1_1": image_model(models.squeezenet1_1),
    "swin": image_model(
        models.SwinTransformer, patch_size=[4, 4], embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4]
    ),
    "video_resnet": Model(build=video_resnet, inputs=lambda length: {"x": torch.randn(2, 3, 4, 32, 32)}),
    "vision_transformer": image_model(
        models.VisionTransformer, image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64
    ),
}  # fmt: skip
