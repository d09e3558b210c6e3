"""Loads any OpenAI-compatible server through /v1/completions and shows what its clients would see.

    python scripts/bench_serving.py --url http://127.0.0.1:8000 --requests 1000 --concurrency 256
    python scripts/bench_serving.py --requests 500 --rate 20 --lengths 512:128 --goodput 200:20
    python scripts/bench_serving.py --trace trace.jsonl --speed 2 --json out.json

Closed loop (--concurrency): so many requests are under way at any time. Open loop: requests are sent when due, whatever
the server does; --rate: at random (Poisson); --trace: at the times of a file. Prompts are random token ids, decoding is
greedy and ignores the end of sequence, so lengths are exact. Lengths come from scripts/data/sharegpt_lens.json, are
fixed (--lengths PROMPT:OUTPUT), or come with the trace: lines `seconds, prompt tokens, output tokens` as CSV or as JSON
arrays, or JSON objects with `timestamp` in ms, `input_length` and `output_length`; the name may end in .gz.

    TTFT   from before the connection is made to the first output
    TPOT   from first to last output / (output tokens - 1), the tokens as the server's usage counts them: right
           however many tokens come at once; requests of one token have none
    ITL    between two arrivals of output of a stream, whatever number of tokens each brought
    late   how long after its due time a request was sent: this client's fault, so it should be near 0
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import tqdm
from load_worker import Done, Job, Line, Ready, Record, Task, split
from load_workload import make_jobs, read_trace

from asyncengine.cli import allow_many_connections

MOST_PROCESSES = 8
LINE_BYTES = 1 << 26
RECORD_BEGINS = b'{"type":"Record"'
BEFORE_START_S = 0.1
"""Between the word to start and the start: every process has heard it by then."""
PERCENTILES = (50, 90, 99)


# -------------------------------------------------------------------------------------------------------------- running


async def load(args: argparse.Namespace, jobs: list[Job]) -> tuple[list[Record], float]:
    """Every request's record, and the largest share of a core that a client process used."""
    concurrency = args.concurrency if not (args.rate or args.trace) else None
    processes = min(args.processes, len(jobs), concurrency or len(jobs))
    url = urlsplit(args.url)
    headers = api_key_header(args)
    tasks = [
        Task(
            host=url.hostname or "127.0.0.1",
            port=url.port or 80,
            path=f"{url.path.rstrip('/')}/v1/completions",
            headers=headers,
            model=args.model,
            jobs=share,
            concurrency=lanes,
            vocab=args.vocab,
            seed=args.seed,
            timeout_s=args.timeout,
        )
        for share, lanes in split(jobs, concurrency, processes)
    ]
    bar = tqdm.tqdm(total=len(jobs), unit="req", smoothing=0.1, disable=args.quiet)
    ready = asyncio.Barrier(processes)
    start: list[float] = []
    results = await asyncio.gather(*(_run_worker(task, ready, start, bar) for task in tasks))
    bar.close()
    records = [record for lines in results for record in lines if isinstance(record, Record)]
    return records, max(line.cpu_share for lines in results for line in lines if isinstance(line, Done))


