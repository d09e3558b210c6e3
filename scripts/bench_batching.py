"""One workload served with static, dynamic and continuous batching on the same engine, and by transformers.

    python scripts/bench_batching.py [--requests 96] [--slots 8] [--rate 4] [--png batching.png] [--json out.json]

Requests arrive at random times (Poisson, fixed seed) with prompt and answer lengths drawn from ShareGPT's, scaled down
for a CPU. All are greedy with a fixed answer length, so every way has the same work to do.

    static       wait until `slots` requests have arrived, run them together, start the next batch when all have ended
    dynamic      start with what has arrived (at most `slots`) as soon as the last batch has ended
    continuous   hand every request to the engine as it arrives
    transformers the same model in `transformers.generate`, one by one and in static batches (left padded)

Latency counts from arrival to last token. Slot utilisation: generated tokens / (steps x slots).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncengine import AsyncEngine, EngineConfig, SamplingParams
from asyncengine.bench.workload import LENGTHS
from asyncengine.model_files import resolve_model

VOCABULARY = range(1000, 40_000)


@dataclass(frozen=True)
class Job:
    arrival: float  # seconds after the start
    prompt: list[int]
    answer_tokens: int


@dataclass(frozen=True)
class Row:
    way: str
    tokens_per_s: float
    latency_mean_s: float
    latency_p99_s: float
    slot_utilisation: float


def make_workload(args: argparse.Namespace) -> list[Job]:
    rng = np.random.default_rng(args.seed)
    pairs = json.loads(LENGTHS.read_text())
    chosen = rng.choice(len(pairs), args.requests, replace=False)
    arrivals = np.cumsum(rng.exponential(1 / args.rate, args.requests))
    return [
        Job(
            arrival=float(arrival),
            prompt=rng.choice(VOCABULARY, max(1, round(pairs[index][0] * args.scale))).tolist(),
            answer_tokens=max(1, round(pairs[index][1] * args.scale)),
        )
        for index, arrival in zip(chosen, arrivals, strict=True)
    ]


# ------------------------------------------------------------------------------------------------- on our engine


class Clock:
    """Seconds since the workload began."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._begin

    async def until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - self.now()))


async def answer(engine: AsyncEngine, job: Job, clock: Clock) -> float:
    """Run one request; returns its latency from arrival."""
    params = SamplingParams(temperature=0.0, max_tokens=job.answer_tokens, ignore_eos=True)
    tokens = 0
    async for delta in engine.generate(job.prompt, params):
        tokens = delta.completion_tokens
    assert tokens == job.answer_tokens
    return clock.now() - job.arrival


async def static_batches(engine: AsyncEngine, jobs: list[Job], slots: int, clock: Clock) -> list[float]:
    latencies: list[float] = []
    for begin in range(0, len(jobs), slots):
        batch = jobs[begin : begin + slots]
        await clock.until(batch[-1].arrival)
        latencies += await asyncio.gather(*(answer(engine, job, clock) for job in batch))
    return latencies


async def dynamic_batches(engine: AsyncEngine, jobs: list[Job], slots: int, clock: Clock) -> list[float]:
    latencies: list[float] = []
    waiting = list(jobs)
    while waiting:
        await clock.until(waiting[0].arrival)
        arrived = sum(job.arrival <= clock.now() for job in waiting[:slots])
        batch, waiting = waiting[:arrived], waiting[arrived:]
        latencies += await asyncio.gather(*(answer(engine, job, clock) for job in batch))
    return latencies


async def continuous(engine: AsyncEngine, jobs: list[Job], slots: int, clock: Clock) -> list[float]:
    async def one(job: Job) -> float:
        await clock.until(job.arrival)
        return await answer(engine, job, clock)

    return await asyncio.gather(*(one(job) for job in jobs))


Way = Callable[[AsyncEngine, list[Job], int, Clock], Coroutine[Any, Any, list[float]]]
WAYS: dict[str, Way] = {"static": static_batches, "dynamic": dynamic_batches, "continuous": continuous}


async def settled_steps(engine: AsyncEngine) -> int:
    """The engine's step count once nothing runs (gauges come with a heartbeat)."""
    await asyncio.sleep(0.6)
    return engine.gauges()["steps"]


