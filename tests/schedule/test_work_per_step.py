"""What a step costs the host does not grow with the batch: counted in calls, not in time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support.engine_core import EngineCore

from asyncengine.terms import Terms

STEPS = 64
"""Of which four begin a page of each row."""


class Calls:
    """Counts calls of Python and C functions below a function."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            sys.setprofile(self._see)
            try:
                return function(*args)
            finally:
                sys.setprofile(None)

        return counted

    def _see(self, frame: FrameType, event: str, arg: object) -> None:
        self.count += event in ("call", "c_call")


def calls_of_steps(rows: int, *, waiting: int) -> int:
    """Of planning and committing steps in which so many rows decode, of two classes and four tenants."""
    core = EngineCore(
        num_pages=16 * rows + 64,
        max_model_len=256,
        max_num_seqs=rows,
        max_num_batched_tokens=max(1024, 16 * rows),
        clock=lambda: 1,
        check=False,
    )
    for rid in range(rows + waiting):
        # those that wait are of a tenant and class that nobody gives way to
        terms = Terms(tenant="a", service_class="background")
        if rid < rows:
            terms = Terms(tenant="abcd"[rid % 4], service_class="background" if rid % 2 else "interactive")
        core.add(rid, np.full(8, rid % 50, np.int32), 200, ignore_eos=True, terms=terms, namespace=str(rid))
    while core.scheduler.num_running < rows or len(core.outputs) < rows:
        core.turn()
    calls = Calls()
    scheduler = core.scheduler
    scheduler.plan, scheduler.commit = calls.of(scheduler.plan), calls.of(scheduler.commit)  # type: ignore[method-assign]
    for _ in range(STEPS):
        core.turn()
    assert all(plan.num_decode_rows == rows for plan in core.plans[-STEPS:])
    return calls.count


@pytest.mark.parametrize("waiting", [0, 300])
def test_a_step_takes_as_many_calls_with_256_rows_as_with_16(waiting: int) -> None:
    few, many = calls_of_steps(16, waiting=waiting), calls_of_steps(256, waiting=waiting)
    assert many == few
    assert many < 150 * STEPS
