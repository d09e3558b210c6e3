"""Small transformers models with random weights, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 97
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

TINY_MODELS: dict[str, tuple[type[PreTrainedModel], type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 19}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 20}),
}


def make_tiny(name: str) -> PreTrainedModel:
    """The named model in float32, every parameter random: norms near 1, biases not 0."""
    model_class, config_class, changes = TINY_MODELS[name]
    config = config_class(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "eos_token_id": 2,
            "attn_implementation": "eager",
            **changes,
        }
    )
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in parameter_name else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def save_tiny(name: str, folder: Path, **how: Any) -> PreTrainedModel:
    model = make_tiny(name)
    model.save_pretrained(folder, **how)
    return model