async def serve_all_ways(args: argparse.Namespace, jobs: list[Job]) -> list[Row]:
    config = EngineConfig(
        model=args.model, device="cpu", max_num_seqs=args.slots, enable_prefix_caching=False, max_model_len=2048
    )
    rows = []
    async with AsyncEngine.start(config) as engine:
        await answer(engine, jobs[0], Clock())  # warm up
        for name, way in WAYS.items():
            before = await settled_steps(engine)
            clock = Clock()
            latencies = await way(engine, jobs, args.slots, clock)
            seconds = clock.now()
            steps = await settled_steps(engine) - before
            rows.append(make_row(name, jobs, latencies, seconds, steps, args.slots))
            print_row(rows[-1])
    return rows


# ------------------------------------------------------------------------------------------------- transformers


def serve_with_transformers(args: argparse.Namespace, jobs: list[Job], batch_size: int) -> Row:
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(resolve_model(args.model).path)
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if where else path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).eval()
    generate_batch(model, jobs[:1])  # warm up
    latencies: list[float] = []
    steps = 0
    clock = Clock()
    for begin in range(0, len(jobs), batch_size):
        batch = jobs[begin : begin + batch_size]
        time.sleep(max(0.0, batch[-1].arrival - clock.now()))
        generate_batch(model, batch)
        steps += max(job.answer_tokens for job in batch)
        latencies += [clock.now() - job.arrival for job in batch]
    name = "transformers, one by one" if batch_size == 1 else "transformers, static"
    return make_row(name, jobs, latencies, clock.now(), steps, batch_size)


def generate_batch(model: Any, batch: list[Job]) -> None:
    """A left-padded batch runs until its longest answer is done, which is what static batching means."""
    import torch

    width = max(len(job.prompt) for job in batch)
    ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in batch])
    mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in batch])
    longest = max(job.answer_tokens for job in batch)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )


# ------------------------------------------------------------------------------------------------------- report


def make_row(name: str, jobs: list[Job], latencies: list[float], seconds: float, steps: int, slots: int) -> Row:
    tokens = sum(job.answer_tokens for job in jobs)
    return Row(
        name,
        tokens / seconds,
        float(np.mean(latencies)),
        float(np.percentile(latencies, 99)),
        tokens / (steps * slots),
    )


def print_row(row: Row) -> None:
    print(
        f"{row.way:<26} {row.tokens_per_s:>9.1f} {row.latency_mean_s:>10.2f} {row.latency_p99_s:>9.2f}"
        f" {100 * row.slot_utilisation:>8.0f} %",
        flush=True,
    )


def draw(rows: list[Row], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("output tokens/s", [row.tokens_per_s for row in rows]),
        ("mean latency, s", [row.latency_mean_s for row in rows]),
        ("p99 latency, s", [row.latency_p99_s for row in rows]),
        ("slot utilisation, %", [100 * row.slot_utilisation for row in rows]),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 3.6), sharey=True)
    colours = ["tab:blue" if row.way == "continuous" else "lightsteelblue" for row in rows]
    for axis, (label, values) in zip(axes, panels, strict=True):
        bars = axis.barh([row.way for row in rows], values, color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=3)
        axis.set_title(label, fontsize=10)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--slots", type=int, default=8, help="rows that may run at once")
    parser.add_argument("--rate", type=float, default=4.0, help="mean arrivals per second")
    parser.add_argument("--scale", type=float, default=0.2, help="factor on ShareGPT's lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--png", type=Path, default=Path("batching.png"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jobs = make_workload(args)
    tokens = sum(job.answer_tokens for job in jobs)
    title = f"{len(jobs)} requests, {tokens} answer tokens, {args.slots} slots, {args.rate:g} arrivals/s"
    print(title)
    print(f"{'way':<26} {'out tok/s':>9} {'mean lat s':>10} {'p99 lat s':>9} {'slots used':>10}")
    rows = asyncio.run(serve_all_ways(args, jobs))
    if not args.no_transformers:
        for batch_size in (1, args.slots):
            rows.append(serve_with_transformers(args, jobs, batch_size))
            print_row(rows[-1])
    draw(rows, args.png, title)
    print(f"picture: {args.png}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    others = [row for row in rows if row.way in ("static", "dynamic")]
    best = next(row for row in rows if row.way == "continuous")
    wins = all(
        best.tokens_per_s >= row.tokens_per_s
        and best.latency_mean_s <= row.latency_mean_s
        and best.latency_p99_s <= row.latency_p99_s
        and best.slot_utilisation >= row.slot_utilisation
        for row in others
    )
    print("continuous batching wins every column" if wins else "continuous batching does not win every column")


if __name__ == "__main__":
    main()
