"""A few steps of a small model with every way to sample, for compute-sanitizer to watch; see `sanitize.sh`.

    python scripts/sanitize_steps.py [--device cuda] [--no-graphs] [--no-pdl] [--head-dim 64] [--ways 6]

Prompts of one token, within a page, and longer than a step, beside decoding rows; weights are random. Exits with 1 if a
request did not end as it should.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np

from asyncengine.config import EngineConfig
from asyncengine.sampling import SamplingParams
from gpu_runner.device.build import build_executor
from gpu_runner.schedule.plan import StepPlan
from gpu_runner.schedule.scheduler import Scheduler, num_slots_for

VOCAB, CONTEXT, ROWS, STEP_TOKENS = 1000, 128, 4, 16
PROMPT_LENGTHS = (1, 15, 40)
MAX_TOKENS = 5
WAYS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": (5, 6, 7)},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logit_bias": ((9, 5.0), (11, -100.0)), "logprobs": 3},
)


def write_config(folder: Path, head_dim: int) -> None:
    """A sliding window in one of two layers, so that both kinds of work list are built."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
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
    write_config(folder, args.head_dim)
    config = EngineConfig(
        device=args.device,
        load_format="dummy",
        max_num_seqs=ROWS,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=CONTEXT,
        kv_cache_tokens=4 * CONTEXT,
    )
    began = time.monotonic()
    executor = build_executor(
        config, str(folder), lambda *_: None, num_slots=num_slots_for(ROWS), graphs=args.graphs, pdl=args.pdl
    )
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
    steps = 0
    rng = np.random.default_rng(0)
    for way in WAYS[: args.ways]:
        scheduler = Scheduler(
            num_pages=executor.num_pages,
            max_model_len=CONTEXT,
            max_num_seqs=ROWS,
            max_num_batched_tokens=STEP_TOKENS,
            eos_ids=executor.model_config.eos_ids,
        )
        for rid, length in enumerate(PROMPT_LENGTHS):
            params = SamplingParams(max_tokens=MAX_TOKENS, seed=rid, **way)  # type: ignore[arg-type]
            prompt = rng.integers(3, VOCAB, length, dtype=np.int32)
            scheduler.add(rid=rid, prompt=prompt, params=params, max_tokens=MAX_TOKENS)
        in_flight: deque[StepPlan] = deque()
        while scheduler.has_work or in_flight:
            plan = scheduler.plan()
            if plan is not None:
                executor.launch(plan)
                in_flight.append(plan)
                steps += 1
            if in_flight and (plan is None or len(in_flight) == 2):
                scheduler.commit(in_flight.popleft(), executor.collect())
        scheduler.check_integrity()
        if (finished := scheduler.counters.finished) != len(PROMPT_LENGTHS):
            raise SystemExit(f"{finished} of {len(PROMPT_LENGTHS)} requests with {way} ended")
    executor.close()
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--pdl", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--ways", type=int, default=len(WAYS), help="of sampling, the first so many")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = run(args, Path(folder))
    print(f"{steps} steps, all requests ended", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
