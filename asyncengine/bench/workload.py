"""What `asyncengine bench` sends and when: drawn lengths and arrivals, or a trace file's."""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncengine.bench.records import Job
from asyncengine.config import ServiceClass
from asyncengine.errors import EngineError

LENGTHS = Path(__file__).with_name("sharegpt_lens.json")
"""2000 pairs [prompt tokens, answer tokens] (mean 110 / 276): the lengths of ShareGPT conversations that the usual
serving benchmarks take. Only lengths, no text; released with this project (Apache-2.0)."""

CONVERSATION_LOG = ((6.633, 0.985, 7000), (5.019, 0.859, 1000))
"""Of prompts and answers: mean and deviation of the logarithm of the tokens, and the most there are. Those of Azure's
conversation trace of 2023 (mean 1155 / 211)."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent and when; the same load has the same requests, of the same classes. requests: None for 100, or all
    of a trace. background: share of the requests that are of that class, the others interactive."""

    trace: str | None = None
    speed: float = 1.0
    requests: int | None = None
    lengths: str = "sharegpt"
    rate: float | None = None
    concurrency: int | None = None
    service_class: ServiceClass | None = None
    background: float | None = None
    seed: int = 0

    def jobs(self) -> list[Job]:
        """Raises `EngineError` for a trace that cannot be read."""
        if self.trace:
            try:
                jobs = read_trace(Path(self.trace), limit=self.requests, speed=self.speed)
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = error.strerror if isinstance(error, OSError) else repr(error)
                raise EngineError(f"{self.trace} cannot be read as a trace: {reason}") from error
        else:
            jobs = make_jobs(self.requests or 100, lengths=self.lengths, rate=self.rate, seed=self.seed)
        if self.background is not None:
            drawn = background_requests(len(jobs), self.background, self.seed)
            return [
                msgspec.structs.replace(job, service_class="background" if late else "interactive")
                for job, late in zip(jobs, drawn, strict=True)
            ]
        if self.service_class:
            return [msgspec.structs.replace(job, service_class=self.service_class) for job in jobs]
        return jobs


def prompt_ids(job: Job, seed: int, vocab: tuple[int, int]) -> list[int]:
    """From the first of `vocab` to below the second, the same for the same seed and place in the load."""
    return random.Random(f"{seed} {job.index}").choices(range(*vocab), k=job.prompt_tokens)


def background_requests(count: int, share: float, seed: int) -> list[bool]:
    """Which of `count` requests are of class background."""
    drawn: list[bool] = (np.random.default_rng((seed, 1)).random(count) < share).tolist()
    return drawn


def make_jobs(count: int, *, lengths: str, rate: float | None, seed: int) -> list[Job]:
    """lengths: "sharegpt", whose pairs are taken in order and over again, "conversation", drawn like those of Azure's
    trace, or PROMPT:OUTPUT in tokens. rate: mean arrivals per second of a Poisson process; None: all are due at
    once."""
    if lengths == "sharegpt":
        pairs = json.loads(LENGTHS.read_text())
    elif lengths == "conversation":
        pairs = _conversation_lengths(count, seed)
    else:
        pairs = [[int(tokens) for tokens in lengths.split(":")]]
    rng = random.Random(seed)
    jobs, at = [], 0.0
    for index in range(count):
        at += rng.expovariate(rate) if rate else 0.0
        prompt, output = pairs[index % len(pairs)]
        jobs.append(Job(index, at, prompt, output))
    return jobs


def _conversation_lengths(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(f"{seed} lengths")
    return [
        [min(most, max(1, round(math.exp(rng.gauss(mean, deviation))))) for mean, deviation, most in CONVERSATION_LOG]
        for _ in range(count)
    ]


def read_trace(path: Path, *, limit: int | None = None, speed: float = 1.0) -> list[Job]:
    """The first `limit` requests of a trace in the order of their times, the first due at 0.

    Lines are `seconds or date and time, prompt tokens, output tokens` as CSV (a heading is skipped) or as JSON arrays,
    or JSON objects with `timestamp` in ms, `input_length` and `output_length`; a name ending in .gz is unpacked. speed:
    times are divided by it. Raises ValueError or KeyError for a line that is none of these.
    """
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()
    if {".json", ".jsonl"} & set(path.suffixes):
        rows = [_json_row(json.loads(line)) for line in lines if line.strip()]
    else:
        rows = [_csv_row(row) for row in csv.reader(lines) if row and row[0][:1].isdigit()]
    rows = sorted(rows)[:limit]
    return [Job(index, (at - rows[0][0]) / speed, prompt, output) for index, (at, prompt, output) in enumerate(rows)]


def _json_row(row: Any) -> tuple[float, int, int]:
    if isinstance(row, dict):
        return row["timestamp"] / 1000, max(1, row["input_length"]), max(1, row["output_length"])
    seconds, prompt, output = row
    return float(seconds), max(1, int(prompt)), max(1, int(output))


def _csv_row(row: Sequence[str]) -> tuple[float, int, int]:
    moment, prompt, output = row
    try:
        seconds = float(moment)
    except ValueError:
        seconds = datetime.fromisoformat(moment[:26]).timestamp()  # no more than microseconds can be read
    return seconds, max(1, int(prompt)), max(1, int(output))
