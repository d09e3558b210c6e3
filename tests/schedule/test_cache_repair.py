"""A breach of the page bookkeeping: found when nothing runs, logged, counted, and over; whoever asks next is served."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
from support.engine_core import EngineCore

from asyncengine.terms import Terms
from gpu_runner.schedule.rows import Rows
from gpu_runner.schedule.scheduler import AUDIT_NS

PROMPT = np.arange(1, 41, dtype=np.int32)


class Served:
    """An engine with a host tier that has served a request of a session, and rests. `now`: its clock, in ns."""

    def __init__(self) -> None:
        self.now = 1
        self.core = EngineCore(num_pages=24, host_pages=8, clock=lambda: self.now)
        self.scheduler = self.core.scheduler
        self.run(1)

    @property
    def repairs(self) -> int:
        return self.scheduler.gauges()["cache_repairs"]

    def run(self, rid: int) -> None:
        self.core.add(rid, PROMPT, 9, ignore_eos=True, terms=Terms("a", "interactive", "s", 600.0))
        self.core.run()

    def audit(self) -> None:
        self.now += AUDIT_NS
        self.scheduler.audit()


def drop_a_page(rows: Rows) -> None:
    rows.pool.allocate(1)


def count_a_cached_page_twice(rows: Rows) -> None:
    rows.pool.incref(rows.tree.pages_held()[:1])


def free_a_cached_page(rows: Rows) -> None:
    rows.pool.decref(rows.tree.pages_held()[-1:], 0)


def free_a_page_twice(rows: Rows) -> None:
    page = rows.pool.allocate(1)
    rows.pool.decref(page, 0)
    rows.pool._push(page.astype(np.intp))


def defer_a_page_for_ever(rows: Rows) -> None:
    rows.pool.decref(rows.pool.allocate(1), 10**6)


def keep_a_prefix_locked(rows: Rows) -> None:
    rows.tree.lock(rows.tree.match("", PROMPT).node)


def miscount_what_can_be_evicted(rows: Rows) -> None:
    rows.tree.num_evictable += 1


def drop_a_page_of_host_memory(rows: Rows) -> None:
    assert rows.tier is not None
    rows.tier.tree.pool.allocate(1)


BREACHES = (
    *(drop_a_page, count_a_cached_page_twice, free_a_cached_page, free_a_page_twice, defer_a_page_for_ever),
    *(keep_a_prefix_locked, miscount_what_can_be_evicted, drop_a_page_of_host_memory),
)


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_logged_and_counted_and_the_cache_starts_over(
    breach: Callable[[Rows], None], caplog: pytest.LogCaptureFixture
) -> None:
    served = Served()
    breach(served.scheduler.rows)
    served.audit()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    gauges = served.scheduler.gauges()
    assert gauges["cache_repairs"] == 1
    assert gauges["free_pages"] == gauges["total_pages"]
    assert gauges["cached_pages"] == gauges["pinned_pages"] == gauges["sessions"] == gauges["host_pages_used"] == 0
    served.scheduler.check_integrity()
    for rid in (2, 3):
        served.run(rid)
    assert [served.core.opens[rid].cached_tokens for rid in (2, 3)] == [0, 32]
    assert [served.core.opens[rid].session_tokens for rid in (2, 3)] == [-1, 48 + 1]
    assert len(served.core.outputs[3]) == 9
    served.core.assert_all_right()
    served.core.assert_nothing_held()
    served.audit()
    assert served.repairs == 1


def test_what_is_cached_pinned_and_in_host_memory_is_no_breach(caplog: pytest.LogCaptureFixture) -> None:
    served = Served()
    served.audit()
    gauges = served.scheduler.gauges()
    assert (gauges["cache_repairs"], gauges["sessions"], gauges["pinned_pages"]) == (0, 1, 3)
    assert gauges["host_pages_used"] == 3
    assert not caplog.records


def test_it_is_looked_for_once_a_second_and_only_where_something_has_run() -> None:
    served = Served()
    served.audit()
    served.run(2)
    drop_a_page(served.scheduler.rows)
    served.core.check = False
    served.now += AUDIT_NS - 1
    served.scheduler.audit()
    assert served.repairs == 0
    served.now += 1
    served.scheduler.audit()
    assert served.repairs == 1
    drop_a_page(served.scheduler.rows)
    served.audit()
    assert served.repairs == 1
    served.run(3)
    served.audit()
    assert served.repairs == 2


def test_a_request_that_waits_for_lost_pages_starts_when_they_are_found() -> None:
    served = Served()
    served.scheduler.rows.pool.allocate(served.scheduler.rows.pool.num_free)
    served.core.check = False
    served.core.add(2, np.arange(1, 200, dtype=np.int32), 9, ignore_eos=True)
    assert [served.scheduler.plan() for _ in range(3)] == [None] * 3
    assert served.scheduler.has_work
    served.audit()
    assert served.repairs == 1
    served.core.check = True
    served.core.run()
    assert len(served.core.outputs[2]) == 9
    served.core.assert_all_right()
    served.core.assert_nothing_held()


def test_with_rows_on_the_pages_nothing_can_be_mended() -> None:
    served = Served()
    served.core.add(2, PROMPT, 9, ignore_eos=True)
    served.core.turn()
    drop_a_page(served.scheduler.rows)
    with pytest.raises(AssertionError, match="owners hold"):
        served.audit()
