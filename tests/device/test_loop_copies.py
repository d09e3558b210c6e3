"""When the loop starts copies of pages, asks after them and tells the scheduler, among made-up parts."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncengine.wire.sidecar import HEARTBEAT_SECONDS
from gpu_runner.loop import Loop
from gpu_runner.schedule.transfers import Transfers

NONE = np.empty(0, np.int32)


def batch(ticket: int) -> Transfers:
    return Transfers(ticket, NONE, NONE, NONE, NONE)


class Parts:
    """Scheduler, executor and inbox in one, which note what they are called for. plans, transfers: what the next calls
    return, None behind them. done: the last ticket."""

    def __init__(self, *, host_pages: int) -> None:
        self.host_pages = host_pages
        self.plans: deque[str] = deque()
        self.transfers: deque[Transfers] = deque()
        self.begun = self.done = -1
        self.calls: list[Any] = []
        self.masked_rows = SimpleNamespace(num_held=0, waiting=0)
        self.num_running, self.queue, self.has_work = 0, (), True
        self.quiet = 0  # waits in which nothing will arrive

    @property
    def copying(self) -> bool:
        return self.host_pages > 0 and (bool(self.transfers) or self.begun != self.done)

    def plan(self) -> str | None:
        self.calls.append("plan")
        return self.plans.popleft() if self.plans else None

    def launch(self, plan: str) -> None:
        self.calls.append(f"launch {plan}")

    def collect(self) -> str:
        self.calls.append("collect")
        return "result"

    def commit(self, plan: str, result: str) -> str:
        return "output"

    def take_closed(self) -> None:
        return None

    def take_transfers(self) -> Transfers | None:
        self.calls.append("take")
        return self.transfers.popleft() if self.transfers else None

    def transfer(self, transfers: Transfers) -> None:
        self.calls.append(transfers)
        self.begun = transfers.ticket

    def transferred(self, ticket: int | None = None) -> int:
        """The executor's without a ticket, the scheduler's with one."""
        self.calls.append("ask" if ticket is None else f"done {ticket}")
        return self.done

    def audit(self) -> None:
        self.calls.append("audit")

    def drain(self) -> None:
        pass

    def wait(self, timeout_ms: int) -> bool:
        self.calls.append(f"wait {timeout_ms}")
        self.quiet -= 1
        return self.quiet < 0

    def turn(self, loop: Loop) -> list[Any]:
        self.calls.clear()
        loop.turn()
        return list(self.calls)


def make_loop(parts: Any) -> Loop:
    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    outbox: Any = SimpleNamespace(flush=lambda: True, send=nothing)
    reporter: Any = SimpleNamespace(heartbeat_due=lambda: False)
    account: Any = SimpleNamespace(enter=nothing, end_turn=nothing, rest=nothing)
    return Loop(scheduler=parts, executor=parts, inbox=parts, outbox=outbox, reporter=reporter, account=account)


def test_a_heartbeat_tells_of_the_scheduler_the_steps_and_the_frames_that_were_dropped() -> None:
    told: list[dict[str, int]] = []
    parts: Any = SimpleNamespace(host_pages=0, gauges=lambda: {"running": 3, "waiting": 4})
    inbox: Any = SimpleNamespace(gauges=lambda: {"waiting": 5}, malformed=2)
    account: Any = SimpleNamespace(gauges=lambda: {"host_us_per_step": 90})
    reporter: Any = SimpleNamespace(heartbeat=told.append)
    Loop(scheduler=parts, executor=parts, inbox=inbox, outbox=parts, reporter=reporter, account=account).heartbeat()
    assert told == [{"running": 3, "waiting": 9, "host_us_per_step": 90, "malformed": 2}]


def test_copies_begin_behind_the_launch_and_are_asked_after_before_the_next_plans() -> None:
    parts = Parts(host_pages=9)
    loop = make_loop(parts)
    parts.plans.extend("ABCDE")
    assert parts.turn(loop) == ["plan", "launch A", "take"]
    parts.transfers.extend([batch(1), batch(2)])
    assert parts.turn(loop) == ["plan", "launch B", "take", batch(1), "collect"]
    assert parts.turn(loop) == ["ask", "plan", "launch C", "take", batch(2), "collect"]
    parts.done = 1
    assert parts.turn(loop) == ["ask", "done 1", "plan", "launch D", "take", "collect"]
    parts.done = 2
    assert parts.turn(loop) == ["ask", "done 2", "plan", "launch E", "take", "collect"]
    assert parts.turn(loop) == ["plan", "take", "collect"]


def test_where_all_rows_wait_for_copies_the_loop_sleeps_for_moments_only() -> None:
    parts = Parts(host_pages=9)
    loop = make_loop(parts)
    parts.transfers.append(batch(5))
    assert parts.turn(loop) == ["plan", "take", batch(5), "wait 1"]
    assert parts.turn(loop) == ["ask", "plan", "take", "wait 1"]
    parts.done = 5
    parts.plans.append("A")
    assert parts.turn(loop) == ["ask", "done 5", "plan", "launch A", "take"]


def test_copies_of_an_idle_engine_are_seen_done_before_it_sleeps() -> None:
    parts = Parts(host_pages=9)
    parts.has_work = False
    loop = make_loop(parts)
    parts.transfers.append(batch(0))
    assert parts.turn(loop) == ["plan", "take", batch(0), "wait 1"]
    parts.done = 0
    assert parts.turn(loop)[:3] == ["ask", "done 0", "plan"]
    assert parts.calls[-1] == f"wait {int(1000 * HEARTBEAT_SECONDS)}"


def test_an_idle_engine_looks_again_while_there_is_something_to_copy() -> None:
    parts = Parts(host_pages=9)
    parts.has_work = False
    loop = make_loop(parts)
    parts.turn(loop)
    parts.transfers.extend([batch(0), batch(1)])
    assert parts.turn(loop) == ["plan", "take", batch(0), "wait 1"]
    parts.done = 0
    assert parts.turn(loop) == ["ask", "done 0", "plan", "take", batch(1), "wait 1"]


def test_without_host_memory_nobody_is_asked() -> None:
    parts = Parts(host_pages=0)
    loop = make_loop(parts)
    parts.plans.append("A")
    parts.transfers.append(batch(1))
    assert parts.turn(loop) == ["plan", "launch A"]
    assert parts.turn(loop) == ["plan", "collect"]


def test_requests_that_nothing_keeps_from_running_are_a_reason_to_look_at_the_pages() -> None:
    parts = Parts(host_pages=0)
    loop = make_loop(parts)
    parts.plans.append("A")
    parts.turn(loop)
    assert parts.turn(loop) == ["plan", "collect"]
    assert parts.turn(loop) == ["plan", "audit", "wait 1"]


def test_the_pages_are_looked_at_when_nothing_has_arrived_for_a_while() -> None:
    parts = Parts(host_pages=0)
    parts.has_work, parts.quiet = False, 2
    waited = f"wait {int(1000 * HEARTBEAT_SECONDS)}"
    assert parts.turn(make_loop(parts)) == ["plan", waited, "audit", waited, "audit", waited]
