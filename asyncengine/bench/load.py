"""Runs a load: client processes that start together, and the records they send back."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from urllib.parse import urlsplit

import msgspec
import tqdm

from asyncengine.bench.records import Done, Job, Line, Ready, Record, Task
from asyncengine.errors import EngineError

LINE_BYTES = 1 << 26
RECORD_BEGINS = b'{"type":"Record"'
BEFORE_START_S = 0.1
"""Between the word to start and the start: every process has heard it by then."""


async def load(args: argparse.Namespace, jobs: list[Job], concurrency: int | None) -> tuple[list[Record], float]:
    """Every request's record, and the largest share of a core that a client process used. concurrency: as in `Task`."""
    processes = min(args.processes, len(jobs), concurrency or len(jobs))
    url = urlsplit(args.url)
    tasks = [
        Task(
            host=url.hostname or "127.0.0.1",
            port=url.port or 80,
            path=f"{url.path}/v1/completions",
            headers=api_key_header(args),
            model=args.model,
            jobs=share,
            concurrency=lanes,
            vocab=args.vocab,
            seed=args.seed,
            timeout_s=args.timeout,
        )
        for share, lanes in split(jobs, concurrency, processes)
    ]
    ready = asyncio.Barrier(processes)
    start: list[float] = []
    with tqdm.tqdm(total=len(jobs), unit="req", smoothing=0.1, disable=args.quiet) as bar:
        results = await asyncio.gather(*(_run_worker(task, ready, start, bar) for task in tasks))
    records = [record for lines in results for record in lines if isinstance(record, Record)]
    return records, max(line.cpu_share for lines in results for line in lines if isinstance(line, Done))


async def _run_worker(task: Task, ready: asyncio.Barrier, start: list[float], bar: tqdm.tqdm) -> list[Line]:
    """What a client process wrote. Lines are decoded when all are there: until then they only move the bar."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "asyncengine.bench.load_worker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        if not await process.stdout.readline():
            raise EngineError("a client process died while preparing its requests")
        await ready.wait()
        if not start:
            start.append(time.monotonic() + BEFORE_START_S)
        process.stdin.write(f"{start[0]!r}\n".encode())
        lines = []
        async for line in process.stdout:
            lines.append(line)
            bar.update(line.startswith(RECORD_BEGINS))
        if await process.wait() != 0:
            raise EngineError("a client process died")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    decoder = msgspec.json.Decoder(Ready | Record | Done)
    return [decoder.decode(line) for line in lines]


def api_key_header(args: argparse.Namespace) -> dict[str, str]:
    """Raises `EngineError`."""
    if not args.api_key_file:
        return {}
    try:
        return {"Authorization": f"Bearer {args.api_key_file.read_text('ascii').strip()}"}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise EngineError(f"cannot read the API key in {args.api_key_file}: {reason}") from None


def first_model(args: argparse.Namespace) -> str:
    """Raises `EngineError`."""
    request = urllib.request.Request(f"{args.url}/v1/models", headers=api_key_header(args))
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            name: str = json.load(response)["data"][0]["id"]
            return name
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise EngineError(f"{args.url} does not tell its models: {reason}") from None
    except (ValueError, LookupError, TypeError, HTTPException):
        raise EngineError(f"{args.url} does not tell its models: its answer is not a list of them") from None


def split(jobs: Sequence[Job], concurrency: int | None, processes: int) -> list[tuple[list[Job], int | None]]:
    """Jobs and concurrency of each process: every `processes`-th job, and an even share of the requests at once."""
    return [
        (
            list(jobs[index::processes]),
            None if concurrency is None else (concurrency + processes - 1 - index) // processes,
        )
        for index in range(processes)
    ]
