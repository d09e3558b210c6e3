"""Executes step plans on a device, two in flight. The same code drives a CPU and a GPU; `stream` hides which."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np

from asyncengine.wire.reports import RunnerInfo
from gpu_runner.device.buffers import MAX_IN_FLIGHT, RING_DEPTH, PackedStep, Packer, RingSlot
from gpu_runner.device.page_copies import PageCopies
from gpu_runner.device.sampling_path import SamplingPaths
from gpu_runner.device.stream import Stream
from gpu_runner.device.token_masks import TokenMasks
from gpu_runner.kernels.upload_layout import upload_words
from gpu_runner.models.config import ModelConfig
from gpu_runner.schedule.plan import Int32, StepPlan, StepResult
from gpu_runner.schedule.transfers import Transfers


class StepRunner(Protocol):
    """How a device executes one packed step: `Step` or `GraphStep`."""

    def connect(self, ring: Sequence[RingSlot], masks: TokenMasks) -> None:
        """The host's buffers, which the steps to come use in turn, beginning with the first; and the masks by slot.

        Work of the steps' stream, as they are: other streams' work may come after that of the first steps.
        """

    def run(self, step: PackedStep) -> None:
        """Queue it on the stream that is current. Its plan is in the ring slot whose turn it is, where its results
        go."""


class Executor:
    """Launches plans without waiting and hands back results one step late.

        host     | launch N | launch N+1 | collect N ... commit N, plan N+2 | launch N+2 | collect N+1 ...
        device            | run N ................ | run N+1 ................ | run N+2 ...
        ring slot           N % 3                    (N+1) % 3                  (N+2) % 3

    Step N+1 is planned and launched before anyone has seen N's tokens: its decode rows read `last_token`, `kv_len` and
    `done` as step N leaves them on the device. A row that N ends is in N+1 all the same (an overshoot row) and is
    neutralised there by `done`; the host sees its end in N's result and leaves it out of N+2, the first step in which
    its slot may start another request.

    The host writes a ring slot while the device may still read the two before it. It may be written again for step
    N+3 because launching that requires N+1, and so N, to have been collected, which waits for N's mark.
    """

    def __init__(
        self,
        *,
        step: StepRunner,
        model_config: ModelConfig,
        stream: Stream,
        info: RunnerInfo,
        num_slots: int,
        pages_per_seq: int,
        max_step_tokens: int,
        pinned: bool,
        copies: PageCopies | None = None,
        page_load_ns: int = 0,
    ) -> None:
        """num_slots, pages_per_seq: of the step's page table. max_step_tokens: of any plan. pinned: whether the host's
        buffers are, for copies that nobody waits for. copies: where there is host memory for KV pages; page_load_ns:
        what it measured."""
        self.model_config = model_config
        self.info = info
        self.num_slots = num_slots
        self.max_step_tokens = max_step_tokens
        self.max_model_len = info.max_model_len
        self.num_pages = info.num_pages
        self.host_pages = 0 if copies is None else copies.host_pages
        self.page_load_ns = page_load_ns
        self._copies = copies
        self._stream = stream
        self._paths = SamplingPaths(num_slots)
        words = upload_words(num_slots=num_slots, pages_per_seq=pages_per_seq, max_step_tokens=max_step_tokens)
        self._step = step
        self._ring = [
            RingSlot.allocate(upload_words=words, num_slots=num_slots, pinned=pinned, mark=stream.mark())
            for _ in range(RING_DEPTH)
        ]
        self._packers = [Packer(slot.upload_array, turn) for turn, slot in enumerate(self._ring)]
        self.masks = TokenMasks(num_slots=num_slots, vocab=model_config.vocab_size, pinned=pinned)
        # not at once: what it writes on the device must be there before the first step, which waits for no other stream
        stream.submit(partial(step.connect, self._ring, self.masks))
        self._launched = 0
        self._in_flight: deque[tuple[StepPlan, RingSlot, Int32 | None]] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Hand a step to the device and return at once. Raises RuntimeError when two are in flight already; what the
        step itself raises comes out of `collect`.

        The plan's arrays must not change until the step was collected.
        """
        if len(self._in_flight) == MAX_IN_FLIGHT:
            raise RuntimeError(f"{MAX_IN_FLIGHT} steps are in flight; collect one before launching step {plan.step}")
        turn = self._launched % RING_DEPTH
        slot = self._ring[turn]
        path = self._paths.choose(plan)
        packed = self._packers[turn].pack(plan, path, slot.wanted_words(path))
        self._stream.submit(partial(self._step.run, packed))
        slot.mark.record()
        self._launched += 1
        self._in_flight.append((plan, slot, self._paths.logprob_rows))

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight; there must be one.

        Raises what that step or one before it raised; the executor is then of no more use.
        """
        plan, slot, logprob_rows = self._in_flight.popleft()
        slot.mark.wait()
        rows = len(plan.row_slot)
        begin_ns, end_ns = slot.times.tolist()
        return StepResult(
            plan.step,
            slot.tokens[:rows].copy(),
            slot.finish[:rows].astype(np.uint8),
            begin_ns,
            end_ns,
            None if logprob_rows is None else slot.read_logprobs(logprob_rows),
            slot.read_scores(len(plan.scores)) if len(plan.scores) else None,
        )

    def transfer(self, batch: Transfers) -> None:
        """Start copies of pages, behind those of batches before, and return at once."""
        self._page_copies.transfer(batch)

    def transferred(self) -> int:
        """The ticket of the last batch that is done, -1 before the first; never waits. Raises what copying raised."""
        return self._page_copies.transferred()

    @property
    def _page_copies(self) -> PageCopies:
        if self._copies is None:
            raise RuntimeError("there is no host memory for KV pages")
        return self._copies

    def close(self) -> None:
        """Wait for what was launched and stop; uncollected results are lost."""
        self._in_flight.clear()
        self._stream.close()
        if self._copies is not None:
            self._copies.close()
