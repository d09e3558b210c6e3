"""Agents with tools that take longer than a cached prefix lives, with and without sessions that pin it."""

from __future__ import annotations

import pytest
from simulation.agents import AgentTrace, later_turns
from simulation.replica import ReplicaConfig
from simulation.run import simulate
from simulation.traces import TraceRequest
from support.step_models import one_us_a_token

TRACE = AgentTrace(
    seconds=10.0,
    agents=2,
    turns=3,
    first_tokens=1000,
    grown_tokens=100,
    answer_tokens=10,
    pause_seconds=10.0,
    others_per_second=20.0,
    other_tokens=300,
    other_answer_tokens=10,
)
MODEL = one_us_a_token()


@pytest.fixture(scope="module")
def requests() -> list[TraceRequest]:
    return TRACE.requests(seed=0)


def test_an_agents_prompts_grow_and_its_last_turn_keeps_nothing(requests: list[TraceRequest]) -> None:
    assert [request.index for request in requests] == list(range(len(requests)))
    turns = [request for request in requests if request.terms.session == "1"]
    assert [len(turn.prompt()) for turn in turns] == [1000, 1100, 1200]
    assert turns[2].prompt()[:1000].tolist() == turns[0].prompt().tolist()
    assert [turn.terms.session_ttl_seconds for turn in turns] == [300.0, 300.0, 0.0]
    later, known = later_turns(requests)
    assert len(later) == 4
    assert known == 2 * (992 + 1088)


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0.0, 0.5), (0.25, 1.0, 1.0)])
def test_pinned_prefixes_are_found_again_and_others_are_not(
    requests: list[TraceRequest], share: float, least: float, most: float
) -> None:
    config = ReplicaConfig(kv_cache_tokens=16384, max_model_len=8192, session_pin_share=share)
    run = simulate(requests, config, MODEL)
    later, known = later_turns(requests)
    assert least * known <= run.records.cached[later].sum() <= most * known
    gauges = run.replica.scheduler.gauges()
    assert gauges["sessions"] == gauges["pinned_pages"] == 0, "all agents are done"
    run.replica.scheduler.check_integrity()
