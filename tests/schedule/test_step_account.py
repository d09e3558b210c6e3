"""What the loop writes down of its turns, and the gauges' arithmetic, by a clock that the test sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from support.engine_core import EngineCore

from asyncengine.wire.accounting import RingReader, RingWriter, StepRecord
from gpu_runner.accounting import COMMIT, DRAIN, LAUNCH, PLAN, REPORT, SEND, WAIT, StepAccount
from gpu_runner.schedule.plan import StepPlan, StepResult

SECOND = 1_000_000_000
INT32, UINT8 = np.zeros(0, np.int32), np.zeros(0, np.uint8)


@dataclass
class Rig:
    """An account and what it wrote. A plan is made of another, of which only what is recorded matters."""

    account: StepAccount
    ring: RingReader[StepRecord]
    some_plan: StepPlan
    times: list[int] = field(default_factory=lambda: [0])

    def turn(
        self, at: dict[int, int], end: int, launched: int = 0, collected: tuple[int, int, int] | None = None
    ) -> None:
        """at: when which phase began. launched: the step's number. collected: step, begin, end by the device."""
        for phase, when in at.items():
            self.times[0] = when
            self.account.enter(phase)
        self.times[0] = end
        plan = self.some_plan._replace(step=launched) if launched else None
        result = None
        if collected:
            step, begin, device_end = collected
            result = StepResult(step, INT32, UINT8, device_begin_ns=begin, device_end_ns=device_end)
        self.account.end_turn(plan, result, running=3, waiting=2)

    def gauges(self, now: int) -> tuple[int, int]:
        self.times[0] = now
        gauges = self.account.gauges()
        assert gauges.keys() == {"gpu_busy_permille", "host_us_per_step"}
        return gauges["gpu_busy_permille"], gauges["host_us_per_step"]


@pytest.fixture
def rig(tmp_path: Path, some_plan: StepPlan) -> Iterator[Rig]:
    times = [0]
    writer = RingWriter(tmp_path, "gpu_runner", 0, StepRecord)
    ring = RingReader(tmp_path / "gpu_runner.0.ring", StepRecord)
    yield Rig(StepAccount(writer, clock=lambda: times[0]), ring, some_plan, times)
    ring.close()
    writer.close()


def test_a_turn_is_recorded_with_its_phases_its_steps_and_the_devices_times(rig: Rig) -> None:
    rig.turn({DRAIN: 100, PLAN: 110, LAUNCH: 120}, 150, launched=1)
    phases = {DRAIN: 200, PLAN: 210, LAUNCH: 220, REPORT: 225, WAIT: 230, COMMIT: 240, SEND: 250}
    rig.turn(phases, 260, launched=2, collected=(1, 7000, 7100))
    rig.turn({DRAIN: 300, PLAN: 310, WAIT: 330, COMMIT: 340, SEND: 350}, 360, collected=(2, 7200, 7300))
    launched = {"bucket": 8, "rows": 2, "prefill_tokens": 5, "running": 3, "waiting": 2, "report": 0}
    none = {"wait": 0, "commit": 0, "send": 0, "collected": 0, "device_begin": 0, "device_end": 0, "gc_ns": 0}
    first = {"step": 1, "drain": 100, "plan": 110, "launch": 120, "end": 150, "after_rest": 1}
    second = {"step": 2, "drain": 200, "plan": 210, "launch": 220, "report": 225, "wait": 230, "commit": 240}
    second |= {"send": 250, "end": 260, "collected": 1, "device_begin": 7000, "device_end": 7100, "after_rest": 0}
    third = {"step": 0, "bucket": 0, "rows": 0, "prefill_tokens": 0, "drain": 300, "plan": 310, "launch": 0}
    third |= {"wait": 330, "commit": 340, "send": 350, "end": 360, "collected": 2, "device_begin": 7200}
    assert [record._asdict() for record in rig.ring.snapshot()] == [
        {"number": 1} | launched | none | first,
        {"number": 2} | launched | none | second,
        {"number": 3} | launched | none | third | {"device_end": 7300, "after_rest": 0},
    ]


def test_turns_without_a_step_are_not_recorded_and_leave_nothing_to_the_next(rig: Rig) -> None:
    rig.turn({DRAIN: 100, PLAN: 110, REPORT: 120}, 130)
    rig.turn({DRAIN: 200, PLAN: 210, LAUNCH: 220}, 230, launched=1)
    (record,) = rig.ring.snapshot()
    assert (record.drain, record.report) == (200, 0)


