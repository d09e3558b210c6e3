"""Requests of a session through the scheduler: what the next turn finds, and who gives way to whom."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from support.session_agents import SECOND, Agents

from asyncengine.config import PAGE_SIZE
from asyncengine.wire.base import Finish
from asyncengine.wire.pipes import Pipes, make_run_dir
from asyncengine.wire.requests import ReleaseSession
from gpu_runner.inbox import Inbox
from gpu_runner.outbox import Outbox
from gpu_runner.schedule.limits import QueueLimits
from gpu_runner.schedule.slots import State


def prompt_of(length: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, length, dtype=np.int32)


def test_the_second_turn_finds_the_first_ones_prefix_after_a_flood_of_5000_requests() -> None:
    agents = Agents(num_pages=601, max_model_len=2400, max_num_batched_tokens=512, check=False)
    first = agents.turn(prompt_of(2048), 16, ttl=3000.0)
    lost = agents.turn(prompt_of(256, seed=9), 16, session="")
    assert agents.pinned == 2063 // PAGE_SIZE
    agents.flood(5000)
    history = agents.history(first)
    again = agents.turn(np.concatenate([history, prompt_of(40, seed=5)]), 8, ttl=60.0)
    cached, session_tokens, common = agents.told(again)
    assert (session_tokens, common) == (2064, 2064)
    assert cached == 2048 >= 0.95 * len(history)
    assert agents.told(agents.turn(agents.history(lost), session=""))[0] == 0, "the flood evicts what nobody keeps"
    agents.core.assert_all_right()

    agents.clock.now += 60 * SECOND
    assert agents.pinned == 0
    agents.flood(400, seed=2)
    late = agents.turn(np.concatenate([agents.history(again), prompt_of(8, seed=6)]))
    assert agents.told(late) == (0, -1, 0)
    agents.core.assert_nothing_held()


def test_the_next_turn_is_told_how_much_of_the_session_its_prompt_begins_with() -> None:
    agents = Agents()
    first = agents.turn(prompt_of(40))
    assert agents.told(first) == (0, -1, 0)
    history = agents.history(first)
    assert len(history) == 43
    second = agents.turn(np.concatenate([history, prompt_of(10, seed=1)]))
    assert agents.told(second) == (32, 43, 43)
    rewritten = np.concatenate([agents.history(second), prompt_of(10, seed=2)])
    rewritten[35] = (rewritten[35] + 1) % 50
    third = agents.turn(rewritten)
    assert agents.told(third) == (32, 56, 35)
    fourth = agents.turn(agents.history(third), namespace="another")
    assert agents.told(fourth) == (0, 69, 0)
    assert agents.told(agents.turn(rewritten, tenant="another")) == (64, -1, 0)


def test_a_retracted_row_is_told_what_the_session_had_when_it_first_started() -> None:
    agents = Agents(num_pages=9, max_num_seqs=2)
    agents.turn(prompt_of(20))
    history_tokens = 23
    agents.add(prompt_of(30, seed=1), 60, session="")
    agents.core.turn()
    late = agents.add(prompt_of(40), 60)
    agents.core.run()
    assert agents.core.scheduler.counters.preemptions > 0
    assert agents.told(late)[1:] == (history_tokens, 20)
    agents.core.assert_all_right()


@pytest.mark.parametrize("how", ["abort", "stop", "abort while retracted"])
def test_a_row_that_is_cut_short_leaves_what_it_computed(how: str) -> None:
    agents = Agents(num_pages=41)
    rid = agents.add(prompt_of(36), 100)
    while len(agents.core.outputs.get(rid, [])) < 20:
        agents.core.turn()
    slot = next(slot for (slot, _), row in agents.core.row_of.items() if row == rid)
    known = int(agents.core.scheduler.slots.known[slot])
    if how == "stop":
        agents.core.stop(slot, int(agents.core.scheduler.slots.gen[slot]))
    else:
        if how == "abort while retracted":
            agents.core.scheduler._running.store()
            known = int(agents.core.scheduler.slots.known[slot])
            agents.core.scheduler._departures.retract(slot)
            assert agents.core.scheduler.slots.state[slot] == State.RETRACTED
        agents.core.abort(rid)
    agents.core.run()
    history = agents.history(rid)
    assert known <= len(history) == 56
    assert agents.pinned == 55 // PAGE_SIZE
    assert agents.told(agents.turn(history)) == (48, 56, 56)


def test_a_request_that_never_ran_leaves_its_session_as_it_was() -> None:
    agents = Agents(max_num_seqs=1)
    agents.turn(prompt_of(40))
    runs = agents.add(prompt_of(10, seed=2), 50, session="")
    agents.core.turn()
    agents.core.abort(agents.add(prompt_of(5, seed=3)))
    agents.core.abort(runs)
    agents.core.run()
    assert agents.told(agents.turn(prompt_of(40)))[1:] == (43, 40)


def test_of_several_choices_the_last_to_end_is_what_the_session_has() -> None:
    agents = Agents()
    rid = agents.add(prompt_of(20), 30, n=3)
    while len(agents.core.outputs.get(rid + 2, [])) < 10:
        agents.core.turn()
    agents.core.abort(rid + 1)
    agents.core.run()
    last = agents.core.finish_order[-1]
    assert agents.core.finish[last] == Finish.LENGTH
    assert agents.told(agents.turn(agents.history(last)))[1:] == (50, 50)


def test_without_prefix_caching_no_session_is_known() -> None:
    agents = Agents(enable_prefix_caching=False)
    first = agents.turn(prompt_of(40))
    assert agents.told(agents.turn(agents.history(first))) == (0, -1, 0)
    assert agents.core.scheduler.gauges()["sessions"] == agents.pinned == 0


def test_a_released_session_is_not_known() -> None:
    agents = Agents()
    first = agents.turn(prompt_of(40))
    agents.core.scheduler.release_session("another", "s")
    assert (agents.pinned, agents.core.scheduler.gauges()["sessions"]) == (2, 1)
    agents.core.scheduler.release_session("", "s")
    assert (agents.pinned, agents.core.scheduler.gauges()["sessions"]) == (0, 0)
    assert agents.told(agents.turn(agents.history(first))) == (32, -1, 0)


def test_a_release_on_the_control_pipe_reaches_the_session() -> None:
    agents = Agents()
    agents.turn(prompt_of(40), tenant="a")
    run_dir = make_run_dir()
    pipes = Pipes(run_dir)
    try:
        inbox = Inbox(
            pipes=pipes,
            scheduler=agents.core.scheduler,
            outbox=Outbox(pipes=pipes, detokenizers=1),
            vocab_size=50,
            limits=QueueLimits(10, 1000),
        )
        control = pipes.sender("runner.control")
        control.send(ReleaseSession("a", "s"))
        assert inbox.wait(20_000)
        inbox.drain()
        assert agents.pinned == 0
    finally:
        pipes.close()
        shutil.rmtree(run_dir)


def test_a_request_that_needs_the_whole_pool_waits_for_those_that_run_and_then_takes_what_is_pinned() -> None:
    agents = Agents(num_pages=33, max_num_batched_tokens=512, max_model_len=512)
    first = {tenant: agents.turn(prompt_of(7 * 16, seed=ord(tenant)), tenant=tenant) for tenant in "ab"}
    assert agents.pinned == 14
    runs = agents.add(prompt_of(16, seed=1), 40, session="")
    agents.core.turn()
    big = agents.add(prompt_of(398, seed=2), session="", tenant="a")  # 25 pages in all
    while runs not in agents.core.finish:
        assert big not in agents.core.opens
        assert agents.pinned == 14
        agents.core.turn()
    agents.core.run()
    assert agents.core.finish[big] == Finish.LENGTH
    assert agents.pinned == 7, "the tenant's own session gave way, and not the other's"
    assert agents.told(agents.turn(agents.history(first["b"]), tenant="b"))[0] == 112
    bigger = agents.turn(prompt_of(500, seed=3), session="", tenant="a")
    assert agents.core.finish[bigger] == Finish.LENGTH
    assert agents.pinned == 0
    agents.core.assert_all_right()


def test_the_last_row_that_runs_grows_into_what_is_pinned() -> None:
    agents = Agents(num_pages=33, max_model_len=512, max_num_seqs=2)
    agents.turn(prompt_of(8 * 16), tenant="a")
    agents.turn(prompt_of(8 * 16, seed=1), tenant="b")
    assert agents.pinned == 16
    long = [agents.add(prompt_of(20, seed=seed), 450, session="") for seed in (2, 3)]
    agents.core.run()
    assert [agents.core.finish[rid] for rid in long] == [Finish.LENGTH] * 2
    assert agents.pinned == 0
    assert agents.core.scheduler.counters.preemptions > 0
    agents.core.assert_all_right()
    agents.core.assert_nothing_held()


def test_pages_of_a_session_whose_time_is_over_go_to_a_request_that_needs_them_beside_others() -> None:
    agents = Agents(num_pages=33, max_num_batched_tokens=512, max_model_len=512)
    agents.turn(prompt_of(8 * 16), ttl=5.0)
    agents.add(prompt_of(16, seed=1), 100, session="")
    agents.core.turn()
    waits = agents.add(prompt_of(28 * 16, seed=2), session="")
    for _ in range(10):
        agents.core.turn()
    assert waits not in agents.core.opens
    agents.clock.now += 5 * SECOND
    for _ in range(3):
        agents.core.turn()
    assert waits in agents.core.opens
    agents.core.run()
    agents.core.assert_all_right()
