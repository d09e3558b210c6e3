"""Times whole engine steps, without HTTP: decode by batch size, prefill, and both in one step, against what memory and
arithmetic allow.

    python scripts/bench_step.py [MODEL_FOLDER ...] [--batches 1,8,64,256,512] [--context 256] [--json out.json]

MODEL_FOLDER needs a config.json only (default: the shapes in scripts/data); weights are random. Scheduler and executor
run in the loop's order, two steps in flight, so a step's time is what a stream would see, host work included.

    ms/step   median time between two collected steps in steady decode
    context   tokens that a row attends to, on average over rows and steps
    floor     bytes that must move (weights once, each row's keys and values) at 4.5 TB/s
    host us   time per step outside waiting for the device, and of its parts: plan, launch (packing included), commit
    longer    one batch again with 4 times the context, or as long a one as fits; left out where that is hardly longer
    mixed     median time of full steps in which rows decode beside a prompt's chunk; left out where there are none
    serving   a closed loop: so many requests run at all times, each followed by another one when it ends, so that rows
              end and prompts come with nearly every step; mean time of a step
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_engine import (
    DATA,
    SPARE_STEPS,
    WARM_STEPS,
    ClosedLoop,
    Engine,
    HostTimes,
    end_rows,
    mean_context,
    prompts,
    start_rows,
)

from asyncengine.config import PAGE_SIZE, EngineConfig
from gpu_runner.device.executor import Executor
from gpu_runner.schedule.step_time import attended_pairs

MEMORY_BYTES_PER_S = 4.5e12
MIXED_CHUNKS = 5
DEFAULT_SERVING = "110+276"
"""The means of ShareGPT's conversations."""
SERVING_STREAMS = 64
"""From as many on requests are served in a closed loop too."""
LONGER = 4
"""So many times the context, at which one batch is measured again: what the context alone costs."""


