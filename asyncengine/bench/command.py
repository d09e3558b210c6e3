"""Loads any OpenAI-compatible server through /v1/completions and shows what its clients would see.

    asyncengine bench --url http://127.0.0.1:8000 --requests 1000 --concurrency 256
    asyncengine bench --requests 500 --rate 20 --lengths 512:128 --goodput 200:20
    asyncengine bench --trace trace.jsonl --speed 2 --background 0.5 --json out.json

Closed loop (--concurrency): so many requests are under way at any time. Open loop: requests are sent when due, whatever
the server does; --rate: at random (Poisson); --trace: at the times of a file. Prompts are random token ids, decoding is
greedy and ignores the end of sequence, so lengths are exact. Lengths are those of ShareGPT's conversations, are drawn
like those of Azure's conversation trace (--lengths conversation), are fixed (PROMPT:OUTPUT), or come with the trace:
lines `seconds, prompt tokens, output tokens` as CSV or as JSON arrays, or JSON objects with `timestamp` in ms,
`input_length` and `output_length`; the name may end in .gz.

    TTFT   from before the connection is made to the first output
    TPOT   from first to last output / (output tokens - 1), the tokens as the server's usage counts them: right
           however many tokens come at once; requests of one token have none
    ITL    between two arrivals of output of a stream, whatever number of tokens each brought
    late   how long after its due time a request was sent: this client's fault, so it should be near 0
    within requests of a class whose TTFT and TPOT were within its targets, which are the defaults of `serve`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import msgspec

from asyncengine.config import ServiceClass
from asyncengine.errors import EngineError

MOST_PROCESSES = 8
DRAWN_LENGTHS = ("sharegpt", "conversation")


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(command=bench_command)
    parser.add_argument(
        "--url",
        type=http_url,
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="with or without /v1; http only (default: %(default)s)",
    )
    parser.add_argument("--model", metavar="NAME", help="as the server calls it (default: the first that it names)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the key to send (default: none)")
    parser.add_argument(
        "--requests", type=positive, metavar="N", help="how many to send (default: 100, or all of a trace)"
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--concurrency", type=positive, default=1, metavar="N", help="requests under way at any time (default: 1)"
    )
    way.add_argument("--rate", type=positive_float, metavar="R", help="mean arrivals per second (default: none)")
    way.add_argument("--trace", type=Path, metavar="FILE", help="arrival times and lengths (default: none)")
    parser.add_argument(
        "--speed",
        type=positive_float,
        default=1.0,
        metavar="X",
        help="how many times as fast the trace is played (default: %(default)s)",
    )
    parser.add_argument(
        "--lengths",
        type=lengths,
        default=DRAWN_LENGTHS[0],
        metavar="PROMPT:OUTPUT",
        help="tokens of each request, or sharegpt or conversation for such lengths (default: %(default)s)",
    )
    parser.add_argument(
        "--vocab",
        type=vocabulary,
        default=(1000, 32000),
        metavar="LOW:HIGH",
        help="ids of prompts, HIGH not among them (default: 1000:32000)",
    )
    classes = parser.add_mutually_exclusive_group()
    classes.add_argument(
        "--service-class",
        choices=get_args(ServiceClass),
        help="of all requests; only this project's server knows it (default: what the server takes)",
    )
    classes.add_argument(
        "--background",
        type=share,
        metavar="SHARE",
        help="so many of the requests, drawn from the seed, are of that class, the others interactive (default: none "
        "names a class)",
    )
    parser.add_argument(
        "--goodput",
        type=goal,
        metavar="TTFT_MS:TPOT_MS",
        help="what a good request must keep to, in ms (default: none is counted)",
    )
    parser.add_argument(
        "--processes",
        type=positive,
        default=min(MOST_PROCESSES, max(1, (os.cpu_count() or 1) // 2)),
        metavar="N",
        help="that send the requests (default: half the cores, at most 8)",
    )
    parser.add_argument(
        "--timeout", type=positive_float, default=600.0, metavar="S", help="seconds for one request (default: 600)"
    )
    parser.add_argument(
        "--seed",
        type=natural,
        default=0,
        metavar="N",
        help="of arrivals, prompts and classes; a server may have the prompts of an earlier run with the same in its "
        "prefix cache (default: 0)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar (default: a bar)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")


def bench_command(args: argparse.Namespace) -> int:
    """Returns the exit code: 1 when a request failed. Raises `EngineError`."""
    from asyncengine.bench.load import first_model, load
    from asyncengine.bench.report import print_summary, summarize
    from asyncengine.bench.workload import Load
    from asyncengine.cli import allow_many_connections

    sent = Load(
        trace=str(args.trace) if args.trace else None,
        speed=args.speed,
        requests=args.requests,
        lengths=args.lengths,
        rate=args.rate,
        concurrency=None if args.rate or args.trace else args.concurrency,
        service_class=args.service_class,
        background=args.background,
        seed=args.seed,
    )
    jobs = sent.jobs()
    if not jobs:
        raise EngineError("there is nothing to send")
    if args.json:
        try:
            args.json.open("a").close()  # now, rather than when all has been measured
        except OSError as error:
            raise EngineError(f"cannot write {args.json}: {error.strerror}") from None
    args.model = args.model or first_model(args)
    allow_many_connections()
    records, cpu_share = asyncio.run(load(args, jobs, sent.concurrency))
    summary = {
        "model": args.model,
        "load": msgspec.to_builtins(sent),
        **summarize(records, args.goodput),
        "client_cpu_share": cpu_share,
    }
    print_summary(summary)
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if summary["ok"] == summary["requests"] else 1


# The types of the options; argparse tells their names with what it could not read.


def http_url(text: str) -> str:
    url = urlsplit(text)
    if url.scheme != "http" or not url.hostname:
        raise ValueError
    return text.rstrip("/").removesuffix("/v1")


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def natural(text: str) -> int:
    if int(text) < 0:
        raise ValueError
    return int(text)


def share(text: str) -> float:
    if not 0.0 <= float(text) <= 1.0:
        raise ValueError
    return float(text)


def positive_float(text: str) -> float:
    if not 0.0 < float(text) < float("inf"):
        raise ValueError
    return float(text)


def lengths(text: str) -> str:
    if text not in DRAWN_LENGTHS:
        prompt, output = text.split(":")
        positive(prompt), positive(output)
    return text


def vocabulary(text: str) -> tuple[int, int]:
    low, high = text.split(":")
    if not 0 <= int(low) < int(high):
        raise ValueError
    return int(low), int(high)


def goal(text: str) -> tuple[float, float]:
    first, second = text.split(":")
    return positive_float(first), positive_float(second)
