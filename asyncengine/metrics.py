"""What the requests of an engine amounted to, counted in memory that all its API processes share.

Each process that takes requests writes one block of numbers, `engine.{w}.metrics` in the run directory, and whichever
of them is asked adds up the blocks of all: the numbers of a server with several API processes are those of the engine,
whoever answers. Where they have a parent it holds their blocks, so that what a lost one has counted stays counted, and
its successor goes on in the same block. A counter is one number; a histogram is one for each bucket, one for what is
above the last, and the sum. All are doubles that only ever grow, so that adding them up while they are written is at
most a moment behind.

Behind them there is a table of tenants (see `asyncengine.tenant_table`).

Counting costs a choice's tokens nothing each: a frame of deltas is counted as a whole, and only the first
and the last token of a choice cost something of their own.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import get_args

import msgspec

from asyncengine.config import ServiceClass
from asyncengine.request_terms import Target
from asyncengine.tenant_table import TABLE_BYTES, TenantTable, TenantTokens, read_tenants
from asyncengine.terms import DEFAULT_TERMS, Terms
from asyncengine.timeline import Timeline
from asyncengine.wire.shared_memory import make_memory, publish

SUFFIX = ".metrics"
NS = 1e-9

FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_COUNT_BOUNDS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
CHOICE_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)

FINISH_REASONS = ("stop", "length", "abort", "error")
SERVICE_CLASSES: tuple[ServiceClass, ...] = get_args(ServiceClass)
COUNTERS = (
    *("prompt_tokens", "generation_tokens", *(f"finished_{reason}" for reason in FINISH_REASONS), "gc_pause_ns"),
    *(f"{what}_{name}" for what in ("measured", "within_ttft", "within_gap") for name in SERVICE_CLASSES),
)
HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "time_to_first_token": FIRST_TOKEN_BOUNDS,
    "inter_token_latency": TOKEN_GAP_BOUNDS,
    "time_per_output_token": TOKEN_GAP_BOUNDS,
    "e2e_latency": REQUEST_BOUNDS,
    "tokenize_time": REQUEST_BOUNDS,
    "queue_time": REQUEST_BOUNDS,
    "prefill_time": REQUEST_BOUNDS,
    "decode_time": REQUEST_BOUNDS,
    "inference_time": REQUEST_BOUNDS,
    "prompt_length": TOKEN_COUNT_BOUNDS,
    "output_length": TOKEN_COUNT_BOUNDS,
    "choices": CHOICE_BOUNDS,
}
_CELLS_OF_HISTOGRAMS = [len(bounds) + 2 for bounds in HISTOGRAMS.values()]
_NUM_CELLS = len(COUNTERS) + sum(_CELLS_OF_HISTOGRAMS)
_PLACE = {name: place for place, name in enumerate(COUNTERS)} | dict(
    zip(HISTOGRAMS, accumulate(_CELLS_OF_HISTOGRAMS[:-1], initial=len(COUNTERS)), strict=True)
)
"""Of each counter, and of each histogram's first cell."""
_SIZE_OF_CELLS = 8 * _NUM_CELLS
SIZE = _SIZE_OF_CELLS + TABLE_BYTES


class HistogramTotals(msgspec.Struct, frozen=True):
    """counts: observations by bucket, the last one above all bounds. total: the observed values' sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Totals(msgspec.Struct, frozen=True):
    """By the names of `COUNTERS` and `HISTOGRAMS`, and by tenant, since the engine's start."""

    counters: dict[str, int]
    histograms: dict[str, HistogramTotals]
    tenants: dict[str, TenantTokens] = {}


def make_block(run_dir: Path, worker: int) -> int:
    """The descriptor of a block of zeros for API process `worker`. Raises OSError where there is no memory for it."""
    path = run_dir / f"engine.{worker}{SUFFIX}"
    fd, memory = make_memory(path, SIZE)
    memory.close()
    publish(fd, path)
    return fd


