"""One simulated engine: the real scheduler, and a device and a host of which only the time is computed.

    host    plan N+1 | launch N+1 | wait for N | commit N | plan N+2 | ...
    device  ---- step N ---------------------][---- step N+1 -------------------][----

As in `gpu_runner/loop.py` two steps are in flight, so what a step brings is seen when it ends, one step is planned
meanwhile, and the host's own time shows only where it is longer than a step, or where nothing was in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from simulation.records import Records
from simulation.step_model import StepModel
from simulation.traces import OUTPUT_IDS, TraceRequest

from asyncengine.config import PAGE_SIZE, SchedulingPolicy
from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import SamplingParams
from asyncengine.wire.base import Finish
from gpu_runner.schedule.plan import StepPlan, StepResult
from gpu_runner.schedule.scheduler import Scheduler, num_slots_for
from gpu_runner.schedule.step_output import StepOutput

STEPS_IN_FLIGHT = 2
_NEVER = -1
_NO_TOKEN = np.int32(-1)
_GOES_ON, _LENGTH = np.uint8(Finish.NONE), np.uint8(Finish.LENGTH)


class ReplicaConfig(NamedTuple):
    """As the engine's options of the same names; kv_cache_tokens: all that the device has room for; kv_host_tokens:
    what host memory has room for, and page_copy_ns: what a page takes either way."""

    kv_cache_tokens: int
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: SchedulingPolicy = "fcfs"
    prefix_caching: bool = True
    interactive_gap_ms: float = 50.0
    background_gap_ms: float = 500.0
    session_pin_share: float = 0.25
    kv_host_tokens: int = 0
    page_copy_ns: int = 0


class _Step(NamedTuple):
    plan: StepPlan
    result: StepResult


class Replica:
    """`now_ns` is the host's clock. Requests come with `submit`, never earlier than `run_until` has gone.

    Every answer ends at its length (`Finish.LENGTH`), none by a token.
    """

    def __init__(self, config: ReplicaConfig, model: StepModel, records: Records) -> None:
        self.now_ns = 0
        self.busy_ns = 0  # in which the device had a step
        self.steps = 0
        self.scheduler = Scheduler(
            num_pages=config.kv_cache_tokens // PAGE_SIZE + 1,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.policy,
            enable_prefix_caching=config.prefix_caching,
            gap_ns={
                "interactive": round(1e6 * config.interactive_gap_ms),
                "background": round(1e6 * config.background_gap_ms),
            },
            session_pin_share=config.session_pin_share,
            host_pages=config.kv_host_tokens // PAGE_SIZE,
            page_load_ns=config.page_copy_ns,
            clock=lambda: self.now_ns,
        )
        num_slots = num_slots_for(config.max_num_seqs)
        self._by_priority = config.policy == "priority"
        self._model = model
        self._records = records
        self._limit = np.zeros(num_slots, np.int32)  # of each slot's row
        self._request = np.zeros(num_slots, np.int32)  # its index
        self._token_ns = np.full(num_slots, _NEVER, np.int64)  # when its latest token was seen
        self._in_flight: deque[_Step] = deque()
        self._device_free_ns = 0
        self._page_copy_ns = config.page_copy_ns
        self._copies: deque[tuple[int, int]] = deque()  # (ticket, when it is done)
        self._link_free_ns = 0

    @property
    def busy(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work or self.scheduler.copying

    def submit(self, request: TraceRequest, at_ns: int) -> bool:
        """It comes at `at_ns`; False if it can never run, because it is too long."""
        if not self.busy:
            self.now_ns = max(self.now_ns, at_ns)
        self._records.came(request, at_ns)
        params = SamplingParams(
            max_tokens=request.output_tokens, ignore_eos=True, priority=request.priority if self._by_priority else 0
        )
        try:
            self.scheduler.add(
                rid=request.index,
                prompt=request.prompt(),
                params=params,
                max_tokens=request.output_tokens,
                terms=request.terms,
            )
        except InvalidRequestError:
            self._records.refused(request.index)
            return False
        return True

    def play(self, requests: Iterable[TraceRequest]) -> None:
        """Each comes at its time, in that order, and all end."""
        for request in requests:
            self.run_until(request.at_ns)
            self.submit(request, request.at_ns)
        while self.busy:
            self.turn()

    def run_until(self, ns: int) -> None:
        """Take turns until the next one would begin at `ns` or later, or nothing is left to do."""
        while self.now_ns < ns and self.busy:
            self.turn()

    def turn(self) -> list[int]:
        """One round of the loop; the requests that it saw end."""
        while self._copies and self._copies[0][1] <= self.now_ns:
            self.scheduler.transferred(self._copies.popleft()[0])
        plan = self.scheduler.plan()
        self._transfer()
        if plan is not None:
            self._launch(plan)
        elif not self._in_flight:
            if self._copies:
                self.now_ns = max(self.now_ns, self._copies[0][1])
            elif self.scheduler.has_work and not self.scheduler.copying:
                raise RuntimeError("the scheduler has work, but plans none of it while nothing is in flight")
            return []
        if plan is not None and len(self._in_flight) < STEPS_IN_FLIGHT:
            return []
        step = self._in_flight.popleft()
        self.now_ns = max(self.now_ns, step.result.device_end_ns)
        return self._take(self.scheduler.commit(step.plan, step.result))

    def _transfer(self) -> None:
        """Copies run beside the steps, both ways at once, one batch after the other."""
        if (batch := self.scheduler.take_transfers()) is not None:
            pages = max(len(batch.store_from), len(batch.load_from))
            self._link_free_ns = max(self._link_free_ns, self.now_ns) + pages * self._page_copy_ns
            self._copies.append((batch.ticket, self._link_free_ns))

    def _launch(self, plan: StepPlan) -> None:
        self.now_ns += self._model.host_ns(plan.num_rows)
        took_ns = self._model.step_ns(plan)
        begin_ns = max(self._device_free_ns, self.now_ns)
        self._device_free_ns = begin_ns + took_ns
        self.busy_ns += took_ns
        self.steps += 1
        if len(plan.start):
            self._limit[plan.start.slot] = plan.start.limit
        ends = plan.row_samples & (plan.row_start + plan.row_len >= self._limit[plan.row_slot] - 1)
        token = np.int32(OUTPUT_IDS + plan.step % OUTPUT_IDS)
        result = StepResult(
            step=plan.step,
            tokens=np.where(plan.row_samples, token, _NO_TOKEN),
            finish=np.where(ends, _LENGTH, _GOES_ON),
            device_begin_ns=begin_ns,
            device_end_ns=self._device_free_ns,
        )
        self._in_flight.append(_Step(plan, result))

    def _take(self, output: StepOutput) -> list[int]:
        slots, now = output.slots, self.now_ns
        for row in output.opens:
            self._request[row.slot] = row.rid
            self._token_ns[row.slot] = _NEVER
            self._records.first_token(row.rid, row.started_ns, now, row.cached_tokens)
        requests, before = self._request[slots], self._token_ns[slots]
        self._token_ns[slots] = now
        if output.opens:
            later = before != _NEVER
            requests, before = requests[later], before[later]
        self._records.later_tokens(requests, now - before, now)
        if not output.finish.any():
            return []
        ended: list[int] = self._request[slots[output.finish != _GOES_ON]].tolist()
        for index in ended:
            self._records.ended(index, now)
        return ended
