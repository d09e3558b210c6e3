"""Chaos in small: the real server on the scripted runner, whose rows take up their work again at once."""

from __future__ import annotations

import pytest
from chaos.report import failure_report
from chaos.run import run_chaos, scripted_plan

pytestmark = pytest.mark.timeout(480)


@pytest.mark.parametrize(("seed", "api_workers", "kills_per_second"), [(11, 1, 2), (23, 2, 1)])
async def test_nothing_is_lost_whatever_is_killed_or_stopped_and_whoever_leaves(
    seed: int, api_workers: int, kills_per_second: float
) -> None:
    plan = scripted_plan(
        seed=seed,
        seconds=7,
        api_workers=api_workers,
        kills_per_second=kills_per_second,
        cases=20,
        rate=5,
        limit=90,
    )
    outcome = await run_chaos(plan)
    assert not outcome.problems, failure_report(outcome)
    tally = outcome.tally
    assert tally["asked"] == tally["right"] + tally["left early"] + tally["cut off"] > 40
    assert tally["right"] > tally["left early"]
    assert tally["refused"] > 0
    assert len(outcome.kills) >= 4
    assert outcome.stops > 0
