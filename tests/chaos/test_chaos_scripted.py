"""Chaos in small: the real server on the scripted runner, whose rows take up their work again at once."""

from __future__ import annotations

import pytest
from chaos.report import failure_report
from chaos.run import run_chaos, scripted_plan

pytestmark = pytest.mark.timeout(480)


@pytest.mark.parametrize("api_workers", [1, 2])
async def test_nothing_is_lost_whatever_is_killed_or_stopped_and_whoever_leaves(api_workers: int) -> None:
    plan = scripted_plan(
        seed=10 + api_workers, seconds=8, api_workers=api_workers, kills_per_second=0, cases=28, rate=5, limit=90
    )
    outcome = await run_chaos(plan)
    assert not outcome.problems, failure_report(outcome)
    tally = outcome.tally
    assert tally["asked"] == tally["right"] + tally["left early"] > 40
    assert tally["right"] > tally["left early"]
    assert tally["malformed"] > 0
    assert outcome.stops > 0
