"""What ways of choosing tokens cost whole decode steps, beside greedy ones: temperature, filters, penalties, logprobs,
and rows within a structure.

    python scripts/bench_sampling.py [MODEL_FOLDER] [--batch 256] [--ways greedy,top_p] [--json out.json]

MODEL_FOLDER needs a config.json only; weights are random. Scheduler and executor run in the loop's order, two steps in
flight. For structures the masks are there as soon as they are wanted: what they cost a device, and the steps in which
such rows wait for their last token to be read, without what computing them takes (`bench_grammar.py`).

    tok/s    of all rows together, and beside it as a share of greedy's
    free     tok/s of a row that asks for nothing, where only half of the rows ask for this
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from step_engine import DATA, WARM_STEPS, Engine, end_rows, prompts

from asyncengine.config import EngineConfig
from asyncengine.sampling import SamplingParams, Structured

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 40},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0.8, "logprobs": 5},
    "structured": {"temperature": 0.0, "structured": Structured("regex", ".*")},
    "structured top_p": {"temperature": 0.8, "top_p": 0.9, "structured": Structured("regex", ".*")},
}


def measure(engine: Engine, batch: int, context: int, steps: int, way: str, rows: int) -> tuple[float, float]:
    """Tokens a second of all rows, and of one of those that are greedy, when `rows` of the batch choose this way."""
    engine.reset()
    vocab = engine.executor.model_config.vocab_size
    length = max(1, context - WARM_STEPS - steps // 2)
    for rid, prompt in enumerate(prompts(batch, length, vocab)):
        asked = WAYS[way] if rid < rows else WAYS["greedy"]
        params = SamplingParams(**asked, ignore_eos="structured" not in asked, seed=rid)
        engine.scheduler.add(rid=rid, prompt=prompt, params=params, max_tokens=2 * steps + 400)
    begin, seen, tokens, free = 0.0, 0, 0, 0
    while seen < WARM_STEPS + steps:
        plan = engine.turn()
        masks = engine.scheduler.masked_rows
        work = masks.take_work()
        if work is not None:
            begun = np.array([(row.slot, row.gen) for row in work.opened], np.int32).reshape(-1, 2)
            masks.ready(begun[:, 0], begun[:, 1])
            masks.ready(work.slots, work.gens)
        if plan is None or len(plan.prefill_tokens):
            continue
        if plan.num_decode_rows >= batch - rows:  # all have begun
            seen += 1
            if seen == WARM_STEPS:
                begin, tokens, free = time.perf_counter(), 0, 0
            tokens += plan.num_rows
            free += 1
    seconds = time.perf_counter() - begin
    end_rows(engine, batch)
    return tokens / seconds, free / seconds


def allow_all_but(engine: Engine, tokens: Sequence[int]) -> None:
    """Every slot's mask; which tokens it allows does not change what it costs."""
    masks = engine.executor.masks
    bits = np.arange(32 * masks.words) < engine.executor.model_config.vocab_size
    bits[list(tokens)] = False
    masks.array[:] = np.packbits(bits, bitorder="little").view(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=DATA / "qwen3-0.6b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--context", type=int, default=256, help="tokens of a row, on average over the steps")
    parser.add_argument("--steps", type=int, default=100, help="steps measured of each way")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--kv-cache-tokens", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ways = args.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"unknown ways: {', '.join(unknown)}; there are {', '.join(WAYS)}")
    config = EngineConfig(
        load_format="dummy",
        device=args.device,
        max_num_seqs=args.batch,
        max_model_len=args.max_model_len,
        kv_cache_tokens=args.kv_cache_tokens,
    )
    engine = Engine(args.model, config)
    allow_all_but(engine, engine.executor.model_config.eos_ids)
    gc.collect()
    gc.freeze()
    gc.disable()
    greedy, greedy_row = measure(engine, args.batch, args.context, args.steps, "greedy", args.batch)
    print(f"{args.model.name}, {args.batch} rows; all of them, and half of them beside greedy ones")
    print(f"{'':<17} {'tok/s':>10} {'':>6} {'half: tok/s':>11} {'':>6} {'free':>6}")
    results = []
    for way in ways:
        total, _ = measure(engine, args.batch, args.context, args.steps, way, args.batch)
        half, free = measure(engine, args.batch, args.context, args.steps, way, args.batch // 2)
        results.append({"way": way, "tokens_per_s": total, "half_tokens_per_s": half, "free_row_tokens_per_s": free})
        print(
            f"{way:<17} {total:>10,.0f} {total / greedy:>6.1%} {half:>11,.0f} {half / greedy:>6.1%}"
            f" {free / greedy_row:>6.1%}",
            flush=True,
        )
    engine.executor.close()
    if args.json:
        args.json.write_text(
            json.dumps({"batch": args.batch, "greedy_tokens_per_s": greedy, "ways": results}, indent=2)
        )


if __name__ == "__main__":
    main()
