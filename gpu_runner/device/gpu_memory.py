"""What this process takes of a GPU, measured, and how much of it captured graphs will take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

logger = logging.getLogger(__name__)

DRIVER_BYTES, GIVEN_BACK_BYTES = 1 << 30, 64 << 20
"""What a process may take beside what torch holds for its CUDA context, and then between two looks for kernels that it
loads or graphs that it captures; and what it may give back. No call tells whose such memory is: what moves by more was
another process."""
SAMPLE_EVERY = 4
"""One graph in so many of a kind, the largest first, is captured to learn what all will take."""


class GpuMemory:
    """What of the device's memory is this process's: what torch holds, which torch knows, and what `settle` has found
    that the driver holds for it. Other processes may take and free memory meanwhile. Made before this process allocates
    anything on the device. Bytes."""

    def __init__(self, device: torch.device, *, utilization: float) -> None:
        self._device = device
        self.total = torch.cuda.mem_get_info(device)[1]
        self.limit = int(utilization * self.total)
        self._seen = self.beside_torch
        self._driver = min(self._seen, DRIVER_BYTES)

    @property
    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    @property
    def own(self) -> int:
        """In use by this process: what torch holds now, and as of the last `settle` context, loaded kernels, graphs."""
        return torch.cuda.memory_reserved(self._device) + self._driver

    @property
    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    @property
    def beside_torch(self) -> int:
        """In use on the device beside what torch holds for this process, by whomever."""
        return self.total - self.free - torch.cuda.memory_reserved(self._device)

    def settle(self) -> None:
        """Count what has been taken since the last call beside what torch holds as this process's. Where it is more or
        less than this process can have taken, others had a part in it: then the most that it can have taken is
        counted, which keeps to the limit."""
        before, self._seen = self._seen, self.beside_torch
        growth = self._seen - before
        if -GIVEN_BACK_BYTES <= growth <= DRIVER_BYTES:
            self._driver += growth
            return
        self._driver += DRIVER_BYTES
        verb = "took" if growth > 0 else "freed"
        logger.warning("other processes %s about %d MiB of this GPU's memory meanwhile", verb, abs(growth) >> 20)


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
    memory.settle()
    torch.cuda.empty_cache()
    graphs: list[torch.cuda.CUDAGraph] = []
    pool = torch.cuda.graph_pool_handle()
    reserved_before = torch.cuda.memory_reserved()
    driver_bytes = 0.0
    for kind, sample in zip(kinds, samples, strict=True):
        before = memory.beside_torch
        for work in sample:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool=pool, stream=stream):
                work()
        taken = memory.beside_torch - before
        if 0 <= taken <= DRIVER_BYTES:  # else others moved: what is left out here is seen once all are captured
            driver_bytes += taken * len(kind) / len(sample)
    pool_bytes = torch.cuda.memory_reserved() - reserved_before
    graphs.clear()
    torch.cuda.empty_cache()
    memory.settle()
    return pool_bytes + int(driver_bytes)
