"""transformers: Trainer, generate with a static cache, device_map="auto", and weights quantized by torchao."""

import tempfile

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TorchAoConfig, Trainer, TrainerCallback, TrainingArguments
from trial import Program, Results, falls, main, on

import torch_backplane.integrations.transformers  # noqa: F401

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
VOCABULARY = 128
PROMPT = torch.arange(1, 25).reshape(2, 12)


def language_model() -> LlamaForCausalLM:
    """A small model with random weights, the same in each call."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=128, **sizes, **special))


def saved(folder: str) -> str:
    language_model().save_pretrained(folder)
    return folder


class Losses(TrainerCallback):
    """Collects the logged losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:  # type: ignore[no-untyped-def]
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def train(device: torch.device, **options: bool) -> list[float]:
    counting = [torch.arange(start, start + 16) % VOCABULARY for start in range(64)]
    data = [{"input_ids": one, "labels": one} for one in counting]
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=8, max_steps=20, learning_rate=3e-3, logging_steps=5, report_to=[],
            save_strategy="no", use_cpu=device.type == "cpu", seed=0, disable_tqdm=True, **options,
        )  # fmt: skip
        assert arguments.device.type == device.type
        Trainer(language_model(), arguments, train_dataset=data, callbacks=[losses]).train()
    return falls(losses.losses)


def trainer(device: torch.device) -> Results:
    return {"losses": train(device)}


def trainer_bfloat16(device: torch.device) -> Results:
    return {"losses": train(device, bf16=True)}


def static_cache(device: torch.device) -> Results:
    model = language_model().to(device).eval()
    options = {"max_new_tokens": 16, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    return {"tokens": on(model.generate(PROMPT.to(device), **options), device)}


def device_map(device: torch.device) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        where = "cpu" if device.type == "cpu" else "auto"
        model = LlamaForCausalLM.from_pretrained(saved(folder), device_map=where)
    return {"logits": on(model(PROMPT.to(model.device)).logits, device)}


def limited_memory(device: torch.device) -> Results:
    options = {} if device.type == "cpu" else {"device_map": "auto", "max_memory": {0: "300KB", "cpu": "1GB"}}
    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM.from_pretrained(saved(folder), **options)
    where = set(getattr(model, "hf_device_map", {}).values())
    assert where == (set() if device.type == "cpu" else {0, "cpu"}), where
    return {"logits": on(model(PROMPT.to(device)).logits, device)}


def quantized(device: torch.device) -> Results:
    from torchao.quantization import Int8WeightOnlyConfig

    with tempfile.TemporaryDirectory() as folder:
        config = TorchAoConfig(Int8WeightOnlyConfig())
        model = LlamaForCausalLM.from_pretrained(saved(folder), device_map=device, quantization_config=config)
    assert "Int8" in type(model.model.layers[0].mlp.up_proj.weight).__name__
    with torch.inference_mode():
        return {"logits": on(model(PROMPT.to(device)).logits, device)}


main(
    "transformers",
    [
        Program("Trainer", trainer, tolerance=1e-3),
        Program("Trainer(bf16=True)", trainer_bfloat16, tolerance=3e-2),
        Program("generate with a static cache", static_cache, tolerance=0),
        Program('from_pretrained(device_map="auto")', device_map),
        Program('device_map="auto" with max_memory', limited_memory),
        Program("int8 weights by torchao", quantized, tolerance=1e-3),
    ],
)
