"""Kernels that read what describes the step before they wait (PDL) find it written, in every graph of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.random_model import write_config
from support.without_gpu import WithoutGpu

WRITERS = {"_fetch_kernel", "step_meta_kernel", "build_kernel"}
"""Of positions, page table, lists and counts."""
ALWAYS = {"_decode_kernel", "_qk_norm_rope_write_kernel", "_post_update_kernel"}
"""Read them early, as the next two do where a model's steps have them."""
FUSED, HEADS = "_fused_kernel", "linear_heads_kernel"

WINDOWS = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 1,
}
WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("fields", "readers"),
    [
        ({}, ALWAYS | {FUSED}),
        (WINDOWS, ALWAYS | {FUSED}),
        ({**WIDE, "head_dim": 128, "max_position_embeddings": 8192}, ALWAYS | {FUSED, HEADS}),
        ({"num_attention_heads": 16, "num_key_value_heads": 1}, ALWAYS),
    ],
    ids=["small", "windows", "heads in the product, long contexts", "a group too large to fuse"],
)
def test_between_writers_and_early_readers_stands_a_kernel_that_triggers_behind_its_wait(
    compiler: WithoutGpu, tmp_path: Path, fields: dict[str, Any], readers: set[str]
) -> None:
    found = set()
    for graph in compiler(write_config(tmp_path, **fields), "--order", "512"):
        may_still_run = False  # a writer, when the next kernel starts
        for place, (kernel, triggers_behind_wait) in enumerate(graph):
            if kernel in ALWAYS | {FUSED, HEADS}:
                found.add(kernel)
                assert not may_still_run, [name for name, _ in graph[: place + 1]]
            may_still_run = kernel in WRITERS or (may_still_run and not triggers_behind_wait)
    assert found == readers
