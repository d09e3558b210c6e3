"""Sessions over both tiers: what the device cannot keep comes back from host memory, within a quota there too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.session_agents import SECOND, Agents

from asyncengine.config import PAGE_SIZE


class HostAgents(Agents):
    """They have a host tier. Whoever names no session has none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"host_pages": 64} | options))

    def add(self, prompt: np.ndarray, max_tokens: int = 2, *, session: str = "", **terms: Any) -> int:
        return super().add(prompt, max_tokens, session=session, **terms)

    def flush(self, count: int) -> None:
        """Requests of nobody's session, which leave nothing in either tier of what may be evicted."""
        for seed in range(count):
            self.turn(prompt_of(100, 1000 + seed))

    def cached(self, rid: int) -> int:
        return self.core.opens[rid].cached_tokens

    @property
    def pinned_in_both(self) -> tuple[int, int]:
        """Pages on the device, and in host memory."""
        gauges = self.core.scheduler.gauges()
        return gauges["pinned_pages"], gauges["host_pages_pinned"]


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 50, length, dtype=np.int32)


def test_what_is_beyond_the_quota_on_the_device_comes_back_from_host_memory_after_a_flood() -> None:
    agents = HostAgents(num_pages=25, host_pages=64)  # of which a tenant's sessions may pin 6 and 16
    for seed in (1, 2):
        agents.turn(prompt_of(8 * PAGE_SIZE, seed), session=str(seed))
    assert agents.pinned_in_both == (6, 16)
    agents.flush(20)
    assert agents.pinned_in_both == (6, 16)
    assert agents.core.scheduler.gauges()["kv_loads"] == 0
    for seed in (1, 2):
        rid = agents.turn(prompt_of(8 * PAGE_SIZE + 20, seed), session=str(seed))
        assert agents.cached(rid) == 8 * PAGE_SIZE
    assert agents.core.scheduler.gauges()["kv_loads"] >= 8 + 2
    agents.core.assert_all_right()


def test_in_host_memory_the_sessions_of_a_tenant_that_end_soonest_lose_their_pins_beyond_its_quota() -> None:
    agents = HostAgents(num_pages=25, host_pages=40)  # 10 pages of host memory
    for seed, ttl in ((1, 30.0), (2, 10.0), (3, 20.0)):
        agents.turn(prompt_of(4 * PAGE_SIZE, seed), session=str(seed), ttl=ttl)
    assert agents.pinned_in_both == (4, 8)
    agents.flush(20)
    found = [agents.cached(agents.turn(prompt_of(4 * PAGE_SIZE + 1, seed), session="")) for seed in (2, 1, 3)]
    assert found == [0, 4 * PAGE_SIZE, 4 * PAGE_SIZE]


def test_all_tenants_together_pin_at_most_half_of_host_memory() -> None:
    agents = HostAgents(num_pages=25, host_pages=40, session_pin_share=0.4)
    for seed, tenant in enumerate("abc", 1):
        agents.turn(prompt_of(9 * PAGE_SIZE, seed), session="s", tenant=tenant)
    assert agents.pinned_in_both[1] == 9 + 9 + 2


@pytest.mark.parametrize("how", ["released", "over"])
def test_a_session_that_has_ended_keeps_nothing_in_host_memory(how: str) -> None:
    agents = HostAgents(num_pages=25)
    agents.turn(prompt_of(8 * PAGE_SIZE), session="s")
    if how == "released":
        agents.core.scheduler.release_session("", "s")
    else:
        agents.clock.now += 60 * SECOND
    assert agents.pinned_in_both == (0, 0)


def test_the_pin_in_host_memory_grows_with_the_copies_unless_the_session_was_released() -> None:
    agents = HostAgents(num_pages=41, copies_done=lambda: 0)  # six pages are copied at once, and twelve are in flight
    agents.add(prompt_of(15 * PAGE_SIZE - 1), session="kept")
    pinned = [0]
    while pinned[-1] < 12:
        agents.core.turn()
        if agents.pinned_in_both[1] > pinned[-1]:
            pinned.append(agents.pinned_in_both[1])
    assert pinned == [0, 6, 12], "from the begin of the copies, which are not done"
    agents.core.copies_done = lambda: 1
    agents.core.run()
    assert agents.pinned_in_both[1] == 15

    agents.core.copies_done = lambda: 0
    rid = agents.add(prompt_of(7 * PAGE_SIZE, 1), session="released")
    while rid not in agents.core.finish:
        agents.core.turn()
    agents.core.scheduler.release_session("", "released")
    agents.core.copies_done = lambda: 1
    agents.core.run()
    assert agents.pinned_in_both[1] == 15
    assert agents.core.scheduler.gauges()["host_pages_used"] == 15 + 7


def test_pins_with_a_copy_in_host_memory_give_way_to_a_request_before_a_row_is_retracted() -> None:
    agents = HostAgents(num_pages=33, max_num_batched_tokens=512)
    agents.turn(prompt_of(8 * PAGE_SIZE), session="s")
    assert agents.pinned_in_both == (8, 8)
    runs = agents.add(prompt_of(30, 1), 90)
    agents.core.turn()
    waits = agents.add(prompt_of(14 * PAGE_SIZE, 2))
    agents.core.turn()
    assert agents.pinned_in_both == (8, 8), "there is room beside them"
    wants = agents.add(prompt_of(8 * PAGE_SIZE + 3, 3), 60)
    while wants not in agents.core.opens:
        agents.core.turn()
    assert runs not in agents.core.finish
    assert agents.pinned_in_both == (0, 8)
    agents.core.run()
    assert waits in agents.core.finish
    assert agents.core.scheduler.counters.preemptions == 0
    agents.flush(4)
    assert agents.cached(agents.turn(prompt_of(8 * PAGE_SIZE + 1), session="s")) == 8 * PAGE_SIZE
    agents.core.assert_all_right()


def test_a_session_that_ends_while_its_row_waits_retracted_is_kept_in_host_memory() -> None:
    agents = HostAgents(num_pages=33)
    rid = agents.add(prompt_of(4 * PAGE_SIZE), 100, session="s")
    while len(agents.core.outputs.get(rid, [])) < 2 * PAGE_SIZE + 1:
        agents.core.turn()
    scheduler = agents.core.scheduler
    slot = scheduler.slots.slot_of[rid]
    scheduler._running.store()
    scheduler._departures.retract(slot)
    agents.core.abort(rid)
    agents.core.run()
    assert agents.pinned_in_both == (6, 6)
