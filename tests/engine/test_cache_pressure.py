"""When a KV cache that is too small is worth a line in the log, and what that says."""

from __future__ import annotations

import numpy as np
from support.engine_core import EngineCore

from asyncengine.api.metric_families import metrics_text
from asyncengine.cache_pressure import CachePressure
from asyncengine.engine_info import Health
from asyncengine.metrics import COUNTERS, HISTOGRAMS, HistogramTotals, Totals

CALM = {"preemptions": 4, "waiting_for_pages": 0, "running": 3, "total_pages": 99}
SHORT = CALM | {"waiting_for_pages": 2}


def reports(pressure: CachePressure, gauges: dict[str, int], begin: int, end: int) -> list[tuple[float, str]]:
    """With the same gauges twice a second from `begin` to before `end`: when it reports, and what."""
    found = []
    for tick in range(2 * begin, 2 * end):
        if report := pressure.look(gauges, 1000 + tick / 2):
            found.append((tick / 2, report))
    return found


def test_requests_that_wait_for_pages_are_reported_after_a_while_and_once_a_minute() -> None:
    pressure = CachePressure()
    assert reports(pressure, CALM, 0, 5) == []
    said = "the KV cache of 99 pages has been full for {} s: 3 requests run, 2 wait for pages, 0 times one that ran had"
    found = reports(pressure, SHORT, 5, 80)
    assert [when for when, _ in found] == [15, 75]
    assert [report[: len(said)] for _, report in found] == [said.format(10), said.format(70)]


def test_requests_that_lose_their_pages_are_counted_from_when_that_began() -> None:
    pressure = CachePressure()
    pressure.look(CALM, 1000.0)
    said = [pressure.look(CALM | {"preemptions": 4 + second}, 1000.0 + second) for second in range(5, 16)]
    assert said[:-1] == [None] * 10
    assert said[-1] is not None
    assert said[-1].endswith("0 wait for pages, 15 times one that ran had to give up its own")


def test_moments_with_peace_between_them_are_not_reported() -> None:
    pressure = CachePressure()
    for begin in range(0, 60, 12):
        assert reports(pressure, SHORT, begin, begin + 8) == []
        assert reports(pressure, CALM, begin + 8, begin + 12) == []


def test_another_process_counts_anew() -> None:
    pressure = CachePressure()
    pressure.look(CALM, 1000.0)
    found = reports(pressure, SHORT | {"preemptions": 1}, 1, 12)
    assert [when for when, _ in found] == [11]
    assert " 0 times " in found[0][1]


def test_an_overfilled_cache_shows_requests_that_wait_for_pages_and_preemptions() -> None:
    core = EngineCore(num_pages=13, max_num_seqs=6)
    for rid in range(1, 9):
        core.add(rid, np.full(17, rid, np.int32), 80, ignore_eos=True)
    pressure, at, said = CachePressure(), 1000.0, None
    while (core.scheduler.gauges()["preemptions"], core.scheduler.gauges()["waiting_for_pages"] > 0) < (2, True):
        core.turn()
    gauges = core.scheduler.gauges()
    totals = Totals(dict.fromkeys(COUNTERS, 0), dict.fromkeys(HISTOGRAMS, HistogramTotals((), (0,), 0.0)))
    page = metrics_text(model="m", health=Health(state="ready"), gauges=gauges, totals=totals).decode()
    labels = 'model_name="m",engine="0"'
    assert f"vllm:num_preemptions_total{{{labels}}} {gauges['preemptions']}\n" in page
    waiting = f'asyncengine:num_requests_waiting_by_reason{{{labels},reason="kv"}} {gauges["waiting"]}\n'
    assert waiting in page
    while said is None:
        assert core.turn(), "all were answered, and nothing was said"
        at += 1.0
        said = pressure.look(core.scheduler.gauges(), at)
    assert "the KV cache of 12 pages has been full for 10 s" in said
    core.run()
    core.assert_all_right()
