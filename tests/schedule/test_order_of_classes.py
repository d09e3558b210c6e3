"""In which order requests of classes, tenants and common beginnings leave the queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

from asyncengine.config import SchedulingPolicy, ServiceClass
from asyncengine.sampling import SamplingParams
from asyncengine.terms import Terms
from gpu_runner.schedule.ageing import MAX_OVERTAKES, MAX_OVERTAKES_OF_BACKGROUND
from gpu_runner.schedule.orders import FAMILY_TOKENS, MAX_FAMILY_RUN
from gpu_runner.schedule.queues import WaitingQueue
from gpu_runner.schedule.request import Request

POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)


def request(
    rid: int,
    tenant: str = "",
    *,
    service_class: ServiceClass = "interactive",
    length: int = 10,
    begins: int | None = None,
    **changes: Any,
) -> Request:
    """begins: prompts with an equal one are equal; None: like no other."""
    return Request(
        rid=rid,
        tokens=np.full(length, 1000 + rid if begins is None else begins, np.int32),
        prompt_len=length,
        params=SamplingParams(priority=changes.get("priority", 0)),
        seed=0,
        limit=length + 1,
        detok=b"",
        namespace=changes.get("namespace", ""),
        arrival=rid,
        terms=Terms(tenant=tenant, service_class=service_class),
        slot=changes.get("slot", -1),
    )


def starts(queue: WaitingQueue, *, before: Callable[[Request], None] = lambda _: None, most: int = 10**6) -> list[int]:
    """The queue's order. Each start charges its tenant with the prompt."""
    order: list[int] = []
    while len(order) < most and (head := queue.head()) is not None:
        before(head)
        queue.take(head, resumed=not head.fresh)
        queue.tenants.charge_prompt(head.account, head.prompt_len)
        queue.check_integrity()
        order.append(head.rid)
    return order


def queue_of(*requests: Request, policy: SchedulingPolicy = "fcfs") -> WaitingQueue:
    queue = WaitingQueue(policy)
    for each in requests:
        queue.push(each)
    return queue


@pytest.mark.parametrize("policy", POLICIES)
def test_interactive_requests_go_before_those_of_the_background(policy: SchedulingPolicy) -> None:
    queue = queue_of(
        request(0, service_class="background", priority=-5),
        request(1),
        request(2, service_class="background", slot=2),
        request(3),
        policy=policy,
    )
    order = starts(queue)
    assert order[:2] in ([1, 3], [3, 1])
    assert order[-2:] == ([0, 2] if policy == "priority" else [2, 0])


def test_a_stream_of_interactive_requests_lets_the_oldest_of_the_background_through() -> None:
    queue = queue_of(request(0, service_class="background"), request(1, service_class="background"))
    rid = 1

    def one_more(_: Request) -> None:
        nonlocal rid
        rid += 1
        queue.push(request(rid, "b"))

    one_more(request(-1))
    order = starts(queue, before=one_more, most=3 * MAX_OVERTAKES_OF_BACKGROUND)
    assert order.index(0) == MAX_OVERTAKES_OF_BACKGROUND
    assert order.index(1) == 2 * MAX_OVERTAKES_OF_BACKGROUND + 1


def test_what_was_retracted_starts_again_though_others_of_a_better_class_never_end() -> None:
    queue = queue_of(request(0, service_class="background", slot=0))
    rid = 0

    def one_more(_: Request) -> None:
        nonlocal rid
        rid += 1
        queue.push(request(rid))

    one_more(request(-1))
    assert starts(queue, before=one_more, most=100).index(0) == MAX_OVERTAKES_OF_BACKGROUND


def test_older_requests_of_the_background_do_not_make_an_interactive_one_wait_for_their_turns() -> None:
    behind = [request(rid, service_class="background") for rid in range(100)]
    queue = queue_of(*behind, request(100, length=99), policy="shortest")
    rid = 100

    def one_more(_: Request) -> None:
        nonlocal rid
        rid += 1
        queue.push(request(rid, length=1))

    one_more(request(-1))
    assert starts(queue, before=one_more, most=50).index(100) == MAX_OVERTAKES


def test_the_tenant_that_was_served_least_is_next() -> None:
    heavy = [request(rid, "a", length=100) for rid in range(3)]
    light = [request(rid, "b", length=30) for rid in range(3, 10)]
    # a 100, b 30, 60, 90, 120, a 200, b 150, 180, 210, a 300
    assert starts(queue_of(*heavy, *light)) == [0, 3, 4, 5, 6, 1, 7, 8, 9, 2]


def test_equally_served_tenants_take_turns_in_the_order_in_which_they_came() -> None:
    requests = [request(rid, "abc"[rid // 3]) for rid in range(9)]
    assert starts(queue_of(*requests)) == [0, 3, 6, 1, 4, 7, 2, 5, 8]


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 1, 2]), ("shortest", [1, 2, 0]), ("longest", [0, 2, 1])])
def test_within_a_tenant_the_policy_decides(policy: SchedulingPolicy, order: list[int]) -> None:
    requests = [request(0, "a", length=60), request(1, "a", length=10), request(2, "a", length=20)]
    assert starts(queue_of(*requests, policy=policy)) == order


