"""PEFT: LoRA adapters on a small language model: training, merging, saving and loading."""

import tempfile

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from trial import Program, Results, falls, main, on

import torch_backplane.integrations.transformers  # noqa: F401

transformers.logging.set_verbosity_error()
TOKENS = torch.arange(4)[:, None] * 7 + torch.arange(16)[None]


def base() -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, bos_token_id=1, eos_token_id=2, **sizes))


def lora(device: torch.device) -> Results:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    torch.manual_seed(2)
    model = get_peft_model(base(), config).to(device)
    before = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.clone()
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=3e-2)
    tokens, losses = TOKENS.to(device), []
    for _ in range(15):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    after = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert torch.equal(before, after)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(base().to(device), folder)
        logits = on(loaded(tokens).logits, device)
        merged = model.merge_and_unload()(tokens).logits
    torch.testing.assert_close(logits, merged, rtol=1e-3, atol=1e-3)
    return {"losses": falls(losses), "logits": logits}


main("peft", [Program("LoRA: training, saving, loading, merging", lora, tolerance=5e-3)])
