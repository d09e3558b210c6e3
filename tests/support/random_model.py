"""A folder for a small model of random weights, of a shape that a GPU's kernels take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 1000


def write_config(folder: Path, **changes: Any) -> str:
    """Write a Qwen3 config.json, for load_format dummy; returns the folder's path."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
