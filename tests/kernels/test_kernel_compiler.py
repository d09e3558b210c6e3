"""A model's kernels, compiled for a GPU on a machine that has none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.reductions import wrong_reductions
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
OWN_LAYOUTS = ("_fused_kernel", "head_argmax_kernel", "linear_fma_kernel", "linear_heads_kernel")
"""Kernels that reduce what they have reshaped or permuted."""
OF_MANY_ROWS = ("step_meta_kernel",)
"""Of which a small engine's start compiles another form."""


@dataclass(frozen=True, slots=True)
class Starts:
    """Two, one after the other. cache: the folder of what the first has compiled. done: what was told of both."""

    cache: Path
    done: Any


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with without_gpu(cache=folder / "cache") as ask:
        return Starts(cache=folder / "cache", done=ask(folder))


def test_a_start_compiles_every_kernel_and_the_next_one_none(starts: Starts) -> None:
    done = starts.done
    (kernels, compiled, known), again = done["results"]
    # What was compiled lies where a launch of the same kernel looks for it, and on disk.
    assert kernels == compiled == known > 20
    assert again == [kernels, 0, kernels]
    assert done["progress"] == 2 * [[ready, kernels if ready else 0] for ready in range(kernels + 1)]
    assert 0 < len(done["launchers"]) < 2 * kernels


def test_what_is_compiled_reduces_over_the_values_that_it_is_told_to(starts: Starts) -> None:
    compiled = sorted(starts.cache.rglob("*.ttgir"))
    assert len(compiled) == starts.done["results"][0][1]
    wrong = [f"{path.stem}: {line}" for path in compiled for line in wrong_reductions(path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("fields", "fused"),
    [
        ({}, 1),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}, 1),
        ({"max_position_embeddings": 1 << 14}, 2),
    ],
    ids=["one kind", "windows", "long contexts"],
)
def test_the_rehearsal_finds_the_kernels_of_every_layer(
    compiler: WithoutGpu, tmp_path: Path, fields: dict[str, Any], fused: int
) -> None:
    """fused: kernels of attention, another one where contexts may be long."""
    # Every linear layer has a shape of its own.
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | fields | {"intermediate_size": 192}))
    of_all_layers, rehearsed = compiler(tmp_path, "--every-layer")
    assert set(of_all_layers) == set(rehearsed)
    assert [kernel.split()[0] for kernel in rehearsed].count("_fused_kernel") == fused


@pytest.fixture(scope="module")
def wide_steps(compiler: WithoutGpu, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str | None]]:
    """Kernels of a wide model's steps of up to 512 tokens, with their layouts if they reduce in ones of their own."""
    folder = tmp_path_factory.mktemp("wide")
    wide = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(CONFIG | wide | {"vocab_size": 32_000}))
    found = compiler(folder, "--layouts", "512", *OWN_LAYOUTS, *OF_MANY_ROWS)
    return [(name, layouts) for name, layouts in found]


def test_steps_of_many_tokens_have_no_kernel_between_the_product_and_its_heads(
    wide_steps: list[tuple[str, str | None]],
) -> None:
    taken = {
        (config, isinstance(choose(tokens, 4096, 1024), DotConfig))  # whether the norm is folded
        for tokens in token_buckets(512)
        if (config := choose_heads(tokens, 4096, 1024, 128)) is not None
    }
    assert [name for name, _ in wide_steps].count("linear_heads_kernel") == len(taken) > 0


@pytest.mark.parametrize("kernel", [*OWN_LAYOUTS, *OF_MANY_ROWS])
def test_what_steps_of_many_tokens_reduce_is_what_they_are_told_to(
    kernel: str, wide_steps: list[tuple[str, str | None]]
) -> None:
    compiled = [layouts for name, layouts in wide_steps if name == kernel and layouts is not None]
    assert compiled
    wrong = [line for layouts in compiled for line in wrong_reductions(layouts)]
    assert not wrong, "\n".join(wrong)


WITHOUT_NORMS = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 32}


@pytest.mark.parametrize("fields", [{}, WITHOUT_NORMS], ids=["two heads of a norm each", "four heads"])
def test_what_streams_reduces_over_the_values_that_it_is_told_to(
    compiler: WithoutGpu, tmp_path: Path, fields: dict[str, Any]
) -> None:
    wide = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | wide | fields))
    found = compiler(tmp_path, "--layouts", "512", "_decode_kernel")
    streamed = [layouts for name, layouts in found if name == "_decode_kernel" and "%rotation" in layouts]
    assert len(streamed) > 1
    assert not [line for layouts in streamed for line in wrong_reductions(layouts)]


def test_long_steps_have_a_prefill_kernel_of_their_own(compiler: WithoutGpu, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_attention_heads": 16, "num_key_value_heads": 16}))
    names = compiler(tmp_path, "--names", "4096")
    # 4096 tokens of 16 KV heads are 512 tasks, 128 queries each.
    assert names.count("_prefill_kernel") == 2
