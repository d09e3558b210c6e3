"""Many requests that come at once are taken in by parts, so that the device has the first ones to do meanwhile."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from asyncengine.sampling import SamplingParams
from asyncengine.wire.pipes import Pipes, make_run_dir
from asyncengine.wire.requests import Generate
from gpu_runner.inbox import FIRST_PART, Inbox
from gpu_runner.outbox import Outbox
from gpu_runner.schedule.limits import QueueLimits
from gpu_runner.schedule.scheduler import Scheduler


class Burst:
    """An inbox at which `arrived` requests lie."""

    def __init__(self, pipes: Pipes) -> None:
        self.arrived: deque[Generate] = deque()
        self.scheduler = Scheduler(num_pages=64, max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64)
        self.inbox = Inbox(
            pipes=pipes,
            scheduler=self.scheduler,
            outbox=Outbox(pipes=pipes, detokenizers=1),
            vocab_size=50,
            limits=QueueLimits(1000, 10_000),
        )
        self.inbox._requests = SimpleNamespace(drain=self._drain)  # type: ignore[assignment]

    def _drain(self, limit: int) -> Iterator[Generate]:
        for _ in range(min(limit, len(self.arrived))):
            yield self.arrived.popleft()

    def come(self, count: int) -> None:
        first = self.scheduler.num_steps + len(self.scheduler.queue)
        prompt = np.zeros(4, np.int32).tobytes()
        self.arrived.extend(Generate(first + i, prompt, SamplingParams(), 5, b"", "") for i in range(count))

    def taken(self) -> int:
        """How many more wait in the scheduler once the inbox has looked again."""
        before = len(self.scheduler.queue)
        self.inbox._take_messages()
        return len(self.scheduler.queue) - before


@pytest.fixture
def burst() -> Iterator[Burst]:
    run_dir = make_run_dir()
    pipes = Pipes(run_dir)
    yield Burst(pipes)
    pipes.close()
    shutil.rmtree(run_dir)


def test_each_part_of_a_burst_is_twice_as_large_as_the_one_before(burst: Burst) -> None:
    burst.come(10 * FIRST_PART)
    parts = [burst.taken() for _ in range(5)]
    assert parts == [FIRST_PART, 2 * FIRST_PART, 4 * FIRST_PART, 3 * FIRST_PART, 0]
    assert [request.rid for request in burst.scheduler.queue] == list(range(10 * FIRST_PART)), "in their order"


def test_the_next_burst_begins_with_a_small_part_again(burst: Burst) -> None:
    burst.come(2 * FIRST_PART)
    assert [burst.taken(), burst.taken()] == [FIRST_PART, FIRST_PART]
    burst.come(2 * FIRST_PART)
    assert burst.taken() == FIRST_PART


def test_a_burst_that_ends_with_a_whole_part_leaves_the_next_one_a_small_part_too(burst: Burst) -> None:
    burst.come(3 * FIRST_PART)
    assert [burst.taken(), burst.taken()] == [FIRST_PART, 2 * FIRST_PART]
    burst.inbox.drain()  # nothing has come
    burst.come(3 * FIRST_PART)
    assert burst.taken() == FIRST_PART
