"""What streams wait between two tokens while a long prompt is prefilled beside them, with the gap target and without.

    python scripts/bench_gap.py --url http://127.0.0.1:8000 [--streams 32] [--prompt 32768] [--json out.json]

For a running server of this project. The streams are of class interactive, whose gap target (50 ms by default) the
server keeps by cutting the prompt into smaller chunks, and then of class background, whose target of 500 ms is as good
as none while a step takes less. The prompt is prefilled twice beside each: the first time the server may not have seen
such steps. With its run directory on this machine (default: that of the newest engine), the steps are told too:

    gap      between two arrivals of output of a stream, from sending the prompt to its first token
    TTFT     of the prompt
    steps    with a part of the prompt, and the median of its tokens in each: fewer where it was cut
    device   how long those steps took on the device
    off      how far the server's predictions of the latest steps' times were off, relative; after the run
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from watch_step_time import step_time_error

from asyncengine.bench.command import vocabulary
from asyncengine.client import AsyncClient
from asyncengine.config import ServiceClass
from asyncengine.errors import EngineError
from asyncengine.run_dir import in_use
from asyncengine.sampling import SamplingParams
from asyncengine.wire.accounting import SUFFIX, RingReader, StepRecord

CLASSES: tuple[ServiceClass, ...] = ("interactive", "background")
RUNS = 2
SETTLED_TOKENS = 8
"""Of each stream, before the prompt is sent."""
STREAM_SECONDS = 300.0


class Streams:
    """Answers that go on until they are stopped; `arrivals` in s of the monotonic clock, by stream."""

    def __init__(self, client: AsyncClient, prompts: list[list[int]], service_class: ServiceClass, tokens: int) -> None:
        self.arrivals: list[list[float]] = [[] for _ in prompts]
        self._settled = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._read(client, prompt, place, service_class, tokens))
            for place, prompt in enumerate(prompts)
        ]

    async def _read(
        self, client: AsyncClient, prompt: list[int], place: int, service_class: ServiceClass, tokens: int
    ) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        async for _ in client.generate(prompt, params, service_class=service_class):
            self.arrivals[place].append(time.monotonic())
            if all(len(times) >= SETTLED_TOKENS for times in self.arrivals):
                self._settled.set()

    async def settled(self) -> None:
        """Raises EngineError when a stream ends before."""
        all_run = asyncio.create_task(self._settled.wait())
        async with asyncio.timeout(STREAM_SECONDS):
            await asyncio.wait([all_run, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        if not all_run.done():
            all_run.cancel()
            raise EngineError("a stream ended before all of them ran")

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Those that ended within that time, or would not have ended before its end."""
        gaps = []
        for times in self.arrivals:
            for before, after in itertools.pairwise(times):
                if begin <= after and before <= end:
                    gaps.append(1e3 * (after - before))
        return gaps


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rng = np.random.default_rng(args.seed)
    low, high = args.vocab

    def prompt(tokens: int) -> list[int]:
        ids: list[int] = rng.integers(low, high, tokens).tolist()
        return ids

    rows = []
    async with AsyncClient(args.url) as client:
        for service_class in CLASSES:
            prompts = [prompt(args.stream_prompt) for _ in range(args.streams)]
            streams = Streams(client, prompts, service_class, args.stream_tokens)
            try:
                await streams.settled()
                for run in range(RUNS):
                    rows.append(await one(client, streams, prompt(args.prompt), service_class, run, args))
                    print(line(rows[-1]), flush=True)
            finally:
                await streams.stop()
    return rows


async def one(
    client: AsyncClient,
    streams: Streams,
    prompt: list[int],
    service_class: ServiceClass,
    run: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    begin = time.monotonic()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    async with asyncio.timeout(args.limit):
        async for _ in client.generate(prompt, params, service_class=service_class):
            pass
    end = time.monotonic()
    gaps = streams.gaps_ms(begin, end) or [float("nan")]
    return {
        "class": service_class,
        "run": run + 1,
        "streams": len(streams.arrivals),
        "prompt": len(prompt),
        "ttft_ms": 1e3 * (end - begin),
        "gap_ms": {"p50": float(np.percentile(gaps, 50)), "p99": float(np.percentile(gaps, 99)), "max": max(gaps)},
        "error": await asyncio.to_thread(step_time_error, args.url),
        **steps_within(args.run_dir, begin, end),
    }


def steps_within(run_dir: Path | None, begin: float, end: float) -> dict[str, Any]:
    """Of the ring of accounts; nothing where there is none."""
    if run_dir is None:
        return {}
    with contextlib.suppress(EngineError, OSError):
        ring = RingReader(run_dir / f"gpu_runner.0{SUFFIX}", StepRecord)
        records = [record for record in ring.snapshot() if begin <= record.launch / 1e9 <= end]
        ring.close()
        launched = {record.step: record for record in records if record.prefill_tokens}
        took = [(record.device_end - record.device_begin) / 1e6 for record in records if record.collected in launched]
        if took:
            return {
                "steps": len(launched),
                "chunk": float(np.median([record.prefill_tokens for record in launched.values()])),
                "device_ms": {"p50": float(np.median(took)), "max": max(took)},
            }
    return {}


COLUMNS = ("run", "gap p50 ms", "p99", "max", "TTFT ms", "steps", "chunk", "device ms", "max", "off")


def cells(row: dict[str, Any]) -> list[str]:
    """As `COLUMNS`."""
    device = row.get("device_ms", {})
    return [
        *(str(row["run"]), *(f"{row['gap_ms'][mark]:.1f}" for mark in ("p50", "p99", "max")), f"{row['ttft_ms']:.0f}"),
        *(str(row.get("steps", "-")), f"{row['chunk']:.0f}" if "chunk" in row else "-"),
        *(f"{device[mark]:.1f}" if device else "-" for mark in ("p50", "max")),
        f"{100 * row['error']:.1f} %",
    ]


def line(row: dict[str, Any]) -> str:
    return f"{row['class']:<12}" + "".join(f"{cell:>11}" for cell in cells(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--stream-prompt", type=int, default=128, help="tokens of each stream's prompt")
    parser.add_argument("--stream-tokens", type=int, default=4096, help="most tokens of each stream's answer")
    parser.add_argument("--prompt", type=int, default=32768, help="tokens of the long prompt")
    parser.add_argument("--vocab", type=vocabulary, default=(1000, 32000), help="ids of prompts, LOW:HIGH")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=120.0, help="most seconds of a prompt")
    parser.add_argument("--run-dir", type=Path, help="the engine's (default: that of the newest running engine)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.run_dir is None:
        args.run_dir = next(iter(in_use(Path(tempfile.gettempdir()))), None)
    print(f"{args.streams} streams beside a prompt of {args.prompt}")
    print(f"{'class':<12}" + "".join(f"{name:>11}" for name in COLUMNS))
    rows = asyncio.run(measure(args))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
