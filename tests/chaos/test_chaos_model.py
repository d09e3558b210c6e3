"""Chaos in small: the real server with the embedded model on the CPU."""

from __future__ import annotations

import pytest
from chaos.report import failure_report
from chaos.run import model_plan, run_chaos

pytestmark = pytest.mark.timeout(900)


async def test_a_models_answers_are_the_same_whatever_happens_to_its_processes() -> None:
    plan = model_plan(seed=5, seconds=6, api_workers=1, kills_per_second=0, cases=8, rate=0.5)
    outcome = await run_chaos(plan)
    assert not outcome.problems, failure_report(outcome)
    assert outcome.tally["asked"] == outcome.tally["right"] + outcome.tally["left early"] > 0
