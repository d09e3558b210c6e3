"""Request traces: when requests come, how long they are, and which begin alike."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from asyncengine.bench.records import Job
from asyncengine.bench.workload import make_jobs, read_trace
from asyncengine.config import PAGE_SIZE
from asyncengine.terms import DEFAULT_TERMS, Terms
from gpu_runner.schedule.plan import Int32

HASHED_TOKENS = 512
"""Tokens of one `hash_ids` entry of a Mooncake trace."""
OUTPUT_IDS = 1 << 30
"""Ids from here on are of answers, so that no prompt continues with one by chance."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """at_ns: after the trace's begin. blocks: ids of the runs of `block_tokens` tokens that the prompt consists of, the
    last of them cut; none where it shares nothing with any other, and has the ids from `first_id` on."""

    index: int
    at_ns: int
    prompt_tokens: int
    output_tokens: int
    first_id: int = 0
    blocks: tuple[int, ...] = ()
    block_tokens: int = HASHED_TOKENS
    priority: int = 0
    terms: Terms = DEFAULT_TERMS

    def prompt(self) -> Int32:
        """Token ids [prompt_tokens]: equal blocks have equal ids."""
        if not self.blocks:
            return np.arange(self.first_id, self.first_id + self.prompt_tokens, dtype=np.int32)
        firsts = np.array(self.blocks, np.int32) * np.int32(self.block_tokens)
        ids: Int32 = np.add.outer(firsts, np.arange(self.block_tokens, dtype=np.int32)).ravel()
        return ids[: self.prompt_tokens]


def load_trace(source: str, *, limit: int | None = None, length_scale: float = 1.0) -> list[TraceRequest]:
    """The first `limit` requests, in order of time, the first at 0.

    source: a file that `asyncengine bench --trace` reads (Azure's CSV, JSON lines), Mooncake's JSON lines with
    `hash_ids`, plain or .gz; "sharegpt": 2000 pairs of lengths over and over, all at 0; or "tenants": tenant "a" has
    200 requests at once, tenant "b" 60, one a second, all of 8000 tokens with answers of 100.
    length_scale: prompts, answers and shared blocks are so much longer. Raises ValueError or OSError.
    """
    hashed: list[tuple[int, ...]] = []
    names: list[str] = []
    if source == "sharegpt":
        jobs = make_jobs(limit or 2000, lengths="sharegpt", rate=None, seed=0)
    elif source == "tenants":
        jobs = [Job(at, 0.0, 8000, 100) for at in range(200)] + [
            Job(200 + at, float(at), 8000, 100) for at in range(60)
        ]
        jobs = jobs[:limit]
        names = ["a"] * 200 + ["b"] * 60
    else:
        path = Path(source)
        jobs = read_trace(path, limit=limit)
        hashed = _hash_ids(path)[:limit]
    if not jobs:
        raise ValueError(f"{source} has no requests")
    block_tokens = max(1, round(HASHED_TOKENS * length_scale))
    requests: list[TraceRequest] = []
    next_id = 0
    for job in jobs:
        prompt, output = (max(1, round(length_scale * n)) for n in (job.prompt_tokens, job.output_tokens))
        blocks = hashed[job.index] if hashed else ()
        if blocks:
            prompt = min(prompt, len(blocks) * block_tokens)
            if max(blocks) >= OUTPUT_IDS // block_tokens:
                raise ValueError(f"hash_ids must be below {OUTPUT_IDS // block_tokens}, got {max(blocks)}")
        elif next_id + prompt > OUTPUT_IDS:
            next_id = 0  # after a billion tokens, of which nothing is cached any more
        at_ns = round(1e9 * job.at_s)
        terms = Terms(tenant=names[job.index]) if names else DEFAULT_TERMS
        requests.append(TraceRequest(job.index, at_ns, prompt, output, next_id, blocks, block_tokens, terms=terms))
        next_id += prompt
    return requests


def from_jobs(jobs: Sequence[Job]) -> list[TraceRequest]:
    """What `asyncengine bench` sends: prompts that share nothing."""
    requests: list[TraceRequest] = []
    next_id = 0
    for job in jobs:
        terms = Terms(service_class=job.service_class) if job.service_class else DEFAULT_TERMS
        at_ns = round(1e9 * job.at_s)
        requests.append(TraceRequest(job.index, at_ns, job.prompt_tokens, job.output_tokens, next_id, terms=terms))
        next_id = (next_id + job.prompt_tokens) % (OUTPUT_IDS // 2)
    return requests


def scaled(requests: Sequence[TraceRequest], scale: float) -> list[TraceRequest]:
    """All times times `scale`; 0: all at once."""
    return [replace(request, at_ns=round(scale * request.at_ns)) for request in requests]


def with_urgent(requests: Sequence[TraceRequest], share: float, seed: int) -> list[TraceRequest]:
    """A `share` of them, drawn from `seed`, has priority 0, the others 1."""
    urgent = np.random.default_rng(seed).random(len(requests)) < share
    return [
        replace(request, priority=0 if first else 1) for request, first in zip(requests, urgent.tolist(), strict=True)
    ]


def endless_cache_hits(requests: Sequence[TraceRequest]) -> int:
    """Prompt tokens that a cache which forgets nothing would have had when each request came, in whole pages, at least
    one token of each prompt left to compute."""
    seen: dict[int, int] = {}  # block -> its tokens that came already
    hits = 0
    for request in requests:
        common = 0
        left = request.prompt_tokens
        shared = True
        for block in request.blocks:
            here = min(left, request.block_tokens)
            before = seen.get(block, 0)
            if shared:
                common += min(here, before)
                shared = before >= here == request.block_tokens
            seen[block] = max(before, here)
            left -= here
        hits += min(common, request.prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE
    return hits


def _hash_ids(path: Path) -> list[tuple[int, ...]]:
    """Of each request in the order of `read_trace`; empty where the file has none."""
    if not {".json", ".jsonl"} & set(path.suffixes):
        return []
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    if not all(isinstance(row, dict) and "hash_ids" in row for row in rows):
        return []
    rows.sort(key=lambda row: (row["timestamp"] / 1000, max(1, row["input_length"]), max(1, row["output_length"])))
    return [tuple(row["hash_ids"]) for row in rows]
