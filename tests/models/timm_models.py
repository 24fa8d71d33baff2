"""timm's models: architectures that torchvision does not have. Models named test_… are timm's own small ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
from timm.models.mlp_mixer import MlpMixer

from models.model import Model, images

CLASSES = 10


def image_model(name: str, size: int = 64, **options: Any) -> Model:
    return Model(build=partial(timm.create_model, name, num_classes=CLASSES, **options), inputs=images(size))


MODELS = {
    "beit": image_model(
        "beit_base_patch16_224", img_size=64, embed_dim=48, depth=2, num_heads=4, use_abs_pos_emb=False
    ),
    "byobnet": image_model("test_byobnet"),
    "edgenext": image_model(
        "edgenext_xx_small", depths=(1, 1, 1, 1), dims=(16, 24, 32, 48), global_block_counts=(0, 0, 0, 1)
    ),
    "efficientnet": image_model("test_efficientnet"),
    "mambaout": image_model("test_mambaout"),
    "mixer": Model(
        build=partial(MlpMixer, num_classes=CLASSES, img_size=64, embed_dim=48, num_blocks=2), inputs=images()
    ),
    "nfnet": image_model("test_nfnet"),
    "xcit": image_model("xcit_nano_12_p16_224", img_size=64, embed_dim=48, depth=2, num_heads=4),
}
