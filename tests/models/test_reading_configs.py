"""What is read of a model's files, in each of the spellings that are in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from paged_driver import PagedDriver
from tiny_models import LLAMA3_ROPE, save_tiny
from torch import Tensor
from transformers import PreTrainedModel

from gpu_runner.models.config import Llama3Scaling, RopeConfig
from gpu_runner.models.registry import load_model, read_model_config

BASE_CONFIG = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
    "torch_dtype": "bfloat16",
}


def config_of(folder: Path, architecture: str, **changes: Any) -> Any:
    folder.mkdir(exist_ok=True)
    if not (folder / "model.safetensors").exists():
        save_tiny("llama", folder)
    (folder / "config.json").write_text(json.dumps(BASE_CONFIG | {"architectures": [architecture]} | changes))
    return read_model_config(str(folder))


def test_both_spellings_of_rope_scaling_say_the_same(tmp_path: Path) -> None:
    old = {name: value for name, value in LLAMA3_ROPE.items() if name not in ("rope_theta", "rope_type")}
    for rope in (
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_theta": 10000.0, "rope_scaling": old | {"rope_type": "llama3"}},
        {"rope_theta": 10000.0, "rope_scaling": old | {"type": "llama3"}},
    ):
        assert config_of(tmp_path, "LlamaForCausalLM", **rope).rope == RopeConfig(
            base=10000.0,
            llama3=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32),
        )
    assert config_of(tmp_path, "LlamaForCausalLM", rope_theta=5e5, rope_scaling=None).rope == RopeConfig(base=5e5)


def test_end_of_sequence_ids_of_both_files_count_once(tmp_path: Path) -> None:
    config_of(tmp_path, "LlamaForCausalLM")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7, 8]}')
    assert config_of(tmp_path, "LlamaForCausalLM").eos_ids == (9, 7, 8)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert config_of(tmp_path, "LlamaForCausalLM", eos_token_id=[6, 5]).eos_ids == (5, 6)
    (tmp_path / "generation_config.json").unlink()
    assert config_of(tmp_path, "LlamaForCausalLM", eos_token_id=None).eos_ids == ()


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {}, (None, None, None)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
        ("MistralForCausalLM", {"sliding_window": 4096}, (4096, 4096, 4096)),
        ("MistralForCausalLM", {}, (4096, 4096, 4096)),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 100}, (None, None, None)),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2},
            (None, None, 100),
        ),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 50, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            (50, None, None),
        ),
    ],
)
def test_sliding_windows_are_on_the_layers_that_the_config_means(
    tmp_path: Path, architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert config_of(tmp_path, architecture, **changes).layer_windows == windows


def test_the_numbers_of_a_config_are_where_they_belong(tmp_path: Path) -> None:
    config = config_of(tmp_path, "Qwen3ForCausalLM")
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (300, 48, 80)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 6, 2, 128)
    assert (config.qk_norm, config.qkv_bias, config.tied_embeddings, config.max_position) == (True, False, False, 256)
    assert config.kv_bytes_per_token(torch.float16) == 2 * 3 * 2 * 128 * 2
    assert config_of(tmp_path, "Qwen2ForCausalLM").head_dim == 8
    assert config_of(tmp_path, "Qwen2ForCausalLM").qkv_bias


PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(rows: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of Q and K: row i of a head's first half, then row i of its second half."""
    halves = rows.unflatten(0, (heads, 2, -1))
    return torch.stack((halves[:, 0], halves[:, 1]), dim=2).reshape(rows.shape)


def write_gguf(path: Path, model: PreTrainedModel, architecture: str, rope_divisors: Tensor | None) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors.numpy())
    for name, tensor in model.state_dict().items():
        module, kind = name.removeprefix("model.").rsplit(".", 1)
        if module == "lm_head" and config.tie_word_embeddings:
            continue
        if module.startswith("layers."):
            _, layer, part = module.split(".", 2)
            if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
                tensor = interleave(tensor, heads)
            target = f"blk.{layer}.{PARTS[part]}"
        else:
            target = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[module]
        writer.add_tensor(f"{target}.{kind}", np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama-biases", "llama"),
        ("llama-tied", "llama"),
        ("llama-rope-llama3", "llama"),
        ("mistral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
@torch.inference_mode()
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(
    tmp_path: Path, name: str, architecture: str
) -> None:
    model = save_tiny(name, tmp_path)
    divisors = None
    if name == "llama-rope-llama3":
        rope = read_model_config(str(tmp_path)).rope
        divisors = RopeConfig(base=rope.base).inv_freq(8) / model.model.rotary_emb.inv_freq
    write_gguf(tmp_path / "m.gguf", model, architecture, divisors)
    decoder = load_model(
        str(tmp_path / "m.gguf"), device=torch.device("cpu"), dtype=torch.float32, progress=lambda done, total: None
    )
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = model(torch.tensor([tokens])).logits[0]
    actual = PagedDriver(decoder, num_slots=1, max_tokens=48).prefill(0, tokens, chunk=48)
    assert (actual - expected).norm() <= 1e-4 * expected.norm()