async def _run_worker(task: Task, ready: asyncio.Barrier, start: list[float], bar: tqdm.tqdm) -> list[Line]:
    """What a client process wrote. Lines are decoded when all are there: until then they only move the bar."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(__file__).with_name("load_worker.py"))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        if not await process.stdout.readline():
            raise SystemExit("a client process died while preparing its requests")
        await ready.wait()
        if not start:
            start.append(time.monotonic() + BEFORE_START_S)
        process.stdin.write(f"{start[0]!r}\n".encode())
        lines = []
        async for line in process.stdout:
            lines.append(line)
            bar.update(line.startswith(RECORD_BEGINS))
        if await process.wait() != 0:
            raise SystemExit("a client process died")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    decoder = msgspec.json.Decoder(Ready | Record | Done)
    return [decoder.decode(line) for line in lines]


def api_key_header(args: argparse.Namespace) -> dict[str, str]:
    return {"Authorization": f"Bearer {args.api_key_file.read_text().strip()}"} if args.api_key_file else {}


def first_model(args: argparse.Namespace) -> str:
    request = urllib.request.Request(f"{args.url.rstrip('/')}/v1/models", headers=api_key_header(args))
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            name: str = json.load(response)["data"][0]["id"]
            return name
    except urllib.error.URLError as error:
        raise SystemExit(f"{args.url} does not tell its models: {error.reason}") from None


# --------------------------------------------------------------------------------------------------------------- report


def summarize(records: Sequence[Record], goodput: tuple[float, float] | None = None) -> dict[str, Any]:
    """All the numbers. goodput: the longest TTFT and TPOT of a request that counts as good, in ms."""
    good = [record for record in records if record.status == "ok"]
    seconds = max((record.end_s for record in records), default=0.0) or float("nan")
    output_tokens = sum(record.output_tokens for record in good)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    latencies = {
        "ttft_ms": [ttft_ms(record) for record in good],
        "tpot_ms": [tpot_ms(record) for record in good if record.output_tokens > 1],
        "itl_ms": [gap / 1e3 for record in good for gap in record.gaps_us],
        "e2e_ms": [1e3 * (record.end_s - record.sent_s) for record in good],
        "late_ms": [1e3 * (record.sent_s - record.due_s) for record in records if record.due_s is not None],
    }
    summary: dict[str, Any] = {
        "requests": len(records),
        "ok": len(good),
        "failures": dict(Counter(record.status for record in records if record.status != "ok")),
        "failure_details": {record.status: record.detail for record in reversed(records) if record.detail},
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / seconds,
        "prompt_tokens_per_s": prompt_tokens / seconds,
        **{name: spread(values) for name, values in latencies.items() if values},
    }
    if goodput is not None:
        met = sum(
            ttft_ms(record) <= goodput[0] and (record.output_tokens < 2 or tpot_ms(record) <= goodput[1])
            for record in good
        )
        summary["goodput"] = {"ttft_ms": goodput[0], "tpot_ms": goodput[1], "met": met, "per_s": met / seconds}
    return summary


def ttft_ms(record: Record) -> float:
    return 1e3 * ((record.end_s if record.first_s is None else record.first_s) - record.sent_s)


def tpot_ms(record: Record) -> float:
    return 1e3 * ((record.last_s or 0.0) - (record.first_s or 0.0)) / (record.output_tokens - 1)


def spread(values: Sequence[float]) -> dict[str, float]:
    marks = np.percentile(values, PERCENTILES)
    named = {f"p{percent}": float(mark) for percent, mark in zip(PERCENTILES, marks, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(np.max(values))}


def print_summary(summary: dict[str, Any]) -> None:
    print(f"{summary['ok']} of {summary['requests']} requests ok in {summary['seconds']:.2f} s")
    for status, count in sorted(summary["failures"].items()):
        detail = summary["failure_details"].get(status)
        print(f"  failed: {count:>6} x {status}{f', such as: {detail}' if detail else ''}")
    if not summary["ok"]:
        return
    print(
        f"{summary['requests_per_s']:,.2f} requests/s   {summary['output_tokens_per_s']:,.1f} output tokens/s   "
        f"{summary['prompt_tokens_per_s']:,.1f} prompt tokens/s"
    )
    if goal := summary.get("goodput"):
        share = goal["met"] / max(1, summary["requests"])
        print(
            f"goodput {goal['per_s']:,.2f} requests/s: {100 * share:.1f} % had TTFT <= {goal['ttft_ms']:g} ms and "
            f"TPOT <= {goal['tpot_ms']:g} ms"
        )
    columns = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    print(f"{'ms':<12}" + "".join(f"{name:>11}" for name in columns))
    names = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "end to end", "late_ms": "late"}
    for key, name in names.items():
        if key in summary:
            print(f"{name:<12}" + "".join(f"{summary[key][column]:>11.2f}" for column in columns))
    if (share := summary.get("client_cpu_share", 0.0)) > 0.0:
        print(f"the busiest client process used {100 * share:.0f} % of a core")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    def pair(text: str) -> tuple[float, float]:
        first, second = text.split(":")
        return float(first), float(second)

    def vocabulary(text: str) -> tuple[int, int]:
        low, high = text.split(":")
        return int(low), int(high)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="without /v1; http only (default: %(default)s)")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE")
    parser.add_argument("--requests", type=int, help="default: 100, or all of a trace")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--concurrency", type=int, default=1, help="requests under way at any time (default: 1)")
    way.add_argument("--rate", type=float, help="mean arrivals per second")
    way.add_argument("--trace", type=Path, metavar="FILE", help="arrival times and lengths")
    parser.add_argument("--speed", type=float, default=1.0, help="how many times as fast the trace is played")
    parser.add_argument("--lengths", default="sharegpt", help="sharegpt or PROMPT:OUTPUT (default: %(default)s)")
    parser.add_argument("--vocab", type=vocabulary, default=(1000, 32000), metavar="LOW:HIGH", help="ids of prompts")
    parser.add_argument("--goodput", type=pair, metavar="TTFT_MS:TPOT_MS", help="what a good request must keep to")
    parser.add_argument("--processes", type=int, default=min(MOST_PROCESSES, max(1, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    return parser.parse_args(argv)


def main() -> int:
    args = parse_args()
    args.model = args.model or first_model(args)
    if args.trace:
        jobs = read_trace(args.trace, limit=args.requests, speed=args.speed)
    else:
        jobs = make_jobs(args.requests or 100, lengths=args.lengths, rate=args.rate, seed=args.seed)
    if not jobs:
        raise SystemExit("there is nothing to send")
    allow_many_connections()
    records, cpu_share = asyncio.run(load(args, jobs))
    summary = {"model": args.model, **summarize(records, args.goodput), "client_cpu_share": cpu_share}
    print_summary(summary)
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if summary["ok"] == summary["requests"] else 1


if __name__ == "__main__":
    sys.exit(main())
