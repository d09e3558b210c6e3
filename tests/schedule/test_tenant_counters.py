"""What tenants were served, by hand: tokens weighed, idle tenants lifted, memory bounded."""

from __future__ import annotations

import numpy as np
from support.engine_core import EngineCore

from asyncengine.terms import Terms
from asyncengine.wire.requests import Resume
from gpu_runner.schedule.tenants import MAX_IDLE, Tenants


def test_a_tenant_that_comes_back_is_lifted_to_the_least_that_others_have() -> None:
    tenants = Tenants()
    busy, busier = tenants.enter("busy"), tenants.enter("busier")
    tenants.charge_output(busy, 50)
    tenants.charge_output(busier, 80)
    assert tenants.served[tenants.enter("new")] == 100
    assert tenants.served[busy] == 100
    tenants.check_integrity({busy: 1, busier: 1, 2: 1})


def test_what_the_last_request_that_started_had_of_its_prompt_lifts_nobody() -> None:
    tenants = Tenants()
    busy = tenants.enter("busy")
    tenants.started(busy)
    tenants.charge_prompt(busy, 1000)
    tenants.started(busy)
    tenants.charge_prompt(busy, 70)
    assert tenants.served[busy] == 1070
    assert tenants.served[tenants.enter("new")] == 1000


def test_a_tenant_that_was_served_more_keeps_that_through_a_pause() -> None:
    tenants = Tenants()
    busy, other = tenants.enter("busy"), tenants.enter("other")
    tenants.charge_output(busy, 50)
    tenants.leave(busy)
    assert tenants.served[tenants.enter("busy")] == 100
    assert tenants.served[other] == 0


def test_who_comes_when_nobody_has_work_starts_where_the_last_one_left() -> None:
    tenants = Tenants()
    first = tenants.enter("first")
    tenants.charge_output(first, 50)
    tenants.leave(first)
    assert tenants.served[tenants.enter("second")] == 100
    assert tenants.served[tenants.enter("first")] == 100


def test_an_account_is_open_while_its_tenant_has_requests_and_is_used_again() -> None:
    tenants = Tenants()
    accounts = [tenants.enter(str(number)) for number in range(100)]
    assert sorted(accounts) == list(range(100))
    assert tenants.enter("7") == accounts[7]
    tenants.leave(accounts[7])
    assert len(tenants) == 100
    tenants.leave(accounts[7])
    assert len(tenants) == 99
    assert tenants.enter("another") == accounts[7]
    tenants.check_integrity(dict.fromkeys(range(100), 1))


def test_no_more_than_so_many_idle_tenants_are_remembered() -> None:
    tenants = Tenants()
    tenants.enter("stays")
    for number in range(MAX_IDLE + 10):
        account = tenants.enter(str(number))
        tenants.charge_output(account, 1)
        tenants.leave(account)
    tenants.check_integrity({0: 1})
    assert len(tenants.served) == 8
    assert tenants.served[tenants.enter("0")] == 0
    assert tenants.served[tenants.enter(str(MAX_IDLE + 9))] == 2


def prompt_of(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 50, length, dtype=np.int32)


def served(core: EngineCore, tenant: str) -> int:
    tenants = core.scheduler.queue.tenants
    account = tenants.enter(tenant)
    tokens = int(tenants.served[account])
    tenants.leave(account)
    return tokens


def test_prefilled_tokens_weigh_one_output_two_and_cached_ones_nothing() -> None:
    core = EngineCore(max_num_seqs=4)
    core.add(1, prompt_of(40, seed=1), 10, ignore_eos=True, terms=Terms(tenant="a"))
    core.add(2, prompt_of(9, seed=2), 40, ignore_eos=True, terms=Terms(tenant="b"))
    while 1 not in core.finish:
        core.turn()
    assert served(core, "a") == 40 + 2 * 10
    core.add(3, prompt_of(40, seed=1), 5, ignore_eos=True, terms=Terms(tenant="a"))
    while 3 not in core.finish:
        core.turn()
    assert served(core, "a") == 40 + 2 * 10 + 8 + 2 * 5
    core.run()
    assert served(core, "b") == 9 + 2 * 40


def test_what_a_request_had_before_a_loss_costs_nothing_in_the_next_process() -> None:
    before, after = EngineCore(), EngineCore()
    before.add(1, prompt_of(40, seed=1), 25, ignore_eos=True, terms=Terms(tenant="a"))
    while len(before.outputs.get(1, ())) < 10:
        before.turn()
    params, _ = before.asked[1]
    ids = np.array(before.outputs[1], np.int32).tobytes()
    after.add_request(1, before.prompts[1], params, (Resume(0, ids, 0),), terms=Terms(tenant="a"))
    after.run()
    assert len(after.outputs[1]) == 25
    assert served(after, "a") == 2 * 15


def test_the_service_of_two_tenants_that_always_have_work_differs_by_a_constant() -> None:
    """At most by what one of them may hold of the cache, twice, weighed, or its longest prompt."""
    for seed in range(2):
        rng = np.random.default_rng(seed)
        core = EngineCore(num_pages=33, max_num_seqs=4, max_num_batched_tokens=32, check=False)
        scheduler, tenants = core.scheduler, core.scheduler.queue.tenants
        longest = {"a": int(rng.integers(2, 200)), "b": int(rng.integers(2, 200))}
        most = rid = 0
        for turn in range(800):
            for name in longest:
                while (
                    sum(request.terms.tenant == name for request in scheduler.queue) < 6
                ):  # more than can start at once
                    rid += 1
                    prompt = prompt_of(int(rng.integers(1, longest[name])), seed=turn)
                    core.add(rid, prompt, int(rng.integers(1, 40)), ignore_eos=True, terms=Terms(tenant=name))
            core.turn()
            counters = [int(tenants.served[request.account]) for request in scheduler.queue]
            most = max(most, max(counters) - min(counters))
        assert most <= 2 * max(2 * 32 * 16, *longest.values())
        assert min(counters) > 10 * most, "a bound that time would reach says nothing"
        scheduler.check_integrity()
