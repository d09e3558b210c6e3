"""Work in CUDA graphs as an engine captures it. What a graph takes memory for holds NaN until it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gpu_runner.device.graph_step import Graph, Uncaptured

POISON_BYTES = 512 << 20
SMALL_BYTES, SMALL_COUNT = 256 << 10, 256
"""Memory of up to a mebibyte is the allocator's own kind."""


class Calls:
    """Without graphs: work is done when it would be replayed."""

    @contextmanager
    def made(self, work: Callable[[], None]) -> Iterator[Graph]:
        yield Uncaptured(work)


class PoisonedGraphs:
    """Graphs of one pool, one at a time. The first fills the pool's memory with NaN, which the others then take."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._poison = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._poison, pool=self._pool, stream=self._stream):
            sizes = [POISON_BYTES] + SMALL_COUNT * [SMALL_BYTES]
            # as float32 they are NaN too
            taken = [torch.full((size // 2,), torch.nan, dtype=torch.bfloat16, device="cuda") for size in sizes]
            del taken

    @contextmanager
    def made(self, work: Callable[[], None]) -> Iterator[Graph]:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            work()  # what is made by a first call is not captured
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                work()
            self._poison.replay()
            yield graph
            torch.cuda.synchronize()
