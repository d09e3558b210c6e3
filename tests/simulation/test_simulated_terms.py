"""Classes and tenants in a simulation: who gets which figures, and how even the service was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import simulate
from simulation.fairness import backlogged, fairness, served
from simulation.records import Records, Target, Targets
from simulation.replica import Replica, ReplicaConfig
from simulation.run import simulate as run_trace
from simulation.terms import of_tenant, with_terms
from simulation.traces import TraceRequest, load_trace
from support.step_models import one_us_a_token

from asyncengine.config import ServiceClass
from asyncengine.terms import Terms

US, MS, S = 1000, 10**6, 10**9
CONFIG = ReplicaConfig(kv_cache_tokens=65536, max_model_len=8192)
MODEL = one_us_a_token(host_us=0.0)


def request(
    index: int, at_ns: int, prompt: int, output: int, *, tenant: str = "", service_class: ServiceClass = "interactive"
) -> TraceRequest:
    terms = Terms(tenant=tenant, service_class=service_class)
    return TraceRequest(index, at_ns, prompt, output, first_id=index * 10_000, terms=terms)


def test_figures_of_each_class_are_of_its_requests_and_its_tokens_alone() -> None:
    trace = [request(0, 0, 16, 3), request(1, 1 * S, 1024, 2, service_class="background")]
    targets: Targets = {"interactive": Target(1.014, 50.0), "background": Target(1000.0, 1000.0)}
    figures = run_trace(trace, CONFIG, MODEL).figures(targets)
    interactive, background = figures["classes"]["interactive"], figures["classes"]["background"]
    assert interactive["ttft_ms"]["p99"] == 1.015
    assert (interactive["gap_ms"]["mean"], interactive["gap_ms"]["p99"]) == (1.0, 1.0)
    assert background["ttft_ms"]["p50"] == 2.023
    assert (interactive["good_share"], background["good_share"], figures["good_share"]) == (0.0, 1.0, 0.5)
    assert (interactive["output_tokens"], background["output_tokens"], figures["output_tokens"]) == (3, 2, 5)
    assert "tenants" not in figures


def test_gaps_of_rows_that_run_together_go_to_the_class_of_each() -> None:
    # the second comes while steps 2 and 3 are in flight; step 4 holds its prompt, 1001 tokens padded to 1024
    trace = [request(0, 0, 16, 6), request(1, 1500 * US, 1000, 3, service_class="background")]
    run = run_trace(trace, CONFIG._replace(interactive_gap_ms=1000.0), MODEL)
    whose, at_ns = run.records.later()
    gaps = np.concatenate(run.records.gaps) // US
    assert gaps[whose == 0].tolist() == [1000, 1000, 2023, 1001, 1001]
    assert gaps[whose == 1].tolist() == [1001, 1001]
    assert at_ns[whose == 0].tolist()[-1] == run.records.end[0]


def test_the_scheduler_is_told_the_terms() -> None:
    trace = [request(0, 0, 16, 3, tenant="a", service_class="background")]
    replica = Replica(CONFIG, MODEL, Records(trace))
    replica.submit(trace[0], 0)
    assert [waiting.terms for waiting in replica.scheduler.queue] == [trace[0].terms]


def test_classes_and_tenants_are_dealt_by_the_seed_and_do_not_change_each_other() -> None:
    trace = [request(index, 0, 16, 1) for index in range(1000)]
    both = with_terms(trace, background=0.5, tenants=3, seed=1)
    classes = [each.terms.service_class for each in both]
    tenants = [each.terms.tenant for each in both]
    assert classes == [each.terms.service_class for each in with_terms(trace, background=0.5, seed=1)]
    assert tenants == [each.terms.tenant for each in with_terms(trace, tenants=3, seed=1)]
    assert tenants != [each.terms.tenant for each in with_terms(trace, tenants=3, seed=2)]
    assert 400 < classes.count("background") < 600
    counts = [tenants.count(name) for name in ("t0", "t1", "t2")]  # 6 : 3 : 2
    assert sum(counts) == 1000
    assert np.abs(np.array(counts) / 1000 - np.array([6, 3, 2]) / 11).max() < 0.06
    assert {each.terms.service_class for each in with_terms(trace, background=1.0)} == {"background"}


def test_tenants_are_a_trace_of_their_own() -> None:
    trace = load_trace("tenants")
    assert [(len(of_tenant(trace, name)), of_tenant(trace, name)[-1].at_ns) for name in "ab"] == [
        (200, 0),
        (60, 59 * S),
    ]
    assert [each.index for each in of_tenant(trace, "b")] == list(range(60))
    assert {each.prompt_tokens for each in trace} == {8000}
    assert with_terms(trace)[200].terms.tenant == "b", "who has a tenant keeps it"


# --------------------------------------------------------------------------------------------------------- fairness


def made_records(rows: Sequence[tuple[str, float, float, float, int]]) -> Records:
    """Of requests (tenant, arrival, start, end in s, prompt tokens) with a single token each."""
    trace = [request(at, 0, prompt, 1, tenant=tenant) for at, (tenant, *_, prompt) in enumerate(rows)]
    records = Records(trace)
    for each, (_, arrival, start, end, _) in zip(trace, rows, strict=True):
        records.came(each, round(arrival * S))
        records.first_token(each.index, round(start * S), round(end * S), 0)
        records.ended(each.index, round(end * S))
    return records


def test_a_tenant_is_backlogged_in_windows_all_through_which_one_of_its_requests_waits() -> None:
    rows = [("a", 0, 2.5, 3, 9), ("a", 2, 4, 4.5, 9), ("b", 0.5, 1, 2, 9), ("b", 1, 3, 5, 9), ("b", 3, 3.5, 5, 9)]
    waiting = backlogged(made_records(rows), S, 6)
    assert waiting.tolist() == [[True, True, True, True, False, False], [False, True, True, False, False, False]]


def test_the_index_of_fairness_is_over_tenants_that_wait_together() -> None:
    # in the second that both wait through, a is served 30 tokens and b 10; what c gets beside them counts for nothing
    rows = [("a", 0, 0.1, 0.5, 29), ("a", 0, 2, 2, 99), ("b", 0, 0.1, 0.5, 9), ("b", 0, 1.5, 2, 99)]
    found = fairness(made_records([*rows, ("c", 0.2, 0.3, 0.4, 999)]), window_s=1.0)
    assert found == {"window_s": 1.0, "windows": 1, "jain_mean": 0.8, "jain_min": 0.8}
    assert fairness(made_records(rows[:2]), window_s=1.0) is None


def test_served_are_prompts_without_what_was_cached_and_every_token_of_an_answer() -> None:
    trace = [
        TraceRequest(index, index * 10 * MS, 1024, 3, blocks=(7, 8 + index), terms=Terms(tenant="ab"[index]))
        for index in range(2)
    ]
    records = run_trace(trace, CONFIG, MODEL).records
    # first tokens at 2.023 and 10 + 1.511 ms, and two steps of 1 ms behind each
    assert served(records, MS).tolist() == [[0, 0, 1025, 1, 1, *[0] * 9], [*[0] * 11, 513, 1, 1]]


# ---------------------------------------------------------------------------------------------------------- command


def test_the_command_prints_a_line_per_class_and_tenant_and_one_of_each_tenant_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ["tenants", "--length-scale", "0.01", "--policies", "fcfs", "--json", str(out), "--alone"]
    simulate.main([*arguments, "--background", "0.5,1"])
    table = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[4:-2]]
    tenants = [["tenant", "a", "200"], ["alone"], ["tenant", "b", "60"], ["alone"]]
    classes = [["interactive", "138"], ["background", "122"]]
    first = [["x", "1", "b0.5"], *classes, *tenants]
    assert [line[: len(head)] for line, head in zip(table, first, strict=False)] == first
    assert table[len(first)] == ["x", "1", "b1"]
    rows = json.loads(out.read_text())["rows"]
    assert [row["load"] for row in rows] == ["x 1 b0.5", "x 1 b1"]
    assert sum(each["requests"] for each in rows[0]["classes"].values()) == 260
    assert rows[0]["tenants"]["b"]["alone"]["requests"] == 60