def measure_decode(engine: Engine, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Steps whose rows attend to `context` tokens on average, or as few more as prompts of one token allow."""
    wanted = length = max(1, context - WARM_STEPS - steps // 2)
    reached = start_rows(engine, batch, length, steps)
    # Rows that started early decoded while others prefilled, for a time that grows with the prompts.
    length = max(1, round(length * wanted / reached))
    if length < wanted:
        end_rows(engine, batch)
        start_rows(engine, batch, length, steps)
    times: list[float] = []
    host: list[HostTimes] = []
    contexts: list[float] = []
    last, seen = time.perf_counter(), 1
    while len(times) < steps:
        plan = engine.turn()
        now = time.perf_counter()
        if plan is not None:
            seen += 1
            if seen > WARM_STEPS:
                times.append(now - last)
                host.append(engine.host_s)
                contexts.append(mean_context(plan))
        last = now
    end_rows(engine, batch)
    executor = engine.executor
    measured = float(np.mean(contexts))
    kv_bytes = batch * measured * executor.model_config.kv_bytes_per_token(_dtype(executor))
    floor = (executor.info.weight_bytes + kv_bytes) / MEMORY_BYTES_PER_S
    step = float(np.median(times))
    return {
        "batch": batch,
        "context": measured,
        "ms": 1e3 * step,
        "p99_ms": 1e3 * float(np.percentile(times, 99)),
        "floor_ms": 1e3 * floor,
        "tokens_per_s": batch / step,
        "host_us": 1e6 * float(np.median([sum(turn) for turn in host])),
        **{f"{part}_us": 1e6 * float(us) for part, us in zip(HostTimes._fields, np.median(host, axis=0), strict=True)},
    }


def longest_context(max_model_len: int, steps: int) -> int:
    """Most tokens of context with which `measure_decode` has room for its steps; 0 if there is none for so many."""
    longest_prompt = max_model_len - SPARE_STEPS - steps
    return longest_prompt + WARM_STEPS + steps // 2 if longest_prompt > 0 else 0


def decodes_at_once(executor: Executor, batch: int, context: int, steps: int) -> bool:
    """Whether so many rows, of so many tokens, all decode for `steps`: they fit the cache, and the first that begin
    still run when the others, of whose prompts a step computes a part, do."""
    fit = batch * (context + steps) <= (executor.num_pages - 1) * PAGE_SIZE
    per_step = executor.max_step_tokens - batch
    return fit and per_step > 0 and batch * context / per_step <= SPARE_STEPS - 2 * WARM_STEPS


def choose_longer(executor: Executor, batches: list[int], context: int, steps: int) -> tuple[int, int] | None:
    """A batch and its context: `LONGER` times `context`, or what leaves room for the steps and takes half of the KV
    cache at most. None if that is less than `context` and the steps, as rows of the same lengths tell nothing new."""
    batches = [batch for batch in batches if batch <= executor.max_step_tokens // 2]  # prompts need the rest
    if not batches:
        return None
    room = executor.num_pages * PAGE_SIZE // 2
    longer = min(LONGER * context, longest_context(executor.max_model_len, steps), room // min(batches))
    if longer < context + steps:
        return None
    fitting = (batch for batch in batches if batch * longer <= room and decodes_at_once(executor, batch, longer, steps))
    largest = max(fitting, default=None)
    return None if largest is None else (largest, longer)


def measure_mixed(engine: Engine, batch: int, context: int) -> dict[str, Any] | None:
    """Full steps of one prompt's chunks beside `batch` rows that decode. On average over the steps: tokens of context
    that the rows attend to, and pairs of a prefill token and one that it attends to. None if no step was such a one:
    the longest prompt is shorter than a step, or found no room beside the rows."""
    length = min(MIXED_CHUNKS * engine.executor.max_step_tokens, engine.executor.max_model_len - 1)
    start_rows(engine, batch, max(1, context - WARM_STEPS), 0)
    engine.add(batch, prompts(1, length, engine.executor.model_config.vocab_size)[0], 1)
    times, contexts, pairs = [], [], []
    last = time.perf_counter()
    while engine.scheduler.knows(batch):
        plan = engine.turn()
        now = time.perf_counter()
        if plan is not None and len(plan.prefill_tokens) + batch == engine.executor.max_step_tokens:
            start, chunk = int(plan.row_start[batch]), int(plan.row_len[batch])
            times.append(now - last)
            contexts.append(int(plan.row_start[:batch].sum()) + batch)
            pairs.append(attended_pairs(start, chunk))
        last = now
    end_rows(engine, batch)
    if not times:
        return None
    return {
        "batch": batch,
        "context_tokens": float(np.mean(contexts)),
        "pairs": float(np.mean(pairs)),
        "steps": len(times),
        "ms": 1e3 * float(np.median(times)),
    }


def measure_serving(engine: Engine, streams: int, prompt_tokens: int, answer_tokens: int) -> dict[str, Any]:
    """Over as many steps as an answer has tokens, from when all requests that were there at first have ended."""
    loop = ClosedLoop(engine, streams, prompt_tokens, answer_tokens)
    loop.warm_up()
    tokens = steps = steps_with_prompts = prompt_total = 0
    begin = time.perf_counter()
    while steps < answer_tokens:
        plan = loop.turn()
        if plan is not None:
            steps += 1
            tokens += int(plan.row_samples.sum())
            prompt_total += len(plan.prefill_tokens)
            steps_with_prompts += len(plan.prefill_tokens) > 0
    seconds = time.perf_counter() - begin
    loop.end()
    return {
        "streams": streams,
        "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens,
        "ms": 1e3 * seconds / steps,
        "tokens_per_s": tokens / seconds,
        "share_with_prompts": steps_with_prompts / steps,
        "prompt_tokens_per_step": prompt_total / steps,
    }


def _dtype(executor: Executor) -> Any:
    return getattr(torch, executor.info.dtype)


def measure_prefill(engine: Engine, count: int, length: int) -> tuple[float, float]:
    """Seconds until `count` prompts of `length` tokens each have their first token, and until the first one has."""
    engine.reset()
    for rid, prompt in enumerate(prompts(count, length, engine.executor.model_config.vocab_size)):
        engine.add(rid, prompt, 1)
    begin = time.perf_counter()
    first = 0.0
    while engine.scheduler.has_work or engine.in_flight:
        plan = engine.turn()
        if plan is not None and not first and plan.row_samples.any():
            first = time.perf_counter() - begin
    return time.perf_counter() - begin, first


def bench(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    batches = [int(batch) for batch in args.batches.split(",")]
    config = EngineConfig(
        load_format="dummy",
        device=args.device,
        max_num_seqs=max(2, *batches),  # a row beside a prompt
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_tokens=args.kv_cache_tokens,
        batch_invariant=args.batch_invariant,
    )
    print(f"\n{model.name}", flush=True)
    engine = Engine(model, config)
    gc.collect()
    gc.freeze()
    gc.disable()
    fitting = [batch for batch in batches if decodes_at_once(engine.executor, batch, args.context, args.steps)]
    if len(fitting) < len(batches):
        left_out = ", ".join(str(batch) for batch in batches if batch not in fitting)
        print(
            f"left out: batches of {left_out}, whose rows would not all decode at once: the KV cache is too small, or"
        )
        print(f"the first would have ended {SPARE_STEPS} steps later, before the last had begun")
    batches = fitting
    rows = []
    print(f"{'batch':>6} {'context':>8} {'ms/step':>8} {'p99':>8} {'floor':>7} {'x floor':>7} {'tok/s':>8}", end="")
    print(f" {'host us':>8} {'plan us':>8} {'launch us':>9} {'commit us':>9}")
    for batch in batches:
        row = measure_decode(engine, batch, args.context, args.steps)
        rows.append(row)
        print(
            f"{batch:>6} {row['context']:>8.0f} {row['ms']:>8.3f} {row['p99_ms']:>8.3f} {row['floor_ms']:>7.3f}"
            f" {row['ms'] / row['floor_ms']:>7.2f} {row['tokens_per_s']:>8.0f} {row['host_us']:>8.0f}"
            f" {row['plan_us']:>8.0f} {row['launch_us']:>9.0f} {row['commit_us']:>9.0f}",
            flush=True,
        )
    prefill = []
    for count, length in args.prefill:
        if length >= engine.executor.max_model_len:
            continue
        measure_prefill(engine, count, length)
        total, first = min(measure_prefill(engine, count, length) for _ in range(3))
        prefill.append(
            {"count": count, "length": length, "tokens_per_s": count * length / total, "first_ms": 1e3 * first}
        )
        print(
            f"prefill {count:>3} x {length:<5} {count * length / total:>10,.0f} tok/s, first token {1e3 * first:.2f} ms"
        )
    executor = engine.executor
    step_tokens = executor.max_step_tokens
    longer = None
    rows_beside = min(config.max_num_seqs - 1, step_tokens // 2)
    if chosen := choose_longer(executor, batches, args.context, args.steps):
        batch, context = chosen
        longer = measure_decode(engine, batch, context, args.steps)
        print(f"decode  {batch:>3} x {longer['context']:<5.0f} of context {longer['ms']:>8.3f} ms/step")
        rows_beside = min(rows_beside, batch)
    else:
        print("decode  no context that fits is longer")
        rows_beside = min(rows_beside, max(1, executor.num_pages * PAGE_SIZE // (2 * args.context)))
    mixed = measure_mixed(engine, rows_beside, args.context)
    if mixed:
        chunk = step_tokens - mixed["batch"]
        print(f"mixed   {mixed['batch']:>3} rows + a chunk of {chunk:<5} {mixed['ms']:>8.3f} ms/step")
    else:
        print(f"mixed   no full step had {rows_beside} rows beside a chunk")
    serving = []
    prompt_tokens, answer_tokens = args.serving
    for streams in [batch for batch in batches if batch >= SERVING_STREAMS]:
        row = measure_serving(engine, streams, prompt_tokens, answer_tokens)
        serving.append(row)
        print(
            f"serving {streams:>3} requests of {prompt_tokens} + {answer_tokens} tokens {row['ms']:>8.3f} ms/step, "
            f"{row['tokens_per_s']:,.0f} tok/s; {100 * row['share_with_prompts']:.0f} % of steps with prompts, "
            f"{row['prompt_tokens_per_step']:.0f} tokens of these a step"
        )
    executor.close()
    return {
        "model": model.name,
        "device": executor.info.device,
        "batch_invariant": executor.info.batch_invariant,
        "max_model_len": executor.model_config.max_position,
        "kv_cache_tokens": (executor.num_pages - 1) * PAGE_SIZE,
        "kv_bytes_per_token": executor.model_config.kv_bytes_per_token(_dtype(executor)),
        "step_tokens": step_tokens,
        "decode": rows,
        "longer": longer,
        "prefill": prefill,
        "mixed": mixed,
        "serving": serving,
    }


def prefills(text: str) -> list[tuple[int, int]]:
    pairs = (part.split("x") for part in text.split(","))
    return [(int(count), int(length)) for count, length in pairs]


def request_sizes(text: str) -> tuple[int, int]:
    prompt, answer = text.split("+")
    return int(prompt), int(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=[DATA / "qwen3-0.6b", DATA / "llama-3.1-8b"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", default="1,8,64,256,512")
    parser.add_argument("--context", type=int, default=256, help="tokens of a row, on average over the steps")
    parser.add_argument("--steps", type=int, default=100, help="decode steps measured per batch size")
    parser.add_argument(
        "--prefill", type=prefills, default="1x2000,64x512,16x2048,4x8000", help="prompts and their length, each timed"
    )
    parser.add_argument(
        "--serving", type=request_sizes, default=DEFAULT_SERVING, help="tokens of a served request's prompt and answer"
    )
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--kv-cache-tokens", type=int)
    parser.add_argument("--batch-invariant", action="store_true", help="in that mode, whose cost the difference is")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    longest = longest_context(args.max_model_len, args.steps)
    if not 1 <= args.context <= longest:
        parser.error(
            f"--context {args.context} is not from 1 to {longest}, what --max-model-len {args.max_model_len} has room "
            f"for with --steps {args.steps}"
        )
    results = []
    for model in args.models:
        results.append(bench(model, args))
        gc.enable()
        gc.unfreeze()
        gc.collect()  # the next model needs this one's memory
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
