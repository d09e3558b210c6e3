"""Chaos in small: the real server with a model on the CPU, the first layers of the embedded one."""

from __future__ import annotations

import pytest
from chaos.processes import SIDECARS
from chaos.report import failure_report
from chaos.run import model_plan, run_chaos
from support.shallow_model import shallow_model_file

pytestmark = pytest.mark.timeout(900)


async def test_a_models_answers_are_the_same_whatever_happens_to_its_processes() -> None:
    plan = model_plan(
        seed=1,
        seconds=6,
        api_workers=1,
        kills_per_second=0.5,
        stops_per_second=0.15,
        cases=8,
        rate=0.8,
        model=str(shallow_model_file()),
    )
    outcome = await run_chaos(plan)
    assert not outcome.problems, failure_report(outcome)
    assert {kill.role for kill in outcome.kills} == {*SIDECARS}
    assert outcome.tally["asked"] == outcome.tally["right"] + outcome.tally["left early"] > 0
