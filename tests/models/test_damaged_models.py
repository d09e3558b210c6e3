"""Whatever is wrong with a model's files is one sentence of a StartupError."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from torch import Tensor

from asyncengine.errors import StartupError
from gpu_runner.models.registry import load_model, read_model_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path)
    return tmp_path


def load(path: Path) -> None:
    load_model(str(path), device=torch.device("cpu"), dtype=torch.float32, progress=lambda done, total: None)


def sentence(path: Path) -> str:
    with pytest.raises(StartupError) as caught:
        load(path)
    assert "\n" not in caught.value.message
    return caught.value.message


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def edit_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + size :])


def test_a_path_that_is_nothing_is_named(tmp_path: Path) -> None:
    assert sentence(tmp_path / "absent") == f"{tmp_path / 'absent'} is neither a model folder nor a .gguf file"


def test_a_folder_without_config_json_is_no_model(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert sentence(folder) == f"{folder} has no config.json, so it is not a model folder"


def test_config_json_that_is_not_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "cannot read" in sentence(folder)


def test_an_unknown_architecture_is_told_what_is_supported(folder: Path) -> None:
    edit_config(folder, architectures=["GPT2LMHeadModel"])
    assert sentence(folder) == (
        f"{folder / 'config.json'}: architecture 'GPT2LMHeadModel' is not supported; "
        "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM are"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"hidden_size": "48"}, "hidden_size must be a whole number from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 1024"),
        ({"num_attention_heads": 7}, "7 attention heads cannot share 2 key-value heads"),
        ({"head_dim": 9}, "head dimension must be even"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"eos_token_id": 97}, "end-of-sequence id 97 is outside the 97 tokens"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised safetensors are not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic' is not supported"),
    ],
)
def test_a_config_the_decoder_cannot_follow_is_refused(folder: Path, changes: dict[str, Any], expected: str) -> None:
    edit_config(folder, **changes)
    message = sentence(folder)
    assert str(folder / "config.json") in message
    assert expected in message


def test_a_truncated_safetensors_file_is_damaged(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert "is damaged: its tensors need" in sentence(folder)


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_a_safetensors_file_cut_in_its_header_is_damaged(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "is damaged" in sentence(folder)


def test_header_offsets_beyond_the_file_are_damage(folder: Path) -> None:
    edit_header(folder, lambda header: header["model.norm.weight"].update(data_offsets=[10**9, 10**9 + 192]))
    assert "is damaged: tensor" in sentence(folder)


def test_overlapping_tensors_are_damage(folder: Path) -> None:
    def overlap(header: dict[str, Any]) -> None:
        first = min((entry for name, entry in header.items() if name[0] != "_"), key=lambda e: e["data_offsets"])
        header["model.norm.weight"]["data_offsets"] = [first["data_offsets"][0], first["data_offsets"][0] + 192]

    edit_header(folder, overlap)
    assert "is damaged: tensor" in sentence(folder)


def test_a_shape_that_does_not_fill_its_bytes_is_damage(folder: Path) -> None:
    edit_header(folder, lambda header: header["model.norm.weight"].update(shape=[-48]))
    assert "of shape (-48,) has 192 bytes" in sentence(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.__delitem__("model.layers.1.mlp.up_proj.weight"))
    assert sentence(folder) == f"{folder} lacks 1 tensors of the model, first model.layers.1.mlp.up_proj.weight"


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    assert "1 tensors the model does not know, first model.layers.0.self_attn.q_proj.bias" in sentence(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.zeros(47)}))
    assert sentence(folder) == f"{folder}: model.norm.weight has shape (47,), the config says (48,)"


def test_integer_weights_are_refused(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    assert "has type I8; F64, F32, F16, BF16 are supported" in sentence(folder)


def test_a_folder_of_pickled_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "weights are read from safetensors only" in sentence(folder)


def test_a_shard_that_the_index_names_must_be_a_file_of_the_folder(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    load(tmp_path)
    weight_map = json.loads(index.read_text())["weight_map"]
    assert len(set(weight_map.values())) > 1
    elsewhere = tmp_path.parent / "outside.safetensors"
    elsewhere.write_bytes((tmp_path / min(weight_map.values())).read_bytes())
    for bad in ("absent.safetensors", "../outside.safetensors", str(elsewhere), "config.json", "..", ".", ""):
        index.write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": bad}}))
        assert f"names '{bad}', which is not a safetensors file of the folder" in sentence(tmp_path)


def write_gguf(path: Path, *, architecture: str = "llama", skip: str = "") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "bc", "d"])
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd": (3, 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (8, 8),
        "blk.0.attn_v": (8, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_norm": (8,),
        "blk.0.ffn_gate": (16, 8),
        "blk.0.ffn_up": (16, 8),
        "blk.0.ffn_down": (8, 16),
    }
    for name, shape in shapes.items():
        if name != skip:
            writer.add_tensor(f"{name}.weight", np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_whole_gguf_file_loads_and_every_cut_of_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    write_gguf(path)
    load(path)
    config = read_model_config(str(path))
    assert (config.eos_ids, config.tied_embeddings, config.max_position) == ((1,), True, 64)
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 20, 30, 100, 300, 500, 800, len(data) // 2, len(data) - 33):
        cut.write_bytes(data[:size])
        assert str(cut) in sentence(cut)


def test_counts_beyond_a_gguf_file_do_not_hang_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    data = path.read_bytes()
    list_at = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    for position in (8, 16, list_at):  # numbers of tensors, fields, vocabulary entries
        path.write_bytes(data[:position] + struct.pack("<Q", 2**62) + data[position + 8 :])
        assert "is damaged or not supported" in sentence(path)


def test_a_gguf_file_of_an_unknown_architecture_is_told_what_is_supported(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", architecture="falcon")
    assert (
        sentence(tmp_path / "m.gguf")
        == f"{tmp_path / 'm.gguf'}: architecture 'falcon' is not supported in GGUF; llama, qwen2, qwen3 are"
    )


def test_a_tensor_missing_from_a_gguf_file_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", skip="blk.0.ffn_up")
    assert "lacks 1 tensors of the model, first model.layers.0.mlp.up_proj.weight" in sentence(tmp_path / "m.gguf")