class RequestMetrics:
    """The block of API process `worker`. Raises OSError where there is no memory for it.

    Every choice is counted once when its first token is here and once when it ends, in whatever way, but not if it
    ends with its process.
    """

    def __init__(
        self, run_dir: Path, worker: int, targets: Mapping[ServiceClass, Target], *, fd: int | None = None
    ) -> None:
        """targets: what requests of each class should keep to. fd: of a block that there is; it is closed with this."""
        self._targets = targets
        self._fd = make_block(run_dir, worker) if fd is None else fd
        self._memory = mmap.mmap(self._fd, SIZE)
        self._cells = memoryview(self._memory)[:_SIZE_OF_CELLS].cast("d")
        self._tenants = TenantTable(memoryview(self._memory)[_SIZE_OF_CELLS:])

    def close(self) -> None:
        """Give the memory up. A block goes with the last process that has it open."""
        self._cells.release()
        self._tenants.close()
        self._memory.close()
        os.close(self._fd)

    def submitted(self, choices: int) -> None:
        """A request of so many choices has been sent on its way."""
        self._observe("choices", choices)

    def encoded(self, seconds: float) -> None:
        """A request's prompt has left the tokenizer, so long after it was submitted."""
        self._observe("tokenize_time", seconds)

    def begun(self, timeline: Timeline, *, prompt_tokens: int, tenant: str = "") -> None:
        """A choice's first token is here."""
        self.prompted(prompt_tokens, tenant=tenant)
        self._observe("time_to_first_token", (timeline.seen - timeline.arrived) * NS)

    def prompted(self, prompt_tokens: int, *, tenant: str = "") -> None:
        """A choice's prompt has been computed."""
        self._count("prompt_tokens", prompt_tokens)
        self._tenants.count(tenant, prompt=prompt_tokens)
        self._observe("prompt_length", prompt_tokens)

    def frame(self, now: int, last_seen: Iterable[int], *, tokens: int) -> None:
        """A frame with `tokens` new tokens arrived at `now`. last_seen: of each choice that has news, when it had news
        before, 0 if never. All that came with the same frame before have waited alike, so they are counted at once."""
        self._count("generation_tokens", tokens)
        for before, choices in Counter(last_seen).items():
            if before:
                self._observe("inter_token_latency", (now - before) * NS, choices)

    def ended(self, reason: str, timeline: Timeline, *, tokens: int, terms: Terms = DEFAULT_TERMS) -> None:
        """A choice is over, having had `tokens`; reason: one of `FINISH_REASONS`."""
        self._tenants.count(terms.tenant, output=tokens)
        if tokens and reason in ("stop", "length"):
            self._measure(timeline, tokens, terms.service_class)
        self._count(f"finished_{reason}")
        self._observe("e2e_latency", (timeline.finished - timeline.arrived) * NS)
        self._observe("output_length", tokens)
        if tokens > 1 and reason != "abort":
            self._observe("time_per_output_token", (timeline.finished - timeline.seen) * NS / (tokens - 1))
        if timeline.computed:
            # decode's end is when the last token is here, and gpu_runner had it a moment before
            self._observe("queue_time", (timeline.started - timeline.queued) * NS)
            self._observe("prefill_time", (timeline.computed - timeline.started) * NS)
            self._observe("decode_time", (timeline.finished - timeline.computed) * NS)
            self._observe("inference_time", (timeline.finished - timeline.started) * NS)

    def _measure(self, timeline: Timeline, tokens: int, service_class: ServiceClass) -> None:
        """Count whether a choice that came to an end of its own kept to the targets of its class. Its gap is the mean
        time between its tokens; of a single one there is none."""
        target = self._targets[service_class]
        self._count(f"measured_{service_class}")
        self._count(f"within_ttft_{service_class}", (timeline.seen - timeline.arrived) * NS <= target.ttft_seconds)
        gap = (timeline.finished - timeline.seen) * NS / max(1, tokens - 1)
        self._count(f"within_gap_{service_class}", gap <= target.gap_seconds)

    def paused(self, nanoseconds: int) -> None:
        """This process stood still to collect garbage."""
        self._count("gc_pause_ns", nanoseconds)

    def _count(self, name: str, amount: int = 1) -> None:
        self._cells[_PLACE[name]] += amount

    def _observe(self, name: str, value: float, count: int = 1) -> None:
        """`count` observations of `value`."""
        bounds, place = HISTOGRAMS[name], _PLACE[name]
        self._cells[place + bisect_left(bounds, value)] += count
        self._cells[place + len(bounds) + 1] += value * count


def read_totals(run_dir: Path) -> Totals:
    """The blocks of all API processes of the engine whose run directory this is, added up."""
    cells, tenants = [0.0] * _NUM_CELLS, dict[str, TenantTokens]()
    for path in run_dir.glob(f"engine.*{SUFFIX}"):
        try:
            data = path.read_bytes()
        except OSError:  # a process that has just ended takes its block along, and the engine with it
            continue
        if len(data) == SIZE:
            block = memoryview(data)
            cells = [cell + more for cell, more in zip(cells, block[:_SIZE_OF_CELLS].cast("d"), strict=True)]
            for name, tokens in read_tenants(block[_SIZE_OF_CELLS:]):
                tenants[name] = tokens.plus(tenants.get(name))
    return Totals(
        counters={name: int(cells[_PLACE[name]]) for name in COUNTERS},
        histograms={name: _histogram(cells, name) for name in HISTOGRAMS},
        tenants=tenants,
    )


def _histogram(cells: Sequence[float], name: str) -> HistogramTotals:
    bounds, place = HISTOGRAMS[name], _PLACE[name]
    end = place + len(bounds) + 1
    return HistogramTotals(bounds, tuple(map(int, cells[place:end])), cells[end])
