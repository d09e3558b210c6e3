"""Copies of KV pages between the device and host memory, off the stream of the steps.

    host      | batch 7: slots 0, 1 | batch 8: slot 2, rest waits | ... slot 0 done? 8's rest: slot 3 | ...
    copies               [ 7, begun ][ 7, rest  ][ 8, begun ]                    [ 8, rest ]
    device    -- step N --][---- step N+1 ---------][---- step N+2 ---------][---- step N+3 ----

A batch is copied in launches of at most PAGES_PER_LAUNCH pages each way, in order. The pages' ids go through a slot of
the host for each launch, which may be written again once the mark behind the launch was seen done. Where all slots are
in use, the rest waits on the host for somebody to ask what is done. Nothing here waits for the device, but `measure`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from gpu_runner.device.host_memory import HostMemory
from gpu_runner.device.stream import Mark, Stream, Work
from gpu_runner.kernels.reference_page_copy import PageIds, PageMemory, words_for
from gpu_runner.schedule.plan import Int32
from gpu_runner.schedule.transfers import Transfers

PAGES_PER_LAUNCH = 512
NUM_SLOTS = 4
NO_TICKET = -1
MEASURED_PAGES = 64
MEASUREMENTS = 3

CopyPages = Callable[[PageMemory, PageIds], None]


@dataclass(frozen=True, slots=True)
class _Slot:
    counts: Int32  # the host's memory of its `PageIds`, as the one below
    pages: Int32
    copy: Work
    mark: Mark


class _Launch(NamedTuple):
    batch: Transfers
    begin: int  # of both its stores and its loads
    is_last: bool


class PageCopies:
    """Executes `Transfers` in order."""

    def __init__(
        self,
        *,
        memory: PageMemory,
        host: HostMemory,
        stream: Stream,
        copy: CopyPages,
        pages_per_launch: int = PAGES_PER_LAUNCH,
    ) -> None:
        """memory: `host` is its host side. stream: for copies alone. copy: queues them on the stream that is
        current."""
        self._memory = memory
        self._host = host
        self._stream = stream
        self._copy = copy
        self._most = pages_per_launch
        words, device = words_for(pages_per_launch), memory.kv.device
        # not zeroed: that would be another stream's work, which nothing here would wait for
        self._ids = PageIds.of(torch.empty(words, dtype=torch.int32, device=device))
        self._slots = [self._make_slot(words, pinned=device.type == "cuda") for _ in range(NUM_SLOTS)]
        self._launched = 0
        self._running: deque[tuple[_Slot, _Launch]] = deque()
        self._waiting: deque[_Launch] = deque()
        self._done = NO_TICKET

    @property
    def host_pages(self) -> int:
        return self._memory.host_pages

    @property
    def host_bytes(self) -> int:
        return self._host.words.nbytes

    def transfer(self, batch: Transfers) -> None:
        """Start copying, or have it wait for its turn; returns at once."""
        most = max(len(batch.store_from), len(batch.load_from), 1)
        for begin in range(0, most, self._most):
            self._waiting.append(_Launch(batch, begin, begin + self._most >= most))
        self._launch()

    def transferred(self) -> int:
        """The ticket of the last batch that is done, NO_TICKET before the first; never waits.

        Raises what copying raised; this object is then of no more use."""
        running = self._running
        while running and running[0][0].mark.done():
            launch = running.popleft()[1]
            if launch.is_last:
                self._done = launch.batch.ticket
        if self._waiting:
            self._launch()
        return self._done

    def measure(self) -> int:
        """ns that a page takes to load, among many, when nothing else runs: a batch is loaded into pages from 1 on,
        which nobody may use yet. Whatever loading needs is there after that."""
        count = min(MEASURED_PAGES, self._most, self.host_pages, self._memory.num_pages - 1)
        pages: Int32 = np.arange(count, dtype=np.int32)
        batch = Transfers(NO_TICKET, pages[:0], pages[:0], pages, pages + np.int32(1))
        times = []
        for _ in range(1 + MEASUREMENTS):
            begin = time.perf_counter_ns()
            self.transfer(batch)
            self._running[-1][0].mark.wait()
            times.append(time.perf_counter_ns() - begin)
            self.transferred()
        return max(1, min(times[1:]) // count)  # the first makes things ready

    def close(self) -> None:
        """Finish what was started; the rest is dropped."""
        self._waiting.clear()
        self._stream.close()

    def _make_slot(self, words: int, *, pinned: bool) -> _Slot:
        ids = PageIds.of(torch.zeros(words, dtype=torch.int32, pin_memory=pinned))
        copy = self._stream.prepare(partial(self._copy_pages, ids))
        return _Slot(ids.counts.numpy(), ids.pages.numpy(), copy, self._stream.mark())

    def _launch(self) -> None:
        while self._waiting and len(self._running) < NUM_SLOTS:
            launch = self._waiting.popleft()
            batch, part = launch.batch, slice(launch.begin, launch.begin + self._most)
            slot = self._slots[self._launched % NUM_SLOTS]
            for way, sides in enumerate(
                ((batch.store_from[part], batch.store_to[part]), (batch.load_to[part], batch.load_from[part]))
            ):
                slot.counts[way] = count = len(sides[0])
                slot.pages[way, :, :count] = sides
            self._stream.submit(slot.copy)
            slot.mark.record()
            self._launched += 1
            self._running.append((slot, launch))

    def _copy_pages(self, ids: PageIds) -> None:
        """ids: of the host."""
        self._ids.buffer.copy_(ids.buffer, non_blocking=True)
        self._copy(self._memory, self._ids)
