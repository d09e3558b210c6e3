"""Random operations on the scheduler: every invariant is recomputed after each, every output is the request's own."""

from __future__ import annotations

import contextlib
from collections import Counter
from itertools import count
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray
from support.engine_core import EngineCore

from asyncengine.config import SchedulingPolicy, ServiceClass
from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import Structured
from asyncengine.terms import Terms
from asyncengine.wire.requests import Resume
from gpu_runner.schedule import prompt_batches, queues
from gpu_runner.schedule.buckets import token_buckets
from gpu_runner.schedule.tenants import OUTPUT_WEIGHT, Tenants

OPERATIONS_PER_RUN = 1_000
RUNS = 12
TENANTS, SESSIONS = ("", "a", "b"), ("1", "2", "3")
CLASSES: tuple[ServiceClass, ...] = get_args(ServiceClass)
RUNS_WITH_A_HOST_TIER = 8
RUNS_WITH_DEAR_PROMPTS = 4
POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)


@pytest.mark.parametrize("seed", range(RUNS))
def test_random_operations_keep_every_invariant_and_every_answer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    core = EngineCore(
        num_pages=int(rng.choice([8, 12, 20, 40])),
        max_model_len=128,
        max_num_seqs=int(rng.choice([1, 2, 4, 8])),
        max_num_batched_tokens=int(rng.choice([16, 32, 64])),
        policy=POLICIES[seed % 4],
        enable_prefix_caching=bool(rng.integers(4)),
        vocab_size=30,
        session_pin_share=float(rng.choice([0.2, 0.6])),
        clock=count(1, 1_000_000).__next__,  # a millisecond each time that somebody looks
    )
    run_random(core, rng, OPERATIONS_PER_RUN)


@pytest.mark.parametrize("seed", range(RUNS_WITH_DEAR_PROMPTS))
def test_prompts_that_wait_for_others_keep_every_invariant_and_every_answer(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_batches, "MANY_ROWS", 1)
    rng = np.random.default_rng(2000 + seed)
    core = EngineCore(
        num_pages=int(rng.choice([24, 40])),
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        policy=POLICIES[seed % 4],
        vocab_size=30,
        clock=count(1, 1_000_000).__next__,
    )
    times = core.scheduler.step_time
    for bucket in token_buckets(64):  # a step with prompts takes more than twice what one without them does
        times.learn(1e6 + 1e4 * bucket, bucket, 0, 0)
        times.learn(2e6 + 2e4 * bucket, bucket, 0, 1)
    monkeypatch.setattr(times, "learn", lambda *_: None)  # so they stay
    rooms: list[int] = []
    find = core.scheduler._batches.room

    def room(budget: int, *, rows: int, prompts: int) -> int:
        rooms.append(find(budget, rows=rows, prompts=prompts))
        return rooms[-1]

    monkeypatch.setattr(core.scheduler._batches, "room", room)
    run_random(core, rng, OPERATIONS_PER_RUN)
    assert rooms.count(0) > 10


