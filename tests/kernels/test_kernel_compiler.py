"""A model's kernels, compiled for a GPU on a machine that has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.without_gpu import WithoutGpu, without_gpu

from gpu_runner.kernels.linear_config import DotConfig, choose, choose_heads
from gpu_runner.schedule.buckets import token_buckets

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}


def test_a_start_compiles_every_kernel_and_the_next_one_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with without_gpu(cache=tmp_path / "cache") as ask:
        done = ask(tmp_path)
    (kernels, compiled, known), again = done["results"]
    # What was compiled lies where a launch of the same kernel looks for it, and on disk.
    assert kernels == compiled == known > 20
    assert again == [kernels, 0, kernels]
    assert done["progress"] == 2 * [[ready, kernels if ready else 0] for ready in range(kernels + 1)]
    assert 0 < len(done["launchers"]) < 2 * kernels


@pytest.mark.parametrize("windows", [{}, {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}])
def test_the_rehearsal_finds_the_kernels_of_every_layer(
    compiler: WithoutGpu, tmp_path: Path, windows: dict[str, Any]
) -> None:
    # Every linear layer has a shape of its own.
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | windows | {"intermediate_size": 192}))
    of_all_layers, rehearsed = compiler(tmp_path, "--every-layer")
    assert set(of_all_layers) == set(rehearsed)


def test_steps_of_many_tokens_have_no_kernel_between_the_product_and_its_heads(
    compiler: WithoutGpu, tmp_path: Path
) -> None:
    wide = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | wide))
    names = compiler(tmp_path, "--names", "512")
    taken = {
        (config, isinstance(choose(tokens, 4096, 1024), DotConfig))  # whether the norm is folded
        for tokens in token_buckets(512)
        if (config := choose_heads(tokens, 4096, 1024, 128)) is not None
    }
    assert names.count("linear_heads_kernel") == len(taken) > 0


def test_long_steps_have_a_prefill_kernel_of_their_own(compiler: WithoutGpu, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_attention_heads": 16, "num_key_value_heads": 16}))
    names = compiler(tmp_path, "--names", "4096")
    # 4096 tokens of 16 KV heads are 512 tasks, 128 queries each.
    assert names.count("_prefill_kernel") == 2