def test_a_priority_is_worth_nothing_against_another_tenant() -> None:
    requests = [*(request(rid, "a", priority=-9, length=100) for rid in range(3)), request(3, "b", priority=9)]
    assert starts(queue_of(*requests, policy="priority")) == [0, 3, 1, 2]


def test_what_has_run_goes_first_within_its_tenant() -> None:
    queue = queue_of(request(0, "a"), request(1, "b"), request(2, "a", slot=2))
    assert starts(queue) == [2, 1, 0]


@pytest.mark.parametrize("seed", range(5))
def test_the_oldest_of_each_class_is_among_so_many_starts_whatever_comes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    queue = queue_of(policy=POLICIES[seed % 4])
    rid = 0
    # starts since one of the class was its oldest: of the same class, and interactive ones before the background
    own, interactive = [0, 0], 0
    most = [0, 0, 0]
    for turn in range(4000):
        share = (0.3, 0.02)[turn // 500 % 2]
        for _ in range(int(rng.integers(3)) if len(queue) < 60 else 0):
            class_ = get_args(ServiceClass)[int(rng.random() < share)]
            begins = int(rng.integers(3))
            tenant = "abc"[min(2, int(rng.exponential(0.7)))]
            priority = int(rng.integers(3))
            queue.push(request(rid, tenant, service_class=class_, length=70, begins=begins, priority=priority))
            rid += 1
        waiting = {each.rid: each.background for each in queue}
        oldest = [min((each for each in waiting if waiting[each] == behind), default=-1) for behind in (False, True)]
        for started in starts(queue, most=1):
            behind = waiting[started]
            own[behind] = 0 if started == oldest[behind] else own[behind] + 1
            interactive = 0 if oldest[True] in (-1, started) else interactive + (not behind)
            most = [max(pair) for pair in zip(most, [*own, interactive], strict=True)]
    assert max(most[:2]) <= MAX_OVERTAKES
    assert MAX_OVERTAKES < most[2] <= MAX_OVERTAKES_OF_BACKGROUND


# ------------------------------------------------------------------------------------------------- equal beginnings


def test_requests_that_begin_like_one_that_started_come_next() -> None:
    requests = [request(rid, length=FAMILY_TOKENS + rid, begins=rid % 3) for rid in range(9)]
    assert starts(queue_of(*requests)) == [0, 3, 6, 1, 4, 7, 2, 5, 8]


@pytest.mark.parametrize("policy", ["shortest", "longest"])
def test_policies_by_length_keep_to_it(policy: SchedulingPolicy) -> None:
    requests = [request(rid, length=FAMILY_TOKENS + rid, begins=rid % 3) for rid in range(9)]
    assert starts(queue_of(*requests, policy=policy)) == sorted(range(9), reverse=policy == "longest")


def test_short_prompts_other_namespaces_and_other_priorities_are_no_family() -> None:
    short = [request(rid, length=FAMILY_TOKENS - 1, begins=rid % 2) for rid in range(4)]
    assert starts(queue_of(*short)) == [0, 1, 2, 3]
    apart = [request(rid, length=99, begins=rid % 2, namespace=str(rid // 2)) for rid in range(4)]
    assert starts(queue_of(*apart)) == [0, 1, 2, 3]
    urgent = [request(rid, length=99, begins=rid % 2, priority=-(rid // 2)) for rid in range(4)]
    assert starts(queue_of(*urgent, policy="priority")) == [2, 3, 0, 1] != [2, 0, 3, 1]


def test_a_family_passes_the_first_of_the_others_so_often_and_no_more() -> None:
    family = [request(rid, length=FAMILY_TOKENS, begins=7) for rid in range(2, 40)]
    queue = queue_of(request(0, length=FAMILY_TOKENS, begins=7), request(1), *family)
    assert starts(queue).index(1) == 1 + MAX_FAMILY_RUN


def test_what_has_run_goes_before_a_family() -> None:
    queue = queue_of(*(request(rid, length=FAMILY_TOKENS, begins=rid % 2) for rid in range(4)))
    assert starts(queue, most=1) == [0]
    queue.push(request(9, slot=9))
    assert starts(queue) == [9, 2, 1, 3]


def test_a_family_is_forgotten_with_its_last_member() -> None:
    queue = queue_of(*(request(rid, length=FAMILY_TOKENS, begins=1) for rid in range(3)))
    assert starts(queue, most=1) == [0]
    for rid in (1, 2):
        assert queue.remove(rid) is not None
        queue.check_integrity()
    queue.push(request(5))
    assert starts(queue) == [5]
