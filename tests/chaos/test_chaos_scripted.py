"""Chaos in small: the real server on the scripted runner, whose rows go on as fast as the machine lets them."""

from __future__ import annotations

import pytest
from chaos.report import failure_report
from chaos.run import run_chaos, scripted_plan


@pytest.mark.parametrize("api_workers", [1, 2])
async def test_nothing_is_lost_whatever_is_killed_or_stopped_and_whoever_leaves(api_workers: int) -> None:
    plan = scripted_plan(
        seed=10 + api_workers, seconds=10, api_workers=api_workers, kills_per_second=0, cases=28, rate=5
    )
    outcome = await run_chaos(plan)
    assert not outcome.problems, failure_report(outcome)
    assert outcome.tally["right"] >= 20
    assert outcome.tally["malformed"] > 0
    assert outcome.stops > 0
