"""Models of transformers: text, images, speech and their combinations, with small configurations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers as t
from torch import nn

from models.model import Inputs, Model

t.logging.set_verbosity_error()
logging.getLogger("transformers").setLevel(logging.ERROR)

VOCABULARY = 96
LENGTHS = (16, 24, 37)
SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Names of the sizes in most configurations.
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length))


def language(length: int) -> Inputs:
    """Token numbers, which are the labels, too."""
    found = tokens(length)
    return {"input_ids": found, "labels": found}


def padded(length: int) -> Inputs:
    """Token numbers with labels, and a mask of which one row is shorter."""
    found = language(length)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, length - 5 :] = 0
    return {**found, "attention_mask": mask}


def translation(length: int) -> Inputs:
    return {"input_ids": tokens(length), "labels": tokens(length - 4)}


def causal(config: type, inputs: Callable[[int], Inputs] = language, **options: Any) -> Model:
    """A model that predicts the next token."""
    made = partial(config, **SPECIAL, **options)

    def build() -> nn.Module:
        model = t.AutoModelForCausalLM.from_config(made())
        model.loss_type = "ForCausalLM"  # else GPT-2 logs a warning in the forward pass, which breaks the graph
        return model

    return Model(build=build, inputs=inputs, lengths=LENGTHS)


def masked(config: type, **options: Any) -> Model:
    """A model that predicts masked tokens."""
    made = partial(config, **SPECIAL, **options)
    return Model(build=lambda: t.AutoModelForMaskedLM.from_config(made()), inputs=padded, lengths=LENGTHS)


def translator(config: type, **options: Any) -> Model:
    """A model that maps a sequence to another one."""
    made = partial(config, **SPECIAL, decoder_start_token_id=0, **options)
    return Model(build=lambda: t.AutoModelForSeq2SeqLM.from_config(made()), inputs=translation, lengths=LENGTHS)


def image_model(config: Callable[[], Any], size: int = 64) -> Model:
    def inputs(length: int) -> Inputs:
        return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([1, 0])}

    return Model(build=lambda: t.AutoModelForImageClassification.from_config(config()), inputs=inputs)


def speech_to_text() -> nn.Module:
    config = t.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=40, max_target_positions=64,
        suppress_tokens=[], begin_suppress_tokens=[], decoder_start_token_id=1, **SPECIAL,
    )  # fmt: skip
    return t.WhisperForConditionalGeneration(config)


def speech_classifier() -> nn.Module:
    config = t.Wav2Vec2Config(
        **SIZES, **SPECIAL, conv_dim=(16, 16, 16), conv_kernel=(10, 3, 2), conv_stride=(5, 2, 2),
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, apply_spec_augment=False, classifier_proj_size=16,
    )  # fmt: skip
    return t.Wav2Vec2ForSequenceClassification(config)


def text_and_image() -> nn.Module:
    text = t.CLIPTextConfig(**SIZES, **SPECIAL, projection_dim=16)
    image = t.CLIPVisionConfig(**SIZES, image_size=32, patch_size=8, projection_dim=16)
    config = t.CLIPConfig(text_config=text.to_dict(), vision_config=image.to_dict(), projection_dim=16)
    return t.CLIPModel(config)


def detector() -> nn.Module:
    backbone = t.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = t.DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, d_model=32,
        encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_queries=8, num_labels=4,
    )  # fmt: skip
    return t.DetrForObjectDetection(config)


MODELS = {
    "albert": masked(t.AlbertConfig, **SIZES, embedding_size=16),
    "bart": translator(
        t.BartConfig, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
    ),
    "bert": masked(t.BertConfig, **SIZES),
    "bloom": causal(t.BloomConfig, hidden_size=32, n_layer=2, n_head=4),
    "clip": Model(
        build=text_and_image,
        inputs=lambda length: {
            "input_ids": tokens(12), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True,
        },
    ),
    "convnext": image_model(partial(t.ConvNextConfig, hidden_sizes=[16, 32], depths=[1, 2], num_stages=2)),
    "deberta_v2": masked(
        t.DebertaV2Config, **SIZES, relative_attention=True, position_buckets=16, pos_att_type=["p2c", "c2p"]
    ),
    "detr": Model(build=detector, inputs=lambda length: {"pixel_values": torch.randn(2, 3, 64, 64)}),
    "distilbert": masked(
        t.DistilBertConfig, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=64
    ),
    "electra": masked(t.ElectraConfig, **SIZES, embedding_size=16),
    "falcon": causal(t.FalconConfig, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "gemma2": causal(t.Gemma2Config, **SIZES, num_key_value_heads=2, head_dim=8, sliding_window=16),
    "gpt2": causal(t.GPT2Config, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt_neox": causal(t.GPTNeoXConfig, **SIZES),
    "llama": causal(t.LlamaConfig, padded, **SIZES, num_key_value_heads=2),
    # A loop over the sequence in Python, so each length has its own graph.
    "mamba": replace(causal(t.MambaConfig, hidden_size=32, num_hidden_layers=1, state_size=8), lengths=(6, 8, 9)),
    "mistral": causal(t.MistralConfig, **SIZES, num_key_value_heads=2, sliding_window=8),
    "mixtral": causal(t.MixtralConfig, **SIZES, num_key_value_heads=2, num_local_experts=4),
    "mpt": causal(t.MptConfig, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    "opt": causal(
        t.OPTConfig, padded, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32,
    ),
    "phi": causal(t.PhiConfig, **SIZES),
    "qwen2": causal(t.Qwen2Config, **SIZES, num_key_value_heads=2),
    "roberta": masked(t.RobertaConfig, **SIZES),
    "segformer": image_model(
        partial(
            t.SegformerConfig, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[4, 2], hidden_sizes=[16, 32],
            patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
        )
    ),
    "t5": translator(t.T5Config, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
    "vit": image_model(partial(t.ViTConfig, **SIZES, image_size=64, patch_size=16)),
    "wav2vec2": Model(
        build=speech_classifier,
        inputs=lambda length: {"input_values": torch.randn(2, 1000), "labels": torch.tensor([0, 1])},
    ),
    "whisper": Model(
        build=speech_to_text,
        inputs=lambda length: {"input_features": torch.randn(2, 16, 80), "labels": tokens(length)},
        lengths=LENGTHS,
    ),
}  # fmt: skip
