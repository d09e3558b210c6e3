"""What this process takes of a GPU, measured, and how much of it captured graphs will take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

CONTEXT_BYTES = 1 << 30
"""Of what is in use before this process allocates, the most that can be its own CUDA context. No call tells it from the
memory of other processes, so up to here it counts as this process's: the limit holds either way."""
SAMPLE_EVERY = 4
"""One graph in so many of a kind, the largest first, is captured to learn what all will take."""


class GpuMemory:
    """Made before this process allocates anything on the device. Bytes."""

    def __init__(self, device: torch.device, *, utilization: float) -> None:
        self._device = device
        free, self.total = torch.cuda.mem_get_info(device)
        self.limit = int(utilization * self.total)
        self._others = max(0, self.total - free - torch.cuda.memory_reserved(device) - CONTEXT_BYTES)

    @property
    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    @property
    def own(self) -> int:
        """In use by this process: context, loaded kernels, graphs, and what torch holds. Other processes that grow
        meanwhile count too."""
        return self.total - self.free - self._others

    @property
    def driver(self) -> int:
        """In use beside what torch holds."""
        return self.total - self.free - torch.cuda.memory_reserved(self._device)

    @property
    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)


def estimate_graph_bytes(kinds: Sequence[Sequence[Callable[[], None]]], memory: GpuMemory) -> int:
    """What graphs of all these works will take, from a sample of each kind captured on the current stream and dropped.

    kinds: works that queue about as many kernels each, the one that takes the most memory first.
    """
    stream = torch.cuda.current_stream()
    samples = [kind[::SAMPLE_EVERY] for kind in kinds]
    for sample in samples:
        for work in sample:
            work()  # loads its kernels, which graphs do not pay for
    stream.synchronize()
    torch.cuda.empty_cache()
    graphs: list[torch.cuda.CUDAGraph] = []
    pool = torch.cuda.graph_pool_handle()
    reserved_before = torch.cuda.memory_reserved()
    driver_bytes = 0.0
    for kind, sample in zip(kinds, samples, strict=True):
        before = memory.driver
        for work in sample:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                work()
            graphs.append(graph)
        driver_bytes += (memory.driver - before) * len(kind) / len(sample)
    pool_bytes = torch.cuda.memory_reserved() - reserved_before
    graphs.clear()
    torch.cuda.empty_cache()
    return pool_bytes + int(driver_bytes)