@pytest.mark.parametrize("seed", range(RUNS_WITH_A_HOST_TIER))
def test_with_a_host_tier_every_row_reads_what_was_computed_for_its_own_tokens(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    # To compute a page takes 160 us: the last one is never loaded.
    page_load_ns = (0, 50_000, 159_000, 1_000_000_000)[seed % 4]
    host_pages = (100, 4, 40)[seed % 3]
    core = EngineCore(
        num_pages=int(rng.choice([8, 12, 20])),
        max_model_len=128,
        max_num_seqs=int(rng.choice([2, 4, 8])),
        max_num_batched_tokens=int(rng.choice([16, 32, 64])),
        policy=POLICIES[seed // 2 % 4],
        enable_prefix_caching=seed != 5,
        vocab_size=30,
        host_pages=host_pages,
        session_pin_share=(0.2, 0.6)[seed % 2],
        clock=count(1, 1_000_000).__next__,
        page_load_ns=page_load_ns,
        copies_done=lambda: int(rng.integers(3)) if rng.random() < 0.3 else 0,
    )
    run_random(core, rng, OPERATIONS_PER_RUN // 2)
    gauges = core.scheduler.gauges()
    assert gauges["kv_stores"] > 0
    if page_load_ns == 1_000_000_000:
        assert gauges["kv_loads"] == 0
    elif not core.scheduler.rows.caching:
        assert gauges["host_pages_used"] == 0
    elif host_pages >= 40:
        assert gauges["kv_loads"] > 0


class RecordedTenants(Tenants):
    """What each tenant was charged, whatever it was lifted by."""

    def __init__(self) -> None:
        super().__init__()
        self.charged: Counter[str] = Counter()

    def charge_prompt(self, account: int, tokens: int) -> None:
        super().charge_prompt(account, tokens)
        self.charged[self._names[account]] += tokens

    def charge_output(self, account: int, tokens: int) -> None:
        super().charge_output(account, tokens)
        self.charged[self._names[account]] += OUTPUT_WEIGHT * tokens

    def charge_outputs(self, accounts: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        super().charge_outputs(accounts, tokens)
        assert (tokens >= 0).all()
        for account, number in zip(accounts.tolist(), tokens.tolist(), strict=True):
            self.charged[self._names[account]] += OUTPUT_WEIGHT * number


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_request_is_charged_each_token_once_however_often_it_loses_its_pages(
    seed: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is of a tenant of its own. shared: prompts begin alike, so that others' pages may spare a row a part of its
    own; else what it is charged is what it would be without retraction, to the token."""
    monkeypatch.setattr(queues, "Tenants", RecordedTenants)
    rng = np.random.default_rng(2000 + seed)
    core = EngineCore(
        num_pages=(9, 12, 16, 8)[seed],
        max_model_len=128,
        max_num_seqs=(8, 4, 8, 3)[seed],
        max_num_batched_tokens=(16, 32, 64, 16)[seed],
        policy=POLICIES[seed],
        enable_prefix_caching=seed != 3,
        vocab_size=30,
        clock=count(1, 1_000_000).__next__,
        check=False,
    )
    tenants = core.scheduler.queue.tenants
    assert isinstance(tenants, RecordedTenants)
    family = rng.integers(0, 30, 128, dtype=np.int32)
    came_with: dict[int, int] = {}
    gone: set[int] = set()
    for _ in range(OPERATIONS_PER_RUN):
        action, rid = rng.random(), len(core.prompts)
        terms = Terms(str(rid), CLASSES[rng.integers(2)])
        space = "" if shared else str(rid)
        running = [each for each in core.prompts if each not in core.finish and each not in gone]
        if action < 0.12:
            prompt = family[: int(rng.integers(1, 60))].copy()
            structured = Structured("regex", "a") if rng.random() < 0.2 else None
            with contextlib.suppress(InvalidRequestError):
                core.add(
                    *(rid, prompt, int(rng.integers(1, 50))),
                    priority=int(rng.integers(3)),
                    ignore_eos=bool(rng.integers(2)),
                    structured=structured,
                    namespace=space,
                    terms=terms,
                )
        elif action < 0.16 and running:
            old = int(rng.choice(running))
            gone.add(old)
            core.abort(old)
            if rng.random() < 0.7:
                ids = np.array(core.outputs.get(old, []), np.int32)
                came_with[rid] = len(ids)
                resume = (Resume(0, ids.tobytes(), 0),)
                core.add_request(rid, core.prompts[old], core.asked[old][0], resume, namespace=space, terms=terms)
        elif action < 0.17 and core.row_of:
            core.stop(*list(core.row_of)[rng.integers(len(core.row_of))])
        else:
            core.turn()
    core.run()
    core.assert_all_right()
    core.scheduler.check_integrity()
    assert core.scheduler.counters.preemptions > 10
    assert len([rid for rid in core.outputs if came_with.get(rid)]) > 3
    for rid, output in core.outputs.items():
        had = came_with.get(rid, 0)
        prompt_part = tenants.charged[str(rid)] - OUTPUT_WEIGHT * (len(output) - had)
        computed = 0 if had else len(core.prompts[rid]) - core.opens[rid].cached_tokens
        assert prompt_part == computed or (shared and 0 <= prompt_part < computed), f"request {rid}"


def run_random(core: EngineCore, rng: np.random.Generator, operations: int) -> None:
    families = [rng.integers(0, 30, 128, dtype=np.int32) for _ in range(3)]
    next_rid = 1
    asked: dict[int, int] = {}
    dropped: set[int] = set()
    for _ in range(operations):
        action = rng.random()
        if action < 0.15:
            next_rid = add_random(core, rng, families, next_rid, asked)
        elif action < 0.18 and next_rid > 1:
            dropped.add(rid := int(rng.integers(1, next_rid)))
            core.abort(rid)
        elif action < 0.20 and core.row_of:
            core.stop(*list(core.row_of)[rng.integers(len(core.row_of))])
        elif action < 0.23 and next_rid > 1:
            next_rid = resume_random(core, rng, next_rid, asked, dropped)
        elif action < 0.24:
            core.scheduler.release_session(*random_session(rng))
        elif action > 0.99:
            set_aside_for_a_while(core, int(rng.integers(5)))
        else:
            core.turn()
    core.run()
    core.assert_all_right()
    core.assert_prompts_scored(asked)
    assert max(len(plan.scores) for plan in core.plans) <= core.scheduler.slots.num_slots // 2
    for tenant in TENANTS:
        for session in SESSIONS:
            core.scheduler.release_session(tenant, session)
    gauges = core.scheduler.gauges()
    assert gauges["sessions"] == gauges["pinned_pages"] == gauges["host_pages_pinned"] == 0
    core.assert_nothing_held()


def set_aside_for_a_while(core: EngineCore, turns: int) -> None:
    """All that waits or runs; no step holds any of it in so many turns."""
    idle = core.scheduler.set_aside()
    steps = core.scheduler.num_steps
    for _ in range(turns):
        core.turn()
        idle = core.scheduler.set_aside()
    assert core.scheduler.num_steps == steps
    assert idle or turns < core.depth
    core.scheduler.queue.release()


def random_session(rng: np.random.Generator) -> tuple[str, str]:
    return TENANTS[rng.integers(3)], SESSIONS[rng.integers(3)]


def add_random(
    core: EngineCore, rng: np.random.Generator, families: list[np.ndarray], rid: int, asked: dict[int, int]
) -> int:
    prompt = families[rng.integers(3)][: int(rng.integers(1, 128))].copy()
    if rng.random() < 0.5:
        prompt[-1] = rng.integers(30)
    choices = int(rng.integers(1, 4)) if rng.random() < 0.2 else 1
    scored = int(rng.integers(3)) if rng.random() < 0.05 else None
    tenant, session = random_session(rng)
    terms = Terms(tenant, CLASSES[rng.integers(2)])
    if rng.random() < 0.4:
        terms = Terms(terms.tenant, terms.service_class, session, float(rng.choice([0.0, 0.05, 1.0])))
    with contextlib.suppress(InvalidRequestError):  # some can never fit; refusing them must change nothing
        core.add(
            rid,
            prompt,
            int(rng.integers(1, 40)),
            n=choices,
            priority=int(rng.integers(3)),
            ignore_eos=bool(rng.integers(2)),
            stop_token_ids=(3,) if rng.random() < 0.3 else (),
            prompt_logprobs=scored,
            terms=terms,
        )
        if scored is not None:
            asked.update(dict.fromkeys(range(rid, rid + choices), scored))
    return rid + choices


def resume_random(
    core: EngineCore, rng: np.random.Generator, next_rid: int, asked: dict[int, int], dropped: set[int]
) -> int:
    """Drop a request's choices that run or wait, or one of them, and have them go on with the output that they have, or
    the first tokens of it."""
    open_rids = [rid for rid in core.asked if rid not in core.finish and rid not in dropped]
    if not open_rids:
        return next_rid
    first = int(rng.choice(open_rids))
    params, _ = core.asked[first]
    old = {}
    for rid in [rid for rid in open_rids if core.asked[rid][0] is params] if rng.random() < 0.5 else [first]:
        has = len(core.outputs.get(rid, []))
        old[rid] = int(rng.integers(has + 1)) if rng.random() < 0.5 else has
        if params.prompt_logprobs is not None and not old[rid]:
            asked[next_rid + len(old) - 1] = params.prompt_logprobs
    for rid in old:
        dropped.add(rid)
        core.abort(rid)
    core.resume(next_rid, old)
    return next_rid + len(old)
