"""diffusers: Stable Diffusion's pipeline with tiny random weights, whole, offloaded by model and by layer; training."""

import torch
import transformers
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusers.utils import logging
from transformers import CLIPTextConfig, CLIPTextModel
from trial import Program, Results, falls, main, on

import torch_backplane.integrations.accelerate  # noqa: F401

logging.set_verbosity_error()
transformers.logging.set_verbosity_error()
STEPS = 3


def pipeline() -> StableDiffusionPipeline:
    torch.manual_seed(1)
    blocks = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "layers_per_block": 1}
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(16, 32), norm_num_groups=4, cross_attention_dim=32, attention_head_dim=4,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **blocks,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(16, 32), latent_channels=4, norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    text = {"hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4, "num_hidden_layers": 2}
    found = StableDiffusionPipeline(
        vae=vae, unet=unet, text_encoder=CLIPTextModel(CLIPTextConfig(vocab_size=100, **text)).eval(), tokenizer=None,
        scheduler=DDIMScheduler(clip_sample=False), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    found.set_progress_bar_config(disable=True)
    return found


def generate(pipe: StableDiffusionPipeline, device: torch.device) -> Results:
    """Generates an image from given text embeddings, because the pipeline has no tokenizer."""
    torch.manual_seed(2)
    embeddings = {"prompt_embeds": torch.randn(1, 7, 32), "negative_prompt_embeds": torch.randn(1, 7, 32)}
    images = pipe(
        **embeddings, num_inference_steps=STEPS, generator=torch.Generator().manual_seed(0), output_type="pt",
        height=32, width=32,
    ).images  # fmt: skip
    return {"image": on(images, device)}


def whole(device: torch.device) -> Results:
    return generate(pipeline().to(device), device)


def offloaded_models(device: torch.device) -> Results:
    pipe = pipeline()
    if device.type != "cpu":
        pipe.enable_model_cpu_offload()
        assert pipe._offload_device.type == device.type
    results = generate(pipe, device)
    assert next(pipe.unet.parameters()).device.type == "cpu"  # afterwards, all weights are on the CPU again
    return results


def offloaded_layers(device: torch.device) -> Results:
    pipe = pipeline()
    if device.type != "cpu":
        pipe.enable_sequential_cpu_offload()
        assert next(pipe.unet.parameters()).device.type == "meta"
    return generate(pipe, device)


def train(device: torch.device) -> Results:
    torch.manual_seed(3)
    model = UNet2DModel(
        sample_size=16, in_channels=1, out_channels=1, block_out_channels=(8, 16), norm_num_groups=4,
        layers_per_block=1, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device)  # fmt: skip
    scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images = torch.ones(8, 1, 16, 16).triu().to(device)
    losses = []
    for _ in range(12):
        noise = torch.randn(8, 1, 16, 16).to(device)
        times = torch.randint(0, 100, (8,)).to(device)
        noisy = scheduler.add_noise(images, noise, times)
        loss = torch.nn.functional.mse_loss(model(noisy, times).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": falls(losses)}


main(
    "diffusers",
    [
        Program("Stable Diffusion", whole, tolerance=1e-3),
        Program("enable_model_cpu_offload", offloaded_models, tolerance=1e-3),
        Program("enable_sequential_cpu_offload", offloaded_layers, tolerance=1e-3),
        Program("training a UNet", train, tolerance=1e-3),
    ],
)
