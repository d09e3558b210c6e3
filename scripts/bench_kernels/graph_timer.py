"""Times CUDA graphs, one against another: under load a GPU's clocks drift by more than what kernels differ by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from bench_device import SMOKE

Run = Callable[[], None]

REPLAYS = 9
MIN_PAIRS, MAX_PAIRS = 5, 25
PAIRS_US = 4e4
"""About the time that pairs of replays may take."""
WARM_REPLAYS, TIMED_REPLAYS = 3, 12


def median_us(launch: Callable[[int], object], count: int) -> float:
    """Time of one of `count` launches, each told its number, in a graph that is replayed."""
    if SMOKE:
        started = time.perf_counter()
        launch(0)
        return (time.perf_counter() - started) * 1e6
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            launch(index)
    times = []
    for _ in range(WARM_REPLAYS + TIMED_REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times[WARM_REPLAYS:])


class GraphTimer:
    """With `--smoke` what would be captured is called instead."""

    def __init__(self) -> None:
        self._pool = None if SMOKE else torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None  # so that the pool lives on, for the next graph

    def capture(self, run: Run) -> Run:
        """A replay of `run`, whose kernels have been loaded, captured on the current stream. What `run` reads must
        outlive it; what it allocates, other graphs write to as well."""
        if self._pool is None:
            return run
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which collects garbage and empties the allocator's cache each time.
        graph.capture_begin(pool=self._pool)
        run()
        graph.capture_end()
        self._last = graph
        return graph.replay

    def us(self, run: Run) -> float:
        """The median time of a replay."""
        return statistics.median(self._times([run] * (1 + (1 if SMOKE else REPLAYS)))[1:])

    def ratio(self, run: Run, base: Run, *, precision: int = 1) -> float:
        """How much longer `run` takes than `base`: the median over pairs, each of a replay of `run` and the mean of
        the replays of `base` before and after it. precision: how many times as many pairs."""
        pairs = 1
        if self._pool is not None:
            first_us = self._times([base, run, base])[2]
            pairs = precision * min(max(MIN_PAIRS, round(PAIRS_US / (2 * first_us))), MAX_PAIRS)
        times = self._times([base, *[run, base] * pairs])
        neighbours = zip(times[1::2], times[::2], times[2::2], strict=False)
        return statistics.median(2 * us / (before + after) for us, before, after in neighbours)

    def _times(self, runs: Sequence[Run]) -> list[float]:
        if self._pool is None:
            clock = [time.perf_counter()]
            for run in runs:
                run()
                clock.append(time.perf_counter())
            return [(b - a) * 1e6 for a, b in pairwise(clock)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
        events[0].record()
        for run, event in zip(runs, events[1:], strict=True):
            run()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]