def test_the_first_step_after_a_rest_says_so_and_what_garbage_cost(rig: Rig) -> None:
    def collect() -> None:
        rig.times[0] += 70

    rig.turn({DRAIN: 100, PLAN: 110, LAUNCH: 120}, 130, launched=1)
    rig.account.rest(collect)
    rig.account.rest(collect)
    rig.turn({DRAIN: 500, PLAN: 510, LAUNCH: 520}, 530, launched=2)
    rig.turn({DRAIN: 600, PLAN: 610, LAUNCH: 620}, 630, launched=3)
    assert [(record.step, record.after_rest, record.gc_ns) for record in rig.ring.snapshot()] == [
        (1, 1, 0),
        (2, 1, 140),
        (3, 0, 0),
    ]


def test_busy_is_the_share_of_the_time_in_which_there_was_work(rig: Rig) -> None:
    rig.turn({DRAIN: 0, PLAN: 1, LAUNCH: 2}, 10_000, launched=1)
    phases = {DRAIN: 10_000, PLAN: 10_000, LAUNCH: 11_000, WAIT: 20_000, COMMIT: 80_000, SEND: 85_000}
    rig.turn(phases, 90_000, launched=2, collected=(1, 1_000, 1_600))
    assert rig.gauges(90_000) == (1000, 30), "10 us of the first turn, 20 of the second; the wait is not the host's"
    rig.turn({DRAIN: 90_000, WAIT: 90_000, COMMIT: 95_000}, 105_000, collected=(2, 1_800, 2_200))
    # busy 600 + 400; due 600 + (2200 - 1600)
    assert rig.gauges(105_000) == (833, 20)


def test_what_the_device_idles_in_a_rest_does_not_count(rig: Rig) -> None:
    rig.turn({DRAIN: 0}, 10, launched=1)
    rig.turn({DRAIN: 10, WAIT: 20, COMMIT: 30}, 40, collected=(1, 1_000, 1_600))
    rig.account.rest(lambda: None)
    rig.turn({DRAIN: 9_000}, 9_010, launched=2)
    rig.turn({DRAIN: 9_010, WAIT: 9_020, COMMIT: 9_030}, 9_040, launched=3, collected=(2, 9_000_000, 9_000_400))
    assert rig.gauges(9_040)[0] == 1000
    rig.turn({DRAIN: 9_040, WAIT: 9_050, COMMIT: 9_060}, 9_070, collected=(3, 9_001_400, 9_002_400))
    assert rig.gauges(9_070)[0] == 1000 * 2000 // 3000


def test_gauges_are_of_the_last_second_and_zero_when_nothing_ran_in_it(rig: Rig) -> None:
    assert rig.gauges(0) == (0, 0)
    rig.turn({DRAIN: 0}, 10_000, launched=1)
    rig.turn({DRAIN: 10_000, WAIT: 20_000, COMMIT: 30_000}, 40_000, launched=2, collected=(1, 1_000, 1_100))
    assert rig.gauges(SECOND // 4) == (1000, 30)
    rig.turn({DRAIN: 50_000, WAIT: 60_000, COMMIT: 70_000}, 80_000, collected=(2, 1_300, 1_400))
    assert rig.gauges(SECOND) == (500, 25)
    assert rig.gauges(SECOND + SECOND // 4) == (333, 20), "only the second step is in it"
    assert rig.gauges(2 * SECOND) == (0, 0)


def test_a_device_without_a_clock_is_never_said_to_be_busy(rig: Rig) -> None:
    rig.turn({DRAIN: 0}, 10_000, launched=1)
    rig.turn({DRAIN: 10_000, WAIT: 20_000, COMMIT: 30_000}, 40_000, launched=2, collected=(1, 0, 0))
    rig.turn({DRAIN: 40_000, WAIT: 50_000, COMMIT: 60_000}, 70_000, collected=(2, 0, 0))
    assert rig.gauges(70_000) == (0, 25)


@pytest.fixture
def some_plan() -> StepPlan:
    core = EngineCore()
    core.add(0, [5, 6, 7, 8, 9], 4)
    plan = core.scheduler.plan()
    assert plan is not None
    return plan._replace(bucket=8, row_slot=np.zeros(2, np.int32))
