"""A small model with SmolLM2's tokens and random weights: what it says makes sense only as far as it is made to."""

from __future__ import annotations

import json
from pathlib import Path

from support.random_model import write_config
from support.tokenizers_cache import default_model_file

from asyncengine.tokenizer_file import load_tokenizer

MAX_MODEL_LEN = 8192
EOS = 2


def write_babbling_model(folder: Path) -> str:
    """For load_format dummy; a conversation is its messages one behind the other. Returns the folder's path."""
    load_tokenizer(str(default_model_file())).tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return write_config(
        folder,
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=EOS,
    )
