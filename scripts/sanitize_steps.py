"""A few steps of a small model with every way to sample, for compute-sanitizer to watch; see `sanitize.sh`.

    python scripts/sanitize_steps.py [--device cuda] [--no-graphs] [--ways 6]

Prompts of one token, within a page, and longer than a step, beside decoding rows; weights are random. Exits with 1 if a
request did not end as it should.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from step_engine import Engine

from asyncengine.config import EngineConfig

VOCAB, CONTEXT, ROWS, STEP_TOKENS = 1000, 128, 4, 16
HEADS, HEAD_DIM = 4, 64
PROMPT_LENGTHS = (1, 15, 40)
MAX_TOKENS = 5
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": (5, 6, 7)},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logit_bias": ((9, 5.0), (11, -100.0)), "logprobs": 3},
)


def write_config(folder: Path) -> None:
    """A sliding window in one of two layers, so that both kinds of work list are built."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HEADS * HEAD_DIM,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))


def run(args: argparse.Namespace, folder: Path) -> int:
    """Steps that were run."""
    write_config(folder)
    config = EngineConfig(
        device=args.device,
        load_format="dummy",
        max_num_seqs=ROWS,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=CONTEXT,
        kv_cache_tokens=4 * CONTEXT,
    )
    engine = Engine(folder, config, graphs=args.graphs)
    steps = 0
    rng = np.random.default_rng(0)
    for way in WAYS[: args.ways]:
        engine.reset()
        for rid, length in enumerate(PROMPT_LENGTHS):
            engine.add(rid, rng.integers(3, VOCAB, length, dtype=np.int32), MAX_TOKENS, seed=rid, **way)
        engine.drain()
        engine.scheduler.check_integrity()
        gauges = engine.scheduler.gauges()
        if gauges["finished"] != len(PROMPT_LENGTHS):
            raise SystemExit(f"{gauges['finished']} of {len(PROMPT_LENGTHS)} requests with {way} ended")
        steps += gauges["steps"]
    engine.executor.close()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ways", type=int, default=len(WAYS), help="of sampling, the first so many")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = run(args, Path(folder))
    print(f"{steps} steps, all requests ended", flush=True)


if __name__ == "__main__":
    main()
